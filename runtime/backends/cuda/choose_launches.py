"""Whether the kernels of a step start before the one before them has ended: measured at load.

What that is, and why it is safe, says `specc.kernels.cuda.dependent`. Before the first capture of
an engine each plan's step is captured both ways, with its smallest batch and its largest, each with
the products that were chosen for such launches (`choose_products`). Dependent launches are chosen
where the step was faster with both; else launches are ordinary. Results and caches have to be those
of the same products in ordinary launches, bit for bit: two products differ by roundings, two ways
of launching one do not. Nothing else of the engine runs meanwhile, and caches are zeros again
afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from specc.artifact.kv_rows import holds_quantized
from specc.errors import FaultError
from specc.kernels.reference.kv_rows import columns_of, store_rows
from specc.runtime.backends.captured.captured_step import CapturedStep
from specc.runtime.backends.cuda.kept_measurements import KeptLaunches
from specc.runtime.backends.graph_device import Graph, GraphDevice
from specc.runtime.backends.step_io import STATES, StepInputs
from specc.runtime.execution.state_rows import state_rows
from specc.runtime.scheduling.kv_cache import KVCache
from specc.sampling.rows import Value, Word

# set to 0: launches are ordinary, and nothing is measured
SWITCH = "SPECC_DEPENDENT_LAUNCHES"
DEPENDENT, ORDINARY = "dependent", "ordinary"
# ordinary launches of the products of dependent ones, where these are others
ALIKE = "ordinary, products of dependent"
# CUDA of torch and of the driver: programmatic edges of graphs are in 12.3 and newer
_LEAST_CUDA = (12, 3)
# the driver's library, which a process with a GPU has loaded
_DRIVER = "libcuda.so.1"
# a step that gains less may be as fast either way
_LEAST_GAIN = 0.002
# a race on an H200 showed in one or two of five replays
_ROUNDS, _REPLAYS, _CHECKS = 5, 5, 20
# committed rows of a sequence, and of all, while steps are measured: whole key blocks of attention,
# so that a row which is written again is the last of one
_CONTEXT, _ALL_ROWS = 256, 2048
_SEED = 11


class LaunchWarning(UserWarning):
    """Dependent launches do not work here, and are not used."""


class DependentFault(FaultError):
    """The device takes no more work, and dependent launches were what it was given last."""


# seconds of some replays in a row
Timer = Callable[[Callable[[], object]], float]
# what this process has measured so far, as `choose_launches` returns it
measured: list[dict[str, Any]] = []


def can_launch_dependent(device: torch.device) -> bool:
    """Whether device, driver and torch have dependent launches in graphs, and they are wanted.

    Without them kernels are compiled without any trace of them.
    """
    if device.type != "cuda" or os.environ.get(SWITCH) == "0":
        return False
    from specc.kernels.cuda.dependent import LEAST_CAPABILITY

    major, minor = torch.cuda.get_device_capability(device)
    own = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    return (
        10 * major + minor >= LEAST_CAPABILITY
        and own >= _LEAST_CUDA
        and driver_cuda() >= _LEAST_CUDA
    )


def driver_cuda() -> tuple[int, int]:
    """The newest CUDA of the driver, (major, minor); (0, 0) where it does not say.

    Torch has no function for it in every version, so the driver itself is asked.
    """
    number = ctypes.c_int()
    try:
        status = ctypes.CDLL(_DRIVER).cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return 0, 0
    return (0, 0) if status else (number.value // 1000, number.value % 1000 // 10)


def choose_launches(
    steps: Mapping[str, CapturedStep],
    cache: KVCache,
    graphs: GraphDevice,
    kept: KeptLaunches | None = None,
    timer: Timer | None = None,
) -> list[dict[str, Any]]:
    """Measure the steps of an engine of which nothing is captured yet, and choose for each plan.

    Args:
        steps: plan → step.
        cache: of the engine, which nobody uses.
        graphs: the device.
        kept: what earlier loads have found; None keeps nothing.
        timer: what measures; None takes the host's clock.
    Returns:
        what was found now, ready for JSON: `plan`; `batches`, for each its size `batch`, `ms` of a
        step by launches (see `ALIKE`), and `differ`, replays whose results were others than those
        of the same products; and `chosen`.
    Raises:
        FaultError: the device takes no more work; after dependent launches, the next load leaves
            them out.
    """
    report = []
    for name, step in steps.items():
        item = kept.get(name) if kept else None
        if item is None:
            item = {"plan": name, "batches": [], "chosen": ORDINARY}
            try:
                for found in _measure(step, cache, graphs, timer or _timer(graphs)):
                    item["batches"].append(found)
                    item["chosen"] = DEPENDENT if _is_better(found) else ORDINARY
            except DependentFault:
                if kept:
                    kept.add(name, item | {"chosen": ORDINARY, "lost": True})
                raise
            # what did not run, or had no room in the cache, is tried again by the next load
            batches = item["batches"]
            if kept and batches and all(found["ms"] or found["differ"] for found in batches):
                kept.add(name, item)
            report.append(item)
        step.launches_dependent = item["chosen"] == DEPENDENT
    measured.extend(report)
    return report


def _is_better(found: Mapping[str, Any]) -> bool:
    ms = found["ms"]
    # neither was timed where results differ
    return DEPENDENT in ms and ms[DEPENDENT] < (1 - _LEAST_GAIN) * ms[ORDINARY]


def _measure(
    step: CapturedStep, cache: KVCache, graphs: GraphDevice, timer: Timer
) -> Iterator[dict[str, Any]]:
    """What was found with the smallest batch, then, if that was better, with the largest."""
    for bucket in sorted({step.buckets[0], step.buckets[-1]}):
        trial = _Trial.of(step, cache, graphs, bucket)
        if trial is None:
            return
        found = _try_both(trial, graphs, timer)
        yield found
        if not _is_better(found):
            return


def _try_both(trial: _Trial, graphs: GraphDevice, timer: Timer) -> dict[str, Any]:
    """What was found; `ms` is empty where something failed, memory ran out for example."""
    found: dict[str, Any] = {"batch": trial.bucket, "ms": {}, "differ": 0}
    try:
        with trial:
            _compare(trial, timer, found)
    except Exception as error:
        try:
            graphs.record_event().synchronize()
        except Exception as fault:
            is_dependent = trial.way == DEPENDENT
            raise (DependentFault if is_dependent else FaultError)(
                f"a device that takes no work after {trial.way} launches of plan"
                f" {trial.step.plan.name}: {fault}",
                "kernels that run on this device",
                "load the engine again: this was noted, and launches will be ordinary. Report it"
                if is_dependent
                else "report it; --backend eager runs the engine without these kernels",
            ) from fault
        _warn(trial, f"after {trial.way} launches: {error}")
    return found


def _compare(trial: _Trial, timer: Timer, found: dict[str, Any]) -> None:
    from specc.kernels.cuda import few_rows

    differs = any(choice.differs for choice in few_rows.choices.values())
    alike = trial.capture(is_dependent=False, products=DEPENDENT if differs else ORDINARY)
    wanted = trial.outcome(alike)
    dependent = trial.capture(is_dependent=True, products=DEPENDENT)
    found["differ"] = sum(not trial.is_outcome(dependent, wanted) for _ in range(_CHECKS))
    if found["differ"]:
        _warn(trial, f"{found['differ']} of {_CHECKS} replays give other results")
        return
    ways = {ORDINARY: alike, DEPENDENT: dependent}
    if differs:
        ordinary = trial.capture(is_dependent=False, products=ORDINARY)
        ways = {ORDINARY: ordinary, ALIKE: alike, DEPENDENT: dependent}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(_ROUNDS):
        for way, graph in ways.items():
            trial.begin()
            trial.way = ORDINARY if way == ORDINARY else DEPENDENT
            seconds[way].append(timer(graph.replay) / _REPLAYS)
    found["ms"] = {way: 1e3 * statistics.median(own) for way, own in seconds.items()}


def _warn(trial: _Trial, text: str) -> None:
    warnings.warn(
        f"dependent launches are not used for plan {trial.step.plan.name}: {text}",
        LaunchWarning,
        stacklevel=6,
    )


def _timer(graphs: GraphDevice) -> Timer:
    def seconds(replay: Callable[[], object]) -> float:
        graphs.record_event().synchronize()
        begin = time.perf_counter()
        for _ in range(_REPLAYS):
            replay()
        graphs.record_event().synchronize()
        return time.perf_counter() - begin

    return seconds


class _Trial:
    """A step on rows that it may write, of a cache that nobody uses yet.

    Args:
        step: nothing of it is captured yet.
        regions: of the caches, all that the step reads and writes.
        graphs: the device.
        inputs: of the step.
    """

    def __init__(
        self, step: CapturedStep, regions: list[Tensor], graphs: GraphDevice, inputs: StepInputs
    ) -> None:
        self.step = step
        self.bucket = len(inputs.rows)
        self._regions = regions
        self._graphs = graphs
        self._inputs = inputs
        # whose launches, or products, were run last
        self.way = ORDINARY
        self._drawn: list[Tensor] = []
        self._kept: list[Tensor | None] = []

    @classmethod
    def of(
        cls, step: CapturedStep, cache: KVCache, graphs: GraphDevice, bucket: int
    ) -> _Trial | None:
        """None: the cache has too few rows for that, or none that are told by blocks."""
        shape = cache.shape
        # while it is timed a step goes on from where the last one has left
        grown = (_REPLAYS + 1) * step.plan.num_rows
        # tables of positions end where sequences do
        context = min(_CONTEXT, _ALL_ROWS // bucket, shape.max_seq_len - grown)
        blocks = math.ceil((context + grown) / shape.rows_per_block)
        if context < 1 or blocks * bucket > shape.num_blocks or step.by_block:
            return None
        rows = min(context + grown, shape.rows_per_block)
        # of sequences, not of blocks
        own = {} if cache.states is None else cache.states.environment
        regions = [
            slab[:, :bucket]
            if name in own
            else slab[:, :, : blocks * bucket, :rows]
            if slab.dim() > 4
            else slab[: blocks * bucket, :rows]
            if name == "history"
            else slab
            for name, slab in step.slabs.items()
        ]
        table = torch.zeros(bucket, shape.blocks_per_sequence, dtype=torch.int32)
        table[:, :blocks] = torch.arange(blocks * bucket, dtype=torch.int32).view(bucket, blocks)
        last = [*range(1, 1 + step.buffers.last_tokens.shape[1]), context]
        values = torch.zeros(bucket, len(Value))
        values[:, [Value.TOP_P, Value.REPETITION]] = 1.0
        words = torch.zeros(bucket, len(Word), dtype=torch.int64)
        extra = {STATES: state_rows(range(bucket))} if own else {}
        inputs = StepInputs([last] * bucket, table, values, words, extra)
        return cls(step, regions, graphs, inputs)

    def __enter__(self) -> _Trial:
        dice = torch.Generator().manual_seed(_SEED)
        with torch.inference_mode():
            for region in self._regions:
                # as they are drawn once for all layers and blocks, they take no memory to speak of
                sizes = (*region.shape[-3:-1], columns_of(region))
                drawn = (
                    store_rows(torch.randn(sizes, generator=dice), region.dtype)
                    if region.is_floating_point() or holds_quantized(region.dtype)
                    else torch.randint(0, 8, sizes, generator=dice)
                )
                self._drawn.append(drawn.to(region.device, region.dtype).expand_as(region))
                # caches are zeros, and what has a row for each sequence is small
                self._kept.append(None if region.dim() > 2 else region.clone())
        return self

    def __exit__(self, *error: object) -> None:
        drawn, self._drawn = self._drawn, []
        if not drawn:
            return
        with torch.inference_mode(), self._graphs.active(), contextlib.suppress(RuntimeError):
            # a device that is lost says so again where it is asked
            for region, kept in zip(self._regions, self._kept, strict=True):
                if kept is None:
                    region.zero_()
                else:
                    region.copy_(kept)

    def capture(self, is_dependent: bool, products: str) -> Graph:
        """With the products that were chosen for these launches, `ORDINARY` or `DEPENDENT`."""
        from specc.kernels.cuda import few_rows

        self.way = DEPENDENT if is_dependent or products == DEPENDENT else ORDINARY
        with few_rows.chosen_for(products == DEPENDENT):
            return self.step.capture_alone(self.bucket, is_dependent)

    @torch.inference_mode()
    def begin(self) -> None:
        """The same inputs and caches as ever."""
        with self._graphs.active():
            for region, drawn in zip(self._regions, self._drawn, strict=True):
                region.copy_(drawn)
            self.step.buffers.copy_from(self._inputs, self.bucket)

    @torch.inference_mode()
    def outcome(self, graph: Graph) -> list[Tensor]:
        """Results and caches after one replay."""
        return [value.clone() for value in self._after(graph)]

    @torch.inference_mode()
    def is_outcome(self, graph: Graph, wanted: list[Tensor]) -> bool:
        """Whether one replay gives the same, bit for bit: a NaN is itself, and -0 is not 0."""
        found = zip(self._after(graph), wanted, strict=True)
        return all(bool((_bits(own) == _bits(other)).all()) for own, other in found)

    def _after(self, graph: Graph) -> list[Tensor]:
        self.begin()
        with self._graphs.active():
            graph.replay()
            self._graphs.record_event().synchronize()
        return [self.step.buffers.results[: self.bucket], *self._regions]


def _bits(value: Tensor) -> Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return value.view(kinds[value.element_size()]) if value.is_floating_point() else value
