"""Rank 0 of an engine whose steps are captured: its graphs are orders to the other ranks.

A captured step of rank 0 is whole: drafts, the target's pass, acceptance, commit. In it, what all
ranks do together begins with a message from device to device (`device_work.py`). The others have
a graph of just that work, captured when rank 0 captures, in the same order; a replay of one is an
order to replay the other. Which sizes are captured, and when, rank 0 alone decides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, fx, nn

from specc.errors import RankError
from specc.runtime.backends.device_models import DeviceProgram
from specc.runtime.backends.graph_device import (
    CopyStream,
    Event,
    Graph,
    GraphDevice,
    ReplayedEvent,
    SideStream,
)
from specc.runtime.ranks.device_stages import DeviceStages
from specc.runtime.ranks.device_work import CommitWork, PassWork, Work, give, table_of
from specc.runtime.ranks.leader import Leader
from specc.runtime.ranks.orders import Kind

_COMMIT = torch.ops.specc.commit_kv.default


class DeviceLeader:
    """Orders work of devices: at once, or as a graph that is captured now and replayed later."""

    def __init__(self, leader: Leader) -> None:
        self.leader = leader
        # known once the models are there
        self.device = torch.device("cpu")
        self.num_graphs = 0
        # works since `recorded` began
        self._made: list[Work] | None = None
        # within a capture: what is left of the works that the others capture, too
        self._expected: list[Work] | None = None

    @contextlib.contextmanager
    def doing(self, work: Work) -> Iterator[int | None]:
        """Around rank 0's part of a piece of work; yields its order, or None within a capture.

        Raises:
            RankError: a rank is lost, this one included.
        """
        if self._expected is not None:
            if not self._expected or self._expected.pop(0) != work:
                raise RankError(
                    f"a capture that does {work}, which the step before it did not",
                    "the same work at every run",
                    "report this",
                )
            yield None
            return
        with self.leader.ordered(Kind.WORK, (table_of([work]),)) as order:
            if self._made is not None:
                self._made.append(work)
            yield order

    def recorded(self, run: Callable[[], object]) -> list[Work]:
        """Run once, and return what all ranks have done meanwhile."""
        self._made = []
        try:
            run()
            return self._made
        finally:
            self._made = None

    def capture(self, graphs: GraphDevice, run: Callable[[], object], works: list[Work]) -> Graph:
        """Capture on all ranks.

        Args:
            graphs: the device of rank 0.
            run: of rank 0.
        Raises:
            RankError: a rank is lost, or rank 0 cannot capture it.
        """
        number = self.num_graphs
        self.num_graphs += 1

        def led() -> None:
            # a device may run what it captures once before
            self._expected = [*works]
            run()

        with self.leader.ordered(Kind.CAPTURE, (torch.tensor([number]), table_of(works))):
            try:
                graph = graphs.capture(led)
            finally:
                self._expected = None
        return _LedGraph(graph, self.leader, number)


class LedProgram(nn.Module):
    """A model as steps and prompts of rank 0 call it; all ranks run it.

    Args:
        leader: orders the work.
        number: of the model among those that all ranks run.
        program: of rank 0.
    """

    def __init__(
        self,
        leader: DeviceLeader,
        number: int,
        program: DeviceProgram,
        stages: DeviceStages | None = None,
    ) -> None:
        super().__init__()
        self._stages = stages
        self._number = number
        self.name = program.name
        self.weights = program.weights
        self.leader = leader.leader
        self._leader = leader
        # not a module of this one: it is listed elsewhere
        self._run = [program]

    def forward(self, *inputs: Tensor | None) -> Tensor:
        """Inputs and result as of `ModelProgram.forward`.

        Raises:
            RankError: a rank is lost.
        """
        with self._leader.doing(PassWork.of(inputs, self._number)):
            give(inputs)
            if self._stages is not None:
                return self._stages.lead(self._run[0], inputs)
            logits = self.leader.whole_logits(self._run[0](*inputs))
            self.leader.whole_votes(inputs)
            return logits


class LedGraphs:
    """The `GraphDevice` of rank 0: graphs that all ranks have a part in are captured by all.

    Args:
        leader: orders the work.
    """

    def __init__(self, graphs: GraphDevice, leader: DeviceLeader) -> None:
        self.device = graphs.device
        self._graphs = graphs
        self._leader = leader

    def active(self) -> AbstractContextManager[object]:
        return self._graphs.active()

    def capture(self, run: Callable[[], object]) -> Graph:
        """See `GraphDevice.capture`; what runs on rank 0 alone is captured there alone."""
        works = self._leader.recorded(run)
        if not works:
            return self._graphs.capture(run)
        return self._leader.capture(self._graphs, run, works)

    def stream_handle(self) -> int:
        return self._graphs.stream_handle()

    def record_event(self) -> Event:
        """An event after all that was queued; waiting for it fails where a rank is lost.

        When a rank is lost, collectives end that wait for it, with values of nobody.
        """
        return _LedEvent(self._graphs.record_event(), self._leader.leader)

    def replayed_event(self) -> ReplayedEvent:
        return _LedReplayedEvent(self._graphs.replayed_event(), self._leader.leader)

    def copy_stream(self) -> CopyStream:
        return self._graphs.copy_stream()

    def side_stream(self) -> SideStream:
        return self._graphs.side_stream()

    def host_buffer(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return self._graphs.host_buffer(*shape, dtype=dtype)

    def free_bytes(self) -> int:
        return self._graphs.free_bytes()


def share_commits(graph: fx.GraphModule, leader: DeviceLeader, name: str, number: int = 0) -> None:
    """Before rank 0 moves rows of a model's caches, let the others move theirs.

    Args:
        graph: a stage of a step; changed where it moves such rows.
        leader: orders the work.
        number: of the model among those that all ranks run.
    """

    def is_own(node: fx.Node) -> bool:
        slab = node.args[0]
        return isinstance(slab, fx.Node) and str(slab.target).startswith(f"{name}_slab_")

    moves = [node for node in graph.graph.find_nodes(op="call_function", target=_COMMIT)]
    first = next((node for node in moves if is_own(node)), None)
    if first is None:
        return

    def share(source: Tensor, target: Tensor, block_table: Tensor) -> None:
        sequences, places = source.shape
        work = CommitWork(sequences, places, block_table.shape[1], number)
        with leader.doing(work):
            give((source, target, block_table))

    with graph.graph.inserting_before(first):
        graph.graph.call_function(share, tuple(first.args[1:4]))


class _LedGraph:
    def __init__(self, graph: Graph, leader: Leader, number: int) -> None:
        self._graph = graph
        self._leader = leader
        self._number = torch.tensor([number])

    def replay(self) -> None:
        with self._leader.ordered(Kind.REPLAY, (self._number,)):
            self._graph.replay()


class _LedEvent:
    def __init__(self, event: Any, leader: Leader) -> None:
        self._event = event
        self._leader = leader

    def synchronize(self) -> None:
        self._event.synchronize()
        self._leader.check()


class _LedReplayedEvent(_LedEvent):
    def record(self) -> None:
        self._event.record()
