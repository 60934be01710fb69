"""Programs of an engine on a GPU: weights and caches in its memory, steps captured as graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specc.artifact.manifest import Manifest
from specc.errors import ConfigError, EngineError
from specc.runtime.backends.captured.captured_step import CapturedStep
from specc.runtime.backends.captured.graph_device import GraphDevice
from specc.runtime.backends.captured.step_buffers import StepBuffers
from specc.runtime.backends.cuda.aot_program import load_model
from specc.runtime.backends.cuda.choose_products import DeviceLostError, Timer, choose_products
from specc.runtime.backends.cuda.kept_products import Conditions, KeptProducts
from specc.runtime.backends.mapped_weights import MappedWeights
from specc.runtime.backends.program import ModelProgram, read_json
from specc.runtime.backends.rectangular.model import RectangularModel
from specc.runtime.execution.batch_rows import last_tokens_of
from specc.runtime.scheduling.kv_cache import KVCache
from specc.speculation.plans import SUFFIX, VOTE, SpecPlan
from specc.system.extras import install_command

LayerCaches = Sequence[tuple[Tensor, Tensor]]


class DeviceModel:
    """A model's program for passes between steps: they launch on its device, whichever is current.

    Args:
        program: on the device.
        graphs: the device.
    """

    def __init__(self, program: ModelProgram | RectangularModel, graphs: GraphDevice) -> None:
        self.name = program.name
        self.weights = program.weights
        self._program = program
        self._graphs = graphs

    def __call__(self, *inputs: Tensor | None) -> Tensor:
        with self._graphs.active():
            return self._program(*inputs)


class DeviceOperators:
    """The `specc::` operators for calls between steps: they launch on the engine's device.

    Args:
        graphs: the device.
    """

    def __init__(self, graphs: GraphDevice) -> None:
        self._graphs = graphs

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operator = getattr(torch.ops.specc, name)

        def launch(*args: Any) -> Any:
            with self._graphs.active():
                return operator(*args)

        return launch


@dataclass(frozen=True)
class CaptureLimits:
    """What capturing graphs while an engine loads may cost; the rest is captured at first use.

    Args:
        max_seconds: of capturing. A step runs once before its capture, and what that takes to
            compile kernels is not counted: it would be needed without graphs, too. Below 0
            nothing is captured while the engine loads.
        max_bytes: of the device's memory; weights, caches and the memory of a pass come first.
        sizes: batch sizes to capture, ascending; None is powers of two up to the largest batch.
    Raises:
        ConfigError: no sizes, or sizes that do not ascend from 1 on.
    """

    max_seconds: float = 30.0
    max_bytes: int = 4 << 30
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        sizes = self.sizes
        if sizes is not None and (not sizes or list(sizes) != sorted({*sizes}) or sizes[0] < 1):
            raise ConfigError(
                f"capture sizes {list(sizes)}",
                "batch sizes that ascend, each at least 1",
                "for example 1, 2, 4, 8",
            )

    @classmethod
    def lazy(cls) -> CaptureLimits:
        """Nothing while the engine loads: for a few steps of few batch sizes."""
        return cls(max_seconds=-1.0)

    def buckets(self, max_batch: int) -> tuple[int, ...]:
        """Batch sizes that get graphs; the last one is `max_batch`."""
        if self.sizes is None:
            powers = (1 << i for i in range(max_batch.bit_length()))
            return tuple(dict.fromkeys([*(size for size in powers if size < max_batch), max_batch]))
        return (*(size for size in self.sizes if size < max_batch), max_batch)


def load_programs(
    path: Path,
    manifest: Manifest,
    cache: KVCache,
    caches: Mapping[str, LayerCaches],
    graphs: GraphDevice,
    limits: CaptureLimits,
) -> tuple[dict[str, DeviceModel], dict[str, CapturedStep]]:
    """Models and steps of an engine on a device; what is captured at once is up to `limits`.

    Args:
        path: the engine directory.
        manifest: its manifest.
        cache: on the device.
        caches: model name → its layers' k and v caches.
        graphs: the device.
        limits: of capturing.
    Raises:
        EngineError: a file is absent or cannot be read.
    """
    models = {
        model.name: load_model(
            path,
            model.dir,
            _to_device(path / model.weights_file, graphs.device),
            caches[model.name],
            graphs.device,
            {name: entry.sha256 for name, entry in manifest.files.items()},
        )
        for model in manifest.models
    }
    choose_on_gpu(models.values(), graphs)
    max_batch = cache.shape.max_num_seqs
    buffers = make_buffers(graphs, cache, [entry.plan for entry in manifest.plans], len(models))
    steps = {
        plan.name: CapturedStep(
            read_json(path / plan.file),
            models,
            cache.environment,
            buffers,
            graphs,
            limits.buckets(max_batch),
        )
        for plan in manifest.plans
    }
    # the plan that most steps run comes first
    order = sorted(steps, key=lambda name: name != manifest.default_plan)
    capture_within(limits, [steps[name] for name in order], graphs)
    return {name: DeviceModel(model, graphs) for name, model in models.items()}, steps


def choose_on_gpu(models: Iterable[ModelProgram], graphs: GraphDevice) -> list[dict[str, Any]]:
    """Measure which products are the fastest, before a step is captured with them.

    What an earlier load has measured on such a GPU is not measured again. Elsewhere than on a GPU
    nothing is measured, and the library's stay.

    Returns:
        what was measured now, see `choose_products`.
    """
    if graphs.device.type != "cuda":
        return []
    return choose_and_keep(models, graphs, KeptProducts(Conditions.of(graphs.device)))


def choose_and_keep(
    models: Iterable[ModelProgram],
    graphs: GraphDevice,
    kept: KeptProducts,
    timer: Timer | None = None,
) -> list[dict[str, Any]]:
    """Take what is kept, measure what is left, and keep that, too.

    Args:
        models: on the device.
        graphs: the device.
        kept: for this device.
        timer: what measures; None replays graphs.
    Returns:
        what was measured now, see `choose_products`.
    Raises:
        DeviceLostError: as `choose_products`; what was found is kept, and the next load goes on.
    """
    kept.take()
    try:
        found = choose_products(models, graphs, timer)
    except DeviceLostError as error:
        kept.add(error.report)
        raise
    kept.add(found)
    return found


def make_buffers(
    graphs: GraphDevice, cache: KVCache, plans: Sequence[SpecPlan], num_models: int
) -> StepBuffers:
    """Inputs and results that hold the steps of all these plans."""
    depth = max(plan.max_depth for plan in plans)
    return StepBuffers(
        graphs,
        cache.shape.max_num_seqs,
        cache.shape.blocks_per_sequence,
        2 + depth + 1 + num_models - 1,
        num_last=last_tokens_of(plans),
        num_votes=max(len(plan.drafts) if plan.combine == VOTE else 0 for plan in plans),
        num_proposals=max(depth if SUFFIX in plan.drafts else 0 for plan in plans),
    )


def cuda_device() -> GraphDevice:
    """The GPU of this process, with the Triton kernels registered.

    Raises:
        EngineError: torch sees no GPU, or there is no Triton.
    """
    if not torch.cuda.is_available():
        raise EngineError(
            "an engine for CUDA, and no GPU that torch can use",
            "an NVIDIA GPU and a CUDA build of torch",
            "run it where there is one (specc doctor tells what this machine has), or run its"
            " graphs with --backend eager",
        )
    try:
        from specc.kernels.cuda.register import register
    except ImportError as error:
        raise EngineError(
            f"no Triton: {error}", "triton, which runs the kernels", install_command("cuda")
        ) from error
    from specc.runtime.backends.cuda.graphs import CudaGraphs

    register("CUDA")
    return CudaGraphs(torch.cuda.current_device())


def capture_within(
    limits: CaptureLimits, steps: Sequence[CapturedStep], graphs: GraphDevice
) -> int:
    """Capture steps, large batches first so that smaller graphs fit into their memory.

    Returns:
        number of graphs; the remaining ones would exceed the limits and are captured when used.
    """
    seconds, free = 0.0, graphs.free_bytes()
    count = 0
    for size in sorted({bucket for step in steps for bucket in step.buckets}, reverse=True):
        for step in steps:
            if seconds > limits.max_seconds:
                return count
            if free - graphs.free_bytes() > limits.max_bytes:
                return count
            if size in step.buckets:
                seconds += step.capture(size)
                count += 1
    return count


def _to_device(file: Path, device: torch.device) -> dict[str, Tensor]:
    return {key: weight.to(device) for key, weight in MappedWeights(file).items()}
