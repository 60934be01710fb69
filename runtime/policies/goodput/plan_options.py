"""What every plan would yield for a request, and how long its drafts have to catch up before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specc.runtime.policies.goodput.allocation import PlanOption
from specc.runtime.policies.goodput.constants import TUNED
from specc.runtime.policies.goodput.predicted_seconds import PredictedSeconds
from specc.runtime.policies.goodput.request_acceptance import RequestAcceptance
from specc.speculation.plans import SpecPlan

if TYPE_CHECKING:
    from specc.runtime.scheduling.request import Request


class PlanOptions:
    """Options of requests, from which `allocate` chooses; None is a plan that a request cannot run.

    Args:
        plans: off first.
    """

    def __init__(
        self,
        plans: Sequence[SpecPlan],
        seconds: PredictedSeconds,
        acceptance: RequestAcceptance,
    ) -> None:
        self._plans = plans
        self._seconds = seconds
        self._acceptance = acceptance
        # [plans] what a sequence's rows add to the seconds of its drafts
        self._draft_rows = [seconds.table.draft_rows(plan) for plan in plans]

    def of(self, request: Request) -> list[PlanOption | None]:
        """What every plan would yield if drafts were in step."""
        left, context = max(1, request.num_tokens_left), request.cache_len
        return [
            PlanOption(
                self._acceptance.tokens(plan, request.request_id, left),
                context=context,
                drafting_s=sum(min(context, most) * row_s for most, row_s in rows),
            )
            # what the scheduler would decode plainly is load, and no more
            if not plan.speculates or plan.suits(request.params)
            else None
            for plan, rows in zip(self._plans, self._draft_rows, strict=True)
        ]

    def with_lags(
        self, request: Request, options: Sequence[PlanOption | None], reads_prompts: bool
    ) -> list[PlanOption | None]:
        """The same with the seconds in which drafts catch up, if they are to be kept in step.

        Args:
            request: whose drafts may lag.
            reads_prompts: drafts read prompts along with the target; where none does, one that lags
                is left behind.
        """
        found = list(options)
        for index, option in enumerate(options):
            if not index or option is None:
                continue
            missed = max(lag(request, self._plans[index]).values(), default=0)
            if missed and not reads_prompts:
                found[index] = None
            elif missed:
                # whatever a draft catches up serves the steps that the request still takes
                steps = max(1.0, min(TUNED.paid_off, request.num_tokens_left / option.tokens))
                token_s = self._seconds.draft_token_s(self._plans[index], request.cache_len)
                found[index] = option._replace(seconds=missed * token_s / steps)
        return found


def lag(request: Request, plan: SpecPlan) -> dict[int, int]:
    """Draft → committed tokens that it must read before this plan's first level."""
    behind = {}
    for draft in plan.draft_lens:
        missed = request.cache_len - request.draft_lens[draft]
        behind[draft] = missed if missed > plan.catch_up - 1 else 0
    return behind
