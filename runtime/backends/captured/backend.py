"""What backends share that capture their steps as graphs of a GPU."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from specc.artifact.manifest import Manifest
from specc.errors import EngineError
from specc.runtime.backends.base import LoadedPrograms, LoadLimits, RuntimeBackend
from specc.runtime.backends.capture_limits import CaptureLimits
from specc.runtime.backends.captured.captured_runner import CapturedRunner
from specc.runtime.backends.captured.captured_step import CapturedStep
from specc.runtime.backends.captured.device_link import DeviceLink
from specc.runtime.backends.captured.engine_steps import load_steps
from specc.runtime.backends.cuda.graphs import choose_gpu, cuda_device
from specc.runtime.backends.device_models import DeviceModels, DeviceProgram
from specc.runtime.backends.engine_cache import make_cache, rows_of
from specc.runtime.backends.graph_device import GraphDevice
from specc.runtime.backends.offload_budget import budget_of
from specc.runtime.scheduling.kv_cache import KVCache
from specc.system.files import format_bytes


class CapturedBackend(RuntimeBackend):
    """Loads the models of an engine; its steps are captured.

    `skips_filters`: batches without filters have graphs of their own, see `CapturedStep`; ranks
    that follow capture their part of these, too.
    """

    skips_filters: ClassVar[bool] = False

    def take_device(self, local_rank: int, num_local: int) -> None:
        """See `RuntimeBackend.take_device`: a GPU for each rank of this machine."""
        choose_gpu(local_rank, num_local)

    @abstractmethod
    def load_models(
        self,
        path: Path,
        manifest: Manifest,
        cache: KVCache,
        graphs: GraphDevice,
        rank: int = 0,
        weights_budget: int | None = None,
    ) -> DeviceModels:
        """The models of an engine on a device.

        Args:
            path: the engine directory.
            manifest: its manifest.
            cache: on the device.
            graphs: the device.
            rank: whose part of the models that are cut is loaded.
            weights_budget: bytes that weights of the target may take there; None is all of them.
        Raises:
            ConfigError: it is less than they can do with.
            EngineError: a file is absent, cannot be read, or does not fit this machine.
        """

    def prepare_steps(
        self,
        steps: Mapping[str, CapturedStep],
        manifest: Manifest,
        cache: KVCache,
        graphs: GraphDevice,
    ) -> None:
        """Look at the steps of an engine on one device before any of them is captured.

        Args:
            steps: plan → step.
            manifest: of the engine.
            cache: on the device, which nobody uses yet.
            graphs: the device.
        """

    def load(self, path: Path, manifest: Manifest, limits: LoadLimits) -> LoadedPrograms:
        """See `RuntimeBackend.load`; what does not fit the GPU is refused before it is read."""
        graphs: GraphDevice = cuda_device()
        budget = None
        if limits.offload_weights is not None:
            budget = budget_of(manifest, limits, graphs.free_bytes())
        capture = fit_device(
            manifest,
            graphs,
            limits.capture or CaptureLimits(),
            limits.max_num_seqs,
            limits.kv_cache_tokens,
            budget,
        )
        cache = make_cache(manifest, limits, graphs.device, rows_of(manifest))
        models = self.load_models(path, manifest, cache, graphs, limits.rank, budget)
        if limits.ranks is not None:
            graphs, models = limits.ranks.join(graphs, models)
        # collectives, copies of weights and drafts run on streams beside that of the step
        is_alone = limits.ranks is None and budget is None and not limits.overlaps
        # below 0 nothing is captured while the engine loads
        can_measure = is_alone and capture.max_seconds >= 0

        def prepare(steps: Mapping[str, CapturedStep]) -> None:
            if can_measure:
                self.prepare_steps(steps, manifest, cache, graphs)

        # a rank that follows has none
        steps = (
            load_steps(
                path, manifest, models.within, cache, graphs, capture, models.adapt,
                skips_filters=self.skips_filters, overlaps=limits.overlaps,
                before_capture=prepare,
            )
            if manifest.plans
            else {}
        )  # fmt: skip
        return LoadedPrograms(
            {name: DeviceModel(model, graphs) for name, model in models.between.items()},
            dict(steps),
            cache,
            DeviceOperators(graphs),
            DeviceLink(graphs),
            runner_type=CapturedRunner,
            self_drafts={
                entry.name: DeviceModel(cast(DeviceProgram, models.within[entry.name]), graphs)
                for entry in manifest.self_drafts
            },
        )


class DeviceModel:
    """A model's program for passes between steps: they launch on its device, whichever is current.

    Args:
        program: on the device.
        graphs: the device.
    """

    def __init__(self, program: DeviceProgram, graphs: GraphDevice) -> None:
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

        def launch(*args: Any, **options: Any) -> Any:
            with self._graphs.active():
                return operator(*args, **options)

        return launch


def fit_device(
    manifest: Manifest,
    graphs: GraphDevice,
    limits: CaptureLimits,
    max_num_seqs: int | None = None,
    kv_cache_tokens: int | None = None,
    weights_budget: int | None = None,
) -> CaptureLimits:
    """Compare an engine's memory plan with what is free, before anything is allocated.

    Args:
        manifest: of the engine.
        graphs: the device.
        limits: of capturing.
        max_num_seqs: sequences that caches are made for; None is what the engine allows.
        kv_cache_tokens: rows of all sequences together; None is the worst case of each.
        weights_budget: bytes that weights of the target take; None is all of them.
    Returns:
        the limits, with graphs held to what weights, caches and passes leave free: a step that
        gets no graph while the engine loads runs all the same.
    Raises:
        EngineError: weights, caches and the values of a pass need more than there is.
    """
    free = graphs.free_bytes()
    plan = manifest.memory_plan.values()
    most = manifest.limits.max_batch_size
    num_seqs = min(max_num_seqs or most, most)
    weights = sum(entry.weights for entry in plan)
    if weights_budget is not None:
        whole = manifest.memory_plan[manifest.models[0].name].weights
        weights -= max(0, whole - weights_budget)
    rows = manifest.limits.cache_rows(num_seqs, kv_cache_tokens)
    caches = sum(entry.cache for entry in plan) * rows // manifest.limits.cache_rows()
    # states are each sequence's own; those of prefixes are as many as the engine says
    states = sum(entry.states for entry in plan) * num_seqs // most
    states += sum(entry.checkpoints for entry in plan)
    passes = sum(entry.logits + entry.workspace for entry in plan)
    needed = weights + caches + states + passes
    if needed > free:
        raise EngineError(
            f"{format_bytes(free)} of memory free on {graphs.device}",
            f"{format_bytes(needed)}: weights {format_bytes(weights)}, caches"
            f" {format_bytes(caches)} for {num_seqs} sequences of"
            f" {manifest.limits.max_seq_len} tokens,"
            + (f" states {format_bytes(states)}," if states else "")
            + f" passes {format_bytes(passes)}",
            "lower max_num_seqs, compile with a smaller --max-batch-size or --max-seq-len, or end"
            " what else uses the GPU",
        )
    return replace(limits, max_bytes=min(limits.max_bytes, free - needed))
