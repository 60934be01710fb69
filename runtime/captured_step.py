"""A plan's step as captured graphs: one replay a step, no Python and no host read inside."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from specc.config import SpecPlan
from specc.errors import EngineError
from specc.graph_io import graph_from_json
from specc.runtime.bound_step import BoundStep
from specc.runtime.failed_operator import OperatorError
from specc.runtime.graph_device import Graph, GraphDevice
from specc.runtime.place import place
from specc.runtime.program import BeforeAccept, StepResult, check_schema, draft_len_name
from specc.runtime.step_bounds import check_step_bounds
from specc.runtime.step_buffers import HostResults, StepBuffers


class CaptureWarning(UserWarning):
    """A step runs operator by operator, because it could not be captured."""


class PendingStep(NamedTuple):
    """A step that was queued; `result` waits for it."""

    step: CapturedStep
    batch: int
    begin_s: float
    results: HostResults

    @property
    def can_go_on(self) -> bool:
        """Whether `submit_next` is the step behind this one: queued without a word of the host.

        Not with a hook, which reads what the device has made, nor where another step was queued
        meanwhile: the device goes on from that one.
        """
        return self.step.is_newest(self.results) and self.step.is_replayed(self.batch)

    def result(self) -> StepResult:
        """Once; the seconds are those since the step before it ended, or it was queued."""
        values = self.results.wait()
        return self.step.to_result(values[: self.batch], self.step.seconds_since(self.begin_s))


class CapturedStep:
    """One plan's step, captured for each batch bucket; see `StepProgram` for the contract.

    A bucket is a number of sequences; rows that a batch does not fill are padding, which writes
    nothing. A bucket is captured as one graph, or, while `before_accept` is set, as one graph for
    each stage.

    Args:
        program: content of `steps/<plan>.json`.
        models: name → program on the device.
        slabs: the caches under their names in the environment.
        buffers: inputs and results; common to the steps of an engine.
        graphs: the device.
        buckets: sizes, ascending; the last is the largest batch.
    Raises:
        EngineError: a malformed program.
    """

    def __init__(
        self,
        program: Mapping[str, Any],
        models: Mapping[str, nn.Module],
        slabs: Mapping[str, Tensor],
        buffers: StepBuffers,
        graphs: GraphDevice,
        buckets: Sequence[int],
    ) -> None:
        check_schema(program, "a step program")
        self.plan = SpecPlan(program["plan"]["name"], tuple(program["plan"]["widths"]))
        self.before_accept: BeforeAccept | None = None
        self.buckets = tuple(buckets)
        self._buffers = buffers
        self._graphs = graphs
        self._slabs = slabs
        self._constants = {
            name: torch.tensor(
                entry["values"], dtype=getattr(torch, entry["dtype"]), device=graphs.device
            )
            for name, entry in program.get("constants", {}).items()
        }
        self._stages = {
            stage["name"]: place(graph_from_json(stage["graph"], modules=models), graphs.device)
            for stage in program["stages"]
        }
        for stage in self._stages.values():
            # the module and its graph name each other: weights would outlive the engine until the
            # garbage collector comes by
            stage.graph.owning_module = None
        (output,) = self._stages["accept_commit"].graph.find_nodes(op="output")
        names = map(draft_len_name, itertools.count())
        self.num_drafts = sum(1 for _ in itertools.takewhile(output.args[0].__contains__, names))
        # a capture's results stay where it put them, so each way of capturing has its own
        self._bound: dict[tuple[int, bool], BoundStep] = {}
        self._captured: dict[tuple[int, bool], list[Graph] | None] = {}

    @property
    def is_split(self) -> bool:
        """A hook stands between the stages."""
        return self.before_accept is not None

    def is_captured(self, bucket: int) -> bool:
        """Whether a step of this size is replayed; False before `capture`."""
        return self._captured.get((bucket, self.is_split)) is not None

    def capture(self, bucket: int) -> float:
        """Capture a bucket where that has not been tried; a warning tells where it fails.

        Returns:
            seconds of capturing, without the run before it, which compiles kernels.
        Raises:
            EngineError: the step cannot run at all.
        """
        key = (bucket, self.is_split)
        if key in self._captured:
            return 0.0
        # padding alone: the run before the capture writes no cache row
        with self._graphs.active(), self._buffers.kept_inputs(bucket):
            bound = self._bind(bucket)
            parts = bound.parts if self.is_split else [bound.run]
            self._warm_up(parts, bucket)
            begin_s = time.perf_counter()
            self._bound[key], self._captured[key] = bound, self._try_capture(parts, bucket)
            return time.perf_counter() - begin_s

    def submit(self, rows: Sequence[tuple[int, int, int]], block_table: Tensor) -> PendingStep:
        """Queue a step; nothing waits for the device.

        Args:
            rows: of each sequence, its last two tokens and its committed rows.
            block_table: [B, n] int32 on the host.
        Raises:
            EngineError: the step would leave the cache, or cannot run at all.
        """
        begin_s = time.perf_counter()
        bucket = self.bucket_of(len(rows))
        num_blocks, rows_per_block = next(iter(self._slabs.values())).shape[2:4]
        lengths, num_nodes = [row[2] for row in rows], self.plan.tree.num_nodes
        check_step_bounds(lengths, block_table, num_nodes, num_blocks, rows_per_block)
        self.capture(bucket)
        with self._graphs.active():
            self._buffers.copy_from(rows, block_table, bucket)
            return self._queue(len(rows), bucket, begin_s)

    def submit_next(self, batch: int) -> PendingStep:
        """Queue a step that goes on where the last one ended, which the host may not know yet.

        Args:
            batch: sequences, those of the step that was queued last.
        """
        begin_s = time.perf_counter()
        bucket = self.bucket_of(batch)
        self.capture(bucket)
        with self._graphs.active():
            return self._queue(batch, bucket, begin_s)

    def advance(
        self, rows: Sequence[tuple[int, int, int]], block_table: Tensor, slabs: Mapping[str, Tensor]
    ) -> StepResult:
        """Run the step for sequences that are known on the host; see `program.advance`."""
        assert all(slabs[name] is slab for name, slab in self._slabs.items()), "slabs are captured"
        return self.submit(rows, block_table).result()

    def is_newest(self, results: HostResults) -> bool:
        """No step of the engine was queued behind the one of these results."""
        return self._buffers.newest is results

    def is_replayed(self, batch: int) -> bool:
        """A step of this many sequences runs as one graph."""
        return not self.is_split and self.is_captured(self.bucket_of(batch))

    def seconds_since(self, begin_s: float) -> float:
        """Seconds up to now, or since the host saw the last step end where that is less."""
        end_s, self._buffers.end_s = self._buffers.end_s, time.perf_counter()
        return self._buffers.end_s - max(begin_s, end_s)

    def bucket_of(self, batch: int) -> int:
        """The smallest bucket that holds a batch."""
        return next(size for size in self.buckets if size >= batch)

    def to_result(self, values: Tensor, seconds: float) -> StepResult:
        """Host results [B, 2 + P + drafts] as lists."""
        width = self.plan.tree.max_depth + 1
        columns = values.T.tolist()
        drafts = columns[2 + width : 2 + width + self.num_drafts]
        return StepResult(
            columns[0],
            values[:, 1 : 1 + width].tolist(),
            columns[1 + width],
            dict(enumerate(drafts)),
            {"step": seconds},
        )

    @torch.inference_mode()
    def _queue(self, batch: int, bucket: int, begin_s: float) -> PendingStep:
        bound = self._bound[bucket, self.is_split]
        captured = self._captured[bucket, self.is_split]
        parts: list[Callable[[], object]] = [graph.replay for graph in captured or ()]
        if not parts:
            parts = [*bound.parts] if self.is_split else [bound.run]
        if self.before_accept is None:
            for part in parts:
                part()
        else:
            *early, accept = parts
            for part in early:
                part()
            self.before_accept(_BoundValues(bound, bucket, batch))
            accept()
        return PendingStep(self, batch, begin_s, self._buffers.read_results())

    def _warm_up(self, parts: Sequence[Callable[[], object]], bucket: int) -> None:
        """Run once: this compiles and allocates what the first run does."""
        try:
            for part in parts:
                part()
        except OperatorError as error:
            raise EngineError(
                f"plan {self.plan.name} for {bucket} sequences cannot run: {error}",
                "a step whose operators run on this device, and memory for them",
                "lower max_num_seqs if memory ran out; --backend eager runs the engine without"
                " the kernels",
            ) from error

    def _try_capture(
        self, parts: Sequence[Callable[[], object]], bucket: int
    ) -> list[Graph] | None:
        try:
            return [self._graphs.capture(part) for part in parts]
        except OperatorError as error:
            warnings.warn(
                f"plan {self.plan.name} for {bucket} sequences cannot be captured and runs"
                f" operator by operator, which is slower: {error}",
                CaptureWarning,
                stacklevel=4,
            )
            return None

    def _bind(self, bucket: int) -> BoundStep:
        buffers = self._buffers
        inputs = {
            "last_tokens": buffers.last_tokens[:bucket],
            "cache_len": buffers.cache_len[:bucket],
            "block_table": buffers.block_table[:bucket],
            **self._slabs,
        }
        return BoundStep(self._stages, self._constants, inputs, buffers.results[:bucket])


class _BoundValues:
    """What a hook sees of a step: values of real rows alone; a new value is copied into place."""

    def __init__(self, bound: BoundStep, bucket: int, batch: int) -> None:
        self._bound = bound
        self._bucket = bucket
        self._batch = batch

    def __getitem__(self, name: str) -> Tensor:
        value = self._bound.environment[name]
        if name in self._bound.fixed_names or name.partition("_slab_")[1]:
            return value
        # logits have a row for each node of each sequence
        return value[: value.shape[0] // self._bucket * self._batch]

    def __setitem__(self, name: str, value: Tensor) -> None:
        self[name].copy_(value)
