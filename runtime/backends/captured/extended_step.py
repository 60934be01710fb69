"""A bound step that also applies masks, computes log probabilities, or verifies parts of trees.

All of it is inside of its graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from specc.runtime.backends.captured.bound_step import BoundStage, BoundStep, StepParts
from specc.runtime.backends.captured.live_pass import LivePass, accepts_live
from specc.runtime.backends.captured.mask_rules import MaskRules
from specc.runtime.backends.captured.masked_draft import NOTHING, MaskedDraft, unread_error
from specc.runtime.backends.captured.step_masks import StepMasks
from specc.runtime.backends.captured.step_scores import StepKind, StepScores
from specc.runtime.backends.failed_operator import do_named
from specc.runtime.backends.graph_device import GraphDevice
from specc.speculation.plans import SpecPlan

# batch → [B][N] tokens and parents
ReadTrees = Callable[[int], tuple[list[list[int]], list[list[int]]]]


class DraftReader:
    """Tokens of a step's trees on their way to the host, which reads them while the step goes on.

    Args:
        batch: B.
    """

    def __init__(self, graphs: GraphDevice, batch: int, plan: SpecPlan) -> None:
        shape = (batch, plan.num_nodes)
        self._name = plan.name
        self._tokens = graphs.host_buffer(*shape, dtype=torch.int64)
        self._parents: Tensor | None = None
        if plan.is_static:
            self._own = list(plan.tree.parents)
        else:
            self._parents = graphs.host_buffer(*shape, dtype=torch.int32)
        self._event = graphs.replayed_event()

    def expect(self) -> None:
        """Before the draft is queued: what is there from an older one must not pass for it."""
        self._tokens.fill_(NOTHING)

    def leave(self, environment: Mapping[str, Tensor]) -> None:
        """After the draft: copy the trees, and mark where they are there."""
        self._tokens.copy_(environment["tokens"], non_blocking=True)
        if self._parents is not None:
            self._parents.copy_(environment["parents"], non_blocking=True)
        self._event.record()

    def read(self, batch: int) -> tuple[list[list[int]], list[list[int]]]:
        """[B][N] tokens and parents of the first sequences, once the device has drafted them.

        Raises:
            EngineError: the device says that it has, and they are not there.
        """
        self._event.synchronize()
        tokens = self._tokens[:batch].tolist()
        if any(NOTHING in own for own in tokens):
            raise unread_error(self._name)
        if self._parents is None:
            return tokens, [self._own] * batch
        return tokens, self._parents[:batch].tolist()


class ExtendedStep(BoundStep):
    """A step of some kind, see `BoundStep`: one part, or more where masks come late.

    Args:
        given: stages and tensors.
    """

    def __init__(
        self,
        kind: StepKind,
        graphs: GraphDevice,
        plan: SpecPlan,
        given: StepParts,
    ) -> None:
        batch, width = given.results.shape
        names, verify = list(given.stages), given.stages["verify"]
        if kind.num_rows:
            accept = accepts_live(given.stages["accept_commit"])
            given = given._replace(stages={**given.stages, "accept_commit": accept})
        self.scores: StepScores | None = None
        if kind.is_scored:
            self.scores = StepScores(graphs, batch, width, plan.max_depth + 1)
            given = given._replace(results=self.scores.results)
        super().__init__(given)
        # what stands before acceptance
        self._early: list[BoundStage | LivePass] = list(self._stages[:-1])
        if kind.num_rows:
            live = LivePass(verify, self.environment, plan, batch, kind.num_rows)
            self._early[names.index("verify")] = live
        self._is_late = kind.is_late
        self.masks: StepMasks | None = None
        if kind.is_masked:
            self.masks = StepMasks(graphs, batch, plan.num_nodes, kind.has_biases)
        self.reader = DraftReader(graphs, batch, plan) if kind.reads_draft else None
        self._batch = batch
        self._draft: MaskedDraft | None = None
        if kind.masks_drafts:
            self._draft = MaskedDraft(graphs, batch, plan, self._stages[0])

    @property
    def parts(self) -> list[Callable[[], None]]:
        """Up to verification, and what comes after; one of both where no masks come in between.

        Where masks change drafts, a part for each pass of them comes before.
        """
        last = self._stages[-1]
        runs = [stage.run for stage in self._early]
        passes: list[Callable[[], None]] = []
        if self._draft is not None:
            *passes, runs[0] = self._draft.pieces

        def before() -> None:
            for i, run in enumerate(runs):
                run()
                if self.reader is not None and i == 0:
                    do_named("reading the draft", self.reader.leave, self.environment)

        def after() -> None:
            own = self.environment["logits"]
            if self.masks is not None:
                if self.scores is not None:
                    # log probabilities are the model's own
                    self.environment["logits"] = own.clone()
                do_named("masks", self.masks.apply, self.environment["logits"])
            last.run()
            # a capture of this part alone begins where verification has left them
            self.environment["logits"] = own
            if self.scores is not None:
                do_named("log probabilities", self.scores.leave, self.environment, own)
            self._leave_results()

        def whole() -> None:
            before()
            after()

        parts = [*passes, before, after] if self._is_late else [whole]
        return [torch.inference_mode()(part) for part in parts]

    def queue(
        self,
        graphs: Sequence[Callable[[], object]],
        batch: int,
        rules: MaskRules | None,
        read_trees: ReadTrees | None = None,
    ) -> Callable[[], None] | None:
        """Queue a run, with masks of some rules; where these are late, what needs none of them.

        That is all up to verification, or, where they change drafts, up to the first of their
        passes.

        Args:
            graphs: replays of the parts; none where they were not captured.
            batch: sequences.
            rules: `MaskRules` of the step; None where it has none.
            read_trees: waits for them, where another step has drafted.
        Returns:
            what makes the masks, and queues the rest; None: all is queued. It waits for what the
            device drafts, where masks follow from that; the device computes passes meanwhile.
        """
        parts = graphs or (self.parts if self._is_late else [self.run])
        masks = self.masks
        if masks is None:
            parts[0]()
            return None
        assert rules is not None, "a step with masks"
        device = self._results.device
        if not self._is_late:
            masks.fill(rules.masks(rules.known_trees(), device))
            parts[0]()
            return None
        *early, last = parts
        self._queue_early(early, 0)

        def rest() -> None:
            if self._draft is not None and self._draft.num_passes:
                own = rules.draft_masks(self._batch)
                for number in range(self._draft.num_passes):
                    self._draft.fill(number, own)
                    self._queue_early(early, number + 1)
            read = read_trees if self.reader is None else self.reader.read
            trees = rules.known_trees() if read is None else read(batch)
            masks.fill(rules.masks(trees, device))
            last()

        return rest

    def _queue_early(self, early: Sequence[Callable[[], object]], number: int) -> None:
        """Queue one of the parts before the masks of verification."""
        if self._draft is not None:
            self._draft.expect(number)
        if self.reader is not None and number == len(early) - 1:
            self.reader.expect()
        early[number]()
