"""What results in flight may bring: what an iteration is chosen by before they are read."""

from __future__ import annotations

from collections.abc import Iterable

from specc.runtime.scheduling.batch import Batch, Span
from specc.runtime.scheduling.request import Request
from specc.speculation.plans import SpecPlan


class LookAhead:
    """Bounds of where requests will be once all that is queued is done.

    A step brings its requests at least one token, and at most one more than its tree is deep.
    Rows of prompts come as they were asked for, and the first token with the last of them. With
    nothing queued, every bound is what is committed.

    Args:
        queued: batches whose results nobody has seen; a request has a part in one at most.
    """

    def __init__(self, queued: Iterable[Batch] = ()) -> None:
        batches = list(queued)
        self._plans = {id(s): g.plan for b in batches for g in b.groups for s in g.requests}
        self._spans: dict[int, Span] = {id(s.request): s for b in batches for s in b.prefill}
        # anything
        self.is_queued = bool(self._plans or self._spans)

    def least(self, request: Request) -> int:
        """Tokens that a step in flight brings, at least."""
        return int(id(request) in self._plans)

    def most(self, request: Request) -> int:
        """Tokens that a step in flight brings, at most; 0 where there is none."""
        plan = self._plans.get(id(request))
        return 0 if plan is None else plan.max_depth + 1

    def prefilled(self, request: Request) -> int:
        """Rows of a prompt that are there, or on their way."""
        span = self._spans.get(id(request))
        return request.cache_len if span is None else span.end

    def drafts_at(self, request: Request, length: int) -> set[int]:
        """Drafts that will have so many rows of a prompt."""
        lens = request.draft_lens
        found = {draft for draft, rows in enumerate(lens) if rows == length}
        span = self._spans.get(id(request))
        if span is None:
            return found
        moved = {draft for draft in span.drafts if span.end == length}
        return moved | {draft for draft in found if draft not in span.drafts}

    def lags(self, request: Request, plan: SpecPlan) -> bool:
        """Whether a draft may have to catch up before a step of this plan."""
        before = self._plans.get(id(request))
        moved = () if before is None or before.catch_up > plan.catch_up else before.draft_lens
        most = request.cache_len + self.most(request)
        # asked at each step: no generator
        for draft in plan.draft_lens:
            if draft not in moved and request.draft_lens[draft] < most + 1 - plan.catch_up:
                return True
        return False
