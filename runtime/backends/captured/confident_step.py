"""A captured step that verifies as much of each tree as its drafter is sure of.

How much that is follows from what the step draws, and a graph has a fixed number of rows. So the
step is two graphs. The first drafts, and ends with the number of live nodes of each sequence, which
stays on the device for the second and is on its way to the host at once. The host looks at nothing
but their sum: it replays the smallest of the graphs that has rows for all of them, of at most four
(`captured_rows`), and these find the live nodes as they do for adaptive verification (`LivePass`).
Where the step was queued ahead of results, the device drafts while the host reads the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specc.runtime.backends.captured.bound_step import BoundStage, StepParts
from specc.runtime.backends.captured.extended_step import DraftReader, ExtendedStep
from specc.runtime.backends.captured.mask_rules import MaskRules
from specc.runtime.backends.captured.masked_draft import MaskedDraft, unread_error
from specc.runtime.backends.captured.step_scores import StepKind, StepScores
from specc.runtime.backends.failed_operator import do_named
from specc.runtime.backends.graph_device import Graph, GraphDevice
from specc.speculation.confidence import ConfidentNodes
from specc.speculation.live_nodes import captured_rows
from specc.speculation.plans import SpecPlan

# what a draft stage says of its nodes
CONFIDENCE = "confidence"
# no number of nodes
_NOT_THERE = -1
# has graphs of some parts made
Capture = Callable[[Sequence[Callable[[], object]]], list[Graph] | None]


class ConfidentStep:
    """See the module. `scores` and `verified` are of the last run.

    Args:
        kind: what it does besides; with a threshold.
        plan: of the step, which says confidence.
        given: stages and tensors; `live` is among the inputs.
    """

    def __init__(
        self,
        kind: StepKind,
        graphs: GraphDevice,
        plan: SpecPlan,
        given: StepParts,
    ) -> None:
        self._plan, self._graphs = plan, graphs
        self._batch = batch = len(given.results)
        self._environment: dict[str, Any] = {**given.constants, **given.inputs}
        with torch.inference_mode():
            draft, fixed = given.stages["draft"], set(given.constants)
            stage = BoundStage(draft, self._environment, fixed, {*given.inputs})
        self._stage = stage
        folded = {name: self._environment[name] for name in stage.folded_outputs}
        rest = {name: own for name, own in given.stages.items() if name != "draft"}
        self._of_tails = given._replace(stages=rest, constants={**given.constants, **folded})
        # masks of the draft, and what reads it, are of the part before
        self._tail_kind = kind._replace(threshold=0.0, reads_draft=False, masks_drafts=False)
        # rows of a pass → what verifies them, and its graphs
        self._tails: dict[int, ExtendedStep] = {}
        self._captured: dict[int, list[Graph] | None] = {}
        self._draft: MaskedDraft | None = None
        if kind.masks_drafts:
            self._draft = MaskedDraft(graphs, batch, plan, stage)
        self._reader = DraftReader(graphs, batch, plan) if kind.reads_draft else None
        self._nodes = ConfidentNodes(plan, kind.threshold, graphs.device)
        # [B] int32: on the device, which each run of the draft leaves anew, and on the host
        self._live: Tensor | None = None
        self._counts = graphs.host_buffer(batch, dtype=torch.int32)
        self._event = graphs.replayed_event()
        self.scores: StepScores | None = None
        self.verified: tuple[int, ...] = ()

    @property
    def parts(self) -> list[Callable[[], None]]:
        """Of the draft: one, or, where masks change it, one more than it has passes."""
        pieces = [self._stage.run] if self._draft is None else self._draft.pieces
        *passes, last = pieces

        def drafted() -> None:
            last()
            if self._reader is not None:
                do_named("reading the draft", self._reader.leave, self._environment)
            do_named("how much is verified", self._count)

        return [torch.inference_mode()(part) for part in (*passes, drafted)]

    def _count(self) -> None:
        """Live nodes of each sequence, no more than the host allows; 0 of padding."""
        found = self._nodes(self._environment[CONFIDENCE])
        self._live = torch.minimum(found, self._environment["live"])
        self._counts.copy_(self._live, non_blocking=True)
        self._event.record()

    def queue(
        self,
        graphs: Sequence[Callable[[], object]],
        batch: int,
        rules: MaskRules | None,
        capture: Capture,
    ) -> Callable[[], None]:
        """Queue the draft, or, where masks change it, its first piece.

        Args:
            graphs: replays of the parts; none where they were not captured.
            batch: sequences.
            rules: of the step's masks; None where it has none.
            capture: of the parts that verify so many nodes, where they have no graphs yet.
        Returns:
            what queues the rest. It waits for the device to draft.
        """
        parts = graphs or self.parts
        self._queue_draft(parts, 0)

        def finish() -> None:
            if self._draft is not None:
                assert rules is not None, "a step with masks"
                own = rules.draft_masks(self._batch)
                for number in range(self._draft.num_passes):
                    self._draft.fill(number, own)
                    self._queue_draft(parts, number + 1)
            counts = self._read_counts()
            self.verified = tuple(counts[:batch])
            tail, replays = self._tail(sum(counts), capture if graphs else None)
            self.scores = tail.scores
            trees = None if self._reader is None else self._reader.read
            complete = tail.queue(replays, batch, rules, trees)
            if complete is not None:
                complete()

        return finish

    def _queue_draft(self, parts: Sequence[Callable[[], object]], number: int) -> None:
        if self._draft is not None:
            self._draft.expect(number)
        if number == len(parts) - 1:
            self._counts.fill_(_NOT_THERE)
            if self._reader is not None:
                self._reader.expect()
        parts[number]()

    def _read_counts(self) -> list[int]:
        """[B] live nodes, once the device has drafted.

        Raises:
            EngineError: the device says that it has, and they are not there.
        """
        self._event.synchronize()
        counts: list[int] = self._counts.tolist()
        if _NOT_THERE in counts:
            raise unread_error(self._plan.name, "engines without --confidence-threshold")
        return counts

    def _tail(
        self, num_live: int, capture: Capture | None
    ) -> tuple[ExtendedStep, list[Callable[[], object]]]:
        """What verifies so many nodes, and its replays; none where it has no graphs.

        A graph reads what the draft's graph leaves: where that has none, neither has it.
        """
        rows = captured_rows(self._plan.num_nodes, self._batch, num_live)
        tail = self._tails.get(rows)
        if tail is None:
            kind = self._tail_kind._replace(num_rows=rows)
            tail = ExtendedStep(kind, self._graphs, self._plan, self._of_tails)
            self._tails[rows] = tail
        graphs = self._captured.get(rows)
        if not graphs:
            tail.take({name: self._environment[name] for name in self._stage.output_names})
            assert self._live is not None, "a draft that has run"
            tail.take({"live": self._live})
        if capture is None:
            return tail, []
        if rows not in self._captured:
            parts = tail.parts if self._tail_kind.is_late else [tail.run]
            graphs = self._captured[rows] = capture(parts)
        return tail, [graph.replay for graph in graphs or ()]
