"""A plan's step as captured graphs: one replay a step, no Python and no host read inside."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specc.kernels.cuda.launch import dependent_launches
from specc.kernels.reference.processing import are_unfiltered
from specc.runtime.backends.captured.bound_step import BoundStep, HookValues
from specc.runtime.backends.captured.captures import LoneGraph, capture_parts, warm_up
from specc.runtime.backends.captured.confident_step import ConfidentStep
from specc.runtime.backends.captured.extended_step import ExtendedStep
from specc.runtime.backends.captured.pending_replay import (
    HalfReplay,
    PendingReplay,
    PendingStep,
    rows_of,
)
from specc.runtime.backends.captured.step_binder import Bound, StepBinder, calls_of
from specc.runtime.backends.captured.step_bounds import check_step_bounds
from specc.runtime.backends.captured.step_buffers import HostResults, StepBuffers
from specc.runtime.backends.captured.step_scores import UNFILTERED, StepExtras, StepKind
from specc.runtime.backends.graph_device import Event, Graph
from specc.runtime.backends.step_io import BeforeAccept, StepInputs, StepResult, StepValues
from specc.speculation.live_nodes import can_cut, captured_rows

Parts = Sequence[Callable[[], object]]


class CapturedStep:
    """One plan's step, captured for each batch bucket: others are queued after it.

    A bucket is a number of requests; rows that a batch does not fill are padding, which writes
    nothing. A bucket is captured as one graph, or, while `before_accept` is set, as one graph for
    each stage; what a step does besides is captured by its kind, see `ExtendedStep` and
    `ConfidentStep`. Batches that need no filters have a graph of fewer launches where
    `skips_filters` is set.

    Args:
        buckets: sizes, ascending; the last is the largest batch.
        by_block: request b of the models has cache row b, so each goes to the row of its block;
            the cache is dense.
        skips_filters: capture a second graph of each bucket, for batches without filters.
    """

    def __init__(
        self,
        binder: StepBinder,
        buckets: Sequence[int],
        by_block: bool = False,
        skips_filters: bool = False,
    ) -> None:
        self.skips_filters = skips_filters
        # kernels of graphs that are captured from now on may start early, see `dependent_launches`
        self.launches_dependent = False
        self._binder = binder
        self.plan = binder.plan
        self.before_accept: BeforeAccept | None = None
        self.buckets = tuple(buckets)
        self.by_block = by_block
        self._buffers, self._graphs, self._slabs = binder.buffers, binder.graphs, binder.slabs
        self._drafts = self.plan.draft_lens
        # a capture's results stay where it put them, so each way of capturing has its own: whole,
        # in stages, or of some kind
        self._bound: dict[tuple[int, bool | StepKind], Bound] = {}
        self._captured: dict[tuple[int, bool | StepKind], list[Graph] | None] = {}
        # what the step that was queued last does besides
        self.kind: StepKind | None = None
        self._is_unfiltered = False

    @property
    def buffers(self) -> StepBuffers:
        """Inputs and results."""
        return self._buffers

    @property
    def slabs(self) -> Mapping[str, Tensor]:
        """The caches that its graphs read and write."""
        return self._slabs

    @property
    def is_split(self) -> bool:
        """Whether a host hook runs between the stages."""
        return self.before_accept is not None

    @property
    def takes_masks(self) -> bool:
        """Masks can be part of its graphs: nothing else stands between the stages."""
        return not (self.is_split or self.by_block)

    @property
    def takes_live(self) -> bool:
        """How many nodes of each request are live can be data: see `LivePass`."""
        return not (self.is_split or self.by_block) and can_cut(self.plan)

    def pass_rows(self, batch: int, num_live: int) -> int:
        """Rows of the target's pass for a batch of which so many nodes are live together."""
        return captured_rows(self.plan.num_nodes, self.bucket_of(batch), num_live)

    def is_captured(self, bucket: int, kind: StepKind | None = None) -> bool:
        """Whether a step of this size is replayed; False before `capture`."""
        return self._captured.get((bucket, kind or self.is_split)) is not None

    def capture(self, bucket: int, kind: StepKind | None = None) -> float:
        """Capture a bucket where that has not been tried; a warning tells where it fails.

        Returns:
            seconds of capturing, without the run before it, which compiles kernels.
        Raises:
            EngineError: the step cannot run at all.
        """
        key = (bucket, kind or self.is_split)
        if key in self._captured:
            return 0.0
        with self._padded(bucket):
            bound = self._bind(bucket, kind)
            is_parted = kind.is_parted if kind else self.is_split
            graphs, seconds = self._capture(bucket, calls_of(bound, is_parted))
            self._bound[key], self._captured[key] = bound, graphs
            return seconds

    def capture_alone(self, bucket: int, is_dependent: bool) -> Graph:
        """A graph of the whole step that nothing replays but the caller, to measure it.

        Args:
            bucket: its size.
            is_dependent: kernels may start early.
        Raises:
            OperatorError: it cannot run, or cannot be captured.
        """
        with self._padded(bucket, is_dependent):
            (run,) = calls_of(self._bind(bucket), is_parted=False)
            run()
            return LoneGraph(self._graphs.capture(run), run)

    @contextlib.contextmanager
    def _padded(self, bucket: int, is_dependent: bool | None = None) -> Iterator[None]:
        """Padding alone for a while: the run before a capture writes no cache row."""
        starts_early = self.launches_dependent if is_dependent is None else is_dependent
        launches = dependent_launches(starts_early)
        with self._graphs.active(), self._buffers.kept_inputs(bucket), launches:
            yield

    def _capture(self, bucket: int, parts: Parts) -> tuple[list[Graph] | None, float]:
        """Graphs of some parts, and seconds of capturing."""
        what = f"plan {self.plan.name} for {bucket} requests"
        # each part is replayed before the next one is captured, in memory that graphs share
        self._buffers.half = None
        warm_up(parts, what)
        begin_s = time.perf_counter()
        return capture_parts(self._graphs, parts, what), time.perf_counter() - begin_s

    @torch.inference_mode(False)
    def _capture_tail(self, bucket: int, parts: Parts) -> list[Graph] | None:
        """Graphs of parts that come after others of a step that is under way."""
        with self._padded(bucket):
            return self._capture(bucket, parts)[0]

    def submit(
        self,
        inputs: StepInputs,
        requests: Sequence[object] = (),
        is_carried: Sequence[bool] = (),
        extras: StepExtras | None = None,
    ) -> PendingStep:
        """Queue a step; nothing waits for the device, unless what it drafts decides on the rest.

        Where rows are carried, such a step is a `HalfReplay`.

        Args:
            inputs: on the host. A carried row has any last tokens, and at least as many committed
                rows as the device has.
            requests: whose rows these are, where later steps are to go on from what this one
                leaves; else (). `StateRows.knows` those of carried rows.
            is_carried: which of them go on from what their last step leaves.
        Raises:
            EngineError: the step would leave the cache, or cannot run at all.
        """
        begin_s = time.perf_counter()
        batch = len(inputs.rows)
        places = inputs.block_table[:, 0].tolist() if self.by_block else None
        num_blocks, rows_per_block = self._slabs["history"].shape
        lengths = [row[-1] for row in inputs.rows]
        check_step_bounds(
            lengths, inputs.block_table, self.plan.num_rows, num_blocks, rows_per_block
        )
        bucket = self.bucket_of(rows_of(batch, places))
        self.kind = extras.kind if extras else None
        self._is_unfiltered = are_unfiltered(inputs.sampling_values, inputs.sampling_words)
        self._capture_all(bucket)
        with self._graphs.active():
            self._buffers.copy_from(inputs, bucket, places)
            if requests:
                self._buffers.state.route(requests, is_carried, bucket, places)
            return self._queue(batch, places, bucket, begin_s, extras, any(is_carried))

    def submit_next(
        self,
        batch: int,
        places: Sequence[int] | None = None,
        extras: StepExtras | None = None,
    ) -> PendingStep:
        """Queue a step that goes on where the last one ended, which the host may not know yet.

        Args:
            batch: requests, those of the step that was queued last.
            places: their rows, as that step had them.
            extras: what it does besides; see `submit`.
        """
        begin_s = time.perf_counter()
        bucket = self.bucket_of(rows_of(batch, places))
        self.kind = extras.kind if extras else None
        self._capture_all(bucket)
        with self._graphs.active():
            return self._queue(batch, places, bucket, begin_s, extras, is_carried=True)

    def advance(
        self, inputs: StepInputs, slabs: Mapping[str, Tensor], reads: Sequence[str] = ()
    ) -> StepResult:
        """See `Step.advance`.

        Values stay after a step only where its stages were captured one by one.
        """
        assert all(slabs[name] is slab for name, slab in self._slabs.items()), "slabs are captured"
        if not reads:
            return self.submit(inputs).result()
        with self._as_stages():
            pending = self.submit(inputs)
            result = pending.result()
            batch, places = len(inputs.rows), pending.places
            bucket = self.bucket_of(rows_of(batch, places))
            seen = self._seen(self._bound[bucket, True], bucket, batch, places)
            return result._replace(values={name: seen[name] for name in reads})

    @contextlib.contextmanager
    def _as_stages(self) -> Iterator[None]:
        """Run the stages as graphs of their own for a while, with a hook or without."""
        before, self.before_accept = self.before_accept, self.before_accept or _look_at_nothing
        try:
            yield
        finally:
            self.before_accept = before

    def can_follow(
        self, blocks: Sequence[int], carried: Sequence[object], extras: StepExtras | None = None
    ) -> bool:
        """Whether it can be queued while steps of its requests are on their way, as a replay.

        Args:
            blocks: the first block of each request.
            carried: requests that go on from what a step leaves.
        """
        # over rows of a dense cache, buckets reach to the last row in use
        count = rows_of(len(blocks), blocks if self.by_block else None)
        return self.is_replayed(count, extras and extras.kind) and self.knows(carried)

    def knows(self, requests: Sequence[object]) -> bool:
        """Whether the device still has the state of all these requests."""
        return all(self._buffers.state.knows(request) for request in requests)

    def mark(self) -> Event:
        """An event after everything that has been queued."""
        return self._graphs.record_event()

    def is_newest(self, results: HostResults) -> bool:
        """No step of the engine was queued after the one of these results."""
        return self._buffers.newest is results

    def is_replayed(self, batch: int, kind: StepKind | None = None) -> bool:
        """A step of this many requests, which does this besides, is replayed, without a hook."""
        return not self.is_split and self.is_captured(self.bucket_of(batch), kind)

    def seconds_since(self, begin_s: float) -> float:
        """Seconds up to now, or since the host saw the last step end where that is less."""
        end_s, self._buffers.end_s = self._buffers.end_s, time.perf_counter()
        return self._buffers.end_s - max(begin_s, end_s)

    def bucket_of(self, batch: int) -> int:
        """The smallest bucket that holds a batch."""
        return next(size for size in self.buckets if size >= batch)

    def to_result(self, values: Tensor, seconds: float) -> StepResult:
        """Host results [B, 2 + P + drafts] as lists."""
        width = self.plan.max_depth + 1
        columns = values.T.tolist()
        drafts = columns[2 + width : 2 + width + len(self._drafts)]
        return StepResult(
            columns[0],
            values[:, 1 : 1 + width].tolist(),
            columns[1 + width],
            dict(zip(self._drafts, drafts, strict=True)),
            {"step": seconds},
        )

    @torch.inference_mode()
    def _queue(
        self,
        batch: int,
        places: Sequence[int] | None,
        bucket: int,
        begin_s: float,
        extras: StepExtras | None = None,
        is_carried: bool = False,
    ) -> PendingStep:
        key = self._replayed_key(bucket)
        bound, captured = self._bound[key], self._captured[key]
        parts: list[Callable[[], object]] = [graph.replay for graph in captured or ()]
        if not parts and not self.kind:
            parts = [*calls_of(bound, self.is_split)]
        rest: Callable[[], object] | None = None
        rules = extras.masks if extras else None
        if isinstance(bound, ConfidentStep):
            capture = functools.partial(self._capture_tail, bucket)
            rest = bound.queue(parts, batch, rules, capture)
        elif isinstance(bound, ExtendedStep):
            rest = bound.queue(parts, batch, rules)
        elif self.before_accept is None:
            for part in parts:
                part()
        else:
            *early, accept = parts
            for part in early:
                part()
            self.before_accept(self._seen(bound, bucket, batch, places))
            accept()

        def finish(begin_s: float) -> PendingReplay:
            if rest is not None:
                rest()
            self._buffers.state.stepped()
            if isinstance(bound, ExtendedStep | ConfidentStep) and bound.scores is not None:
                results: HostResults = bound.scores.read()
                self._buffers.newest = results
            else:
                results = self._buffers.read_results()
            live = bound.verified if isinstance(bound, ConfidentStep) else ()
            return PendingReplay(self, batch, begin_s, results, places, live)

        if rest is None or not is_carried:
            return finish(begin_s)
        # its masks follow from tokens that are still on their way, and what is verified from its
        # own draft, which comes after them
        return HalfReplay(self._buffers, begin_s, self._in_use(finish), places)

    def _in_use(self, finish: Callable[[float], PendingReplay]) -> Callable[[float], PendingReplay]:
        """The same, called while another device may be current."""

        @torch.inference_mode()
        def queue(begin_s: float) -> PendingReplay:
            with self._graphs.active():
                return finish(begin_s)

        return queue

    def _capture_all(self, bucket: int) -> None:
        """What the step that is to be queued replays, and what any of its kind does."""
        self.capture(bucket, self.kind)
        if self.skips_filters and self._is_unfiltered and not (self.kind or self.is_split):
            self.capture(bucket, UNFILTERED)

    def _replayed_key(self, bucket: int) -> tuple[int, bool | StepKind]:
        """Of the graph with the fewest launches that does what is asked for."""
        can_skip = self._is_unfiltered and not (self.kind or self.is_split)
        if can_skip and self._captured.get((bucket, UNFILTERED)) is not None:
            return bucket, UNFILTERED
        return bucket, self.kind or self.is_split

    def _bind(self, bucket: int, kind: StepKind | None = None) -> Bound:
        return self._binder.bind(bucket, kind, self.is_split)

    @staticmethod
    def _seen(bound: Bound, *rows: Any) -> HookValues:
        assert isinstance(bound, BoundStep), "a step whose stages are captured one by one"
        return HookValues(bound, *rows)


def _look_at_nothing(values: StepValues) -> None:
    """A hook that only keeps the stages apart."""
