"""What the host does for the drafts of a step: votes' weights, and what the parts of drafts bring
that it has.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor

from specc.drafters.drafter import Drafter
from specc.drafters.facts import DrafterFacts
from specc.runtime.backends.step_io import StepResult
from specc.runtime.drafters.host_drafter import HostDrafter, host_drafter
from specc.runtime.drafters.vote_weights import VoteWeights, leader
from specc.runtime.scheduling.request import Request
from specc.speculation.plans import VOTE, SpecPlan


class HostDrafts:
    """State of an engine's drafts that lives on the host, across steps and requests.

    Args:
        block_size: rows of a block of its cache.
        shares_outputs: what one request has put out is looked up for others.
    """

    def __init__(
        self, plans: Mapping[str, SpecPlan], block_size: int = 0, shares_outputs: bool = True
    ) -> None:
        self._weights = {
            name: VoteWeights(
                len(plan.drafters), [i for i, x in enumerate(plan.drafters) if x.is_asked]
            )
            for name, plan in plans.items()
            if plan.combine == VOTE
        }
        self._parts: dict[str, HostDrafter] = {}
        self._given = block_size, shares_outputs
        for drafter in (x for plan in plans.values() for x in plan.drafters if x.facts.has_host):
            self._part(drafter.facts)

    def _part(self, facts: DrafterFacts) -> HostDrafter:
        if facts.module not in self._parts:
            self._parts[facts.module] = host_drafter(facts, *self._given)
        return self._parts[facts.module]

    def inputs(self, plan: SpecPlan, requests: list[Request]) -> dict[str, Tensor]:
        """What a step of this plan reads besides rows; see `StepInputs.extra`."""
        extra = {}
        if plan.name in self._weights:
            row = torch.tensor(self._weights[plan.name].next_row(), dtype=torch.float32)
            extra["vote_weights"] = row.expand(len(requests), -1).contiguous()
        for part in self._parts.values():
            if part.brings(plan):
                extra |= part.inputs(plan, requests)
        return extra

    def brings(self, plan: SpecPlan) -> bool:
        """Whether steps of a plan read anything of the host, which has to know their requests."""
        return plan.name in self._weights or any(x.brings(plan) for x in self._parts.values())

    def propose(self, request: Request, num_tokens: int, drafter: Drafter) -> tuple[list[int], int]:
        """What a draft of which the host knows the proposals has for a request.

        Args:
            request: whose last tokens are looked up.
            num_tokens: proposals at most.
            drafter: that asks no model.
        Returns:
            tokens, and how long the suffix was that they follow.
        """
        return self._part(drafter.facts).propose(request, num_tokens, drafter)

    def observe(
        self,
        plan: SpecPlan,
        requests: list[Request],
        extra: Mapping[str, Tensor],
        step: StepResult,
    ) -> None:
        """Take the outcome of a step.

        Args:
            requests: that took part, as they were before it.
            extra: what `inputs` gave it.
        """
        if plan.name not in self._weights or not requests:
            return
        weights = self._weights[plan.name]
        # a leader's chain is the one that was verified
        first = leader(extra["vote_weights"][0].tolist())
        for place, drafter in enumerate(plan.drafters):
            if not drafter.is_asked:
                counts = [
                    self._agreed(request, drafter, plan.max_depth, tokens[: count + 1])
                    for request, tokens, count in zip(
                        requests, step.output_tokens, step.num_accepted, strict=True
                    )
                ]
                weights.observe(place, counts, plan.max_depth)
            elif place == first:
                weights.observe(place, step.num_accepted, plan.max_depth)

    def _agreed(
        self, request: Request, drafter: Drafter, num_tokens: int, output_tokens: list[int]
    ) -> int:
        """Tokens that a lookup proposed and the target took."""
        proposed, _ = self.propose(request, num_tokens, drafter)
        pairs = zip(proposed, output_tokens, strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    def finish(self, request: Request) -> None:
        """A request has ended."""
        for part in self._parts.values():
            part.finish(request)
