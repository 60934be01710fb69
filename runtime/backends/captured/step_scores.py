"""What a captured step does besides: masks between its stages, and log probabilities after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from specc.runtime.backends.captured.mask_rules import MaskRules
from specc.runtime.backends.captured.step_buffers import NUM_STAGES, HostResults
from specc.runtime.backends.graph_device import Event, GraphDevice
from specc.runtime.outputs.logprobs import ROWS_AT_ONCE, score_tokens
from specc.sampling.params import MAX_LOGPROBS


class StepScores:
    """Static tensors of a step's results and scores, side by side: one copy brings both.

    Scores are [B, P, 2 + 2 K] float64, see `score_tokens`: of the accepted tokens and the bonus
    token, and anything after them; K is what a request may ask for at most.

    Args:
        batch: B.
        width: integers of a sequence's results.
        length: P, tokens that a step emits at most.
    """

    def __init__(self, graphs: GraphDevice, batch: int, width: int, length: int) -> None:
        self._graphs = graphs
        self._sizes = (batch * width, batch * length * (2 + 2 * MAX_LOGPROBS))
        self._shapes = ((batch, width), (batch, length, -1))
        self._flat = torch.zeros(sum(self._sizes), dtype=torch.int64, device=graphs.device)
        self.results, self._scores = self._views(self._flat)
        # first row of each sequence's nodes
        self._first = torch.arange(batch, device=graphs.device)[:, None]
        # columns in use: fewer where the vocabulary is smaller than K
        self._num_columns = self._scores.shape[2]
        self._outputs = [
            graphs.host_buffer(sum(self._sizes), dtype=torch.int64) for _ in range(NUM_STAGES)
        ]
        self._pending: list[ScoredResults | None] = [None] * NUM_STAGES
        self._next = 0

    def leave(self, environment: Mapping[str, Tensor], logits: Tensor) -> None:
        """Compute the scores.

        Args:
            environment: `path` [B, P] and `output_tokens` [B, P] of the walk.
            logits: [B * N, V], the model's own.
        """
        batch, length, _ = self._scores.shape
        rows = environment["path"].long().clamp(min=0) + self._first * (logits.shape[0] // batch)
        tokens = environment["output_tokens"].clamp(min=0)
        parts = zip(
            rows.flatten().split(ROWS_AT_ONCE), tokens.flatten().split(ROWS_AT_ONCE), strict=True
        )
        place = 0
        for own, after in parts:
            found = score_tokens(logits[own], after, MAX_LOGPROBS)
            self._num_columns = found.shape[1]
            rows_of = self._scores.view(batch * length, -1)[place : place + len(own)]
            rows_of[:, : found.shape[1]].copy_(found)
            place += len(own)

    def read(self) -> ScoredResults:
        """Queue the copy of results and scores to the host, after the step that made them."""
        stage = self._next
        self._next = (stage + 1) % NUM_STAGES
        if (older := self._pending[stage]) is not None:
            older.leave_staging()
        self._outputs[stage].copy_(self._flat, non_blocking=True)
        found = ScoredResults(self._outputs[stage], self._graphs.record_event(), self)
        self._pending[stage] = found
        return found

    def on_host(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Results and scores in memory of the host, without columns that are not in use."""
        results, scores = self._views(flat)
        return results, scores[:, :, : self._num_columns]

    def _views(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        results, scores = flat.split(self._sizes)
        return results.view(self._shapes[0]), scores.view(torch.float64).view(self._shapes[1])


class ScoredResults(HostResults):
    """Results of a step on their way to the host, with scores."""

    def __init__(self, values: Tensor, event: Event, scores: StepScores) -> None:
        super().__init__(values, event)
        self._step_scores = scores

    def wait(self) -> Tensor:
        return self._step_scores.on_host(super().wait())[0]

    @property
    def scores(self) -> Tensor:
        """[B, P, 2 + 2 K] float64, once somebody has waited."""
        return self._step_scores.on_host(self._values)[1]


class StepKind(NamedTuple):
    """What a step does besides; each kind is captured by itself, when it is first asked for.

    Args:
        is_scored: compute log probabilities.
        is_masked: masks change the logits that acceptance looks at.
        has_biases: so do biases.
        is_late: masks follow from tokens that the host may not know yet when verification is
            queued: it is queued in two parts, and masks come between them.
        reads_draft: some of these tokens the device drafts.
        is_unfiltered: nothing, and no row needs its filters, or tries proposals one by one: see
            `are_unfiltered`. It is a kind that none of the others goes with.
        masks_drafts: masks change the logits of drafts, too, and come between their passes: the
            part of the step that drafts is queued in pieces.
        num_rows: of the target's pass, where not all nodes of its trees are live; 0 where they are.
        threshold: of confidence, by which drafts say how many are live, see `ConfidentStep`; 0 does
            not ask them.
    """

    is_scored: bool = False
    is_masked: bool = False
    has_biases: bool = False
    is_late: bool = False
    reads_draft: bool = False
    is_unfiltered: bool = False
    masks_drafts: bool = False
    num_rows: int = 0
    threshold: float = 0.0

    @property
    def is_parted(self) -> bool:
        """The host has a part in it before all of it is queued."""
        return self.is_late or self.threshold > 0


UNFILTERED = StepKind(is_unfiltered=True)


class StepExtras(NamedTuple):
    """What the host asks of a step besides.

    Args:
        is_scored: log probabilities of what it emits.
        num_rows: see `StepKind`; `live` among the inputs then says which nodes these are.
        threshold: see `StepKind`; `live` among the inputs then says which nodes these are at most,
            and `num_rows` is 0.
    """

    is_scored: bool = False
    masks: MaskRules | None = None
    num_rows: int = 0
    threshold: float = 0.0

    @property
    def kind(self) -> StepKind:
        masks = self.masks
        kind = StepKind(self.is_scored)
        if masks is not None:
            late = masks.is_late, masks.reads_draft
            kind = StepKind(
                self.is_scored, True, masks.has_biases, *late, masks_drafts=masks.masks_drafts
            )
        return kind._replace(num_rows=self.num_rows, threshold=self.threshold)
