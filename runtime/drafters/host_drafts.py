"""What the host does for the drafts of a step: votes' weights, and what the parts of drafts bring
that it has.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import Tensor

from specc.drafters.drafter import Drafter
from specc.drafters.facts import DrafterFacts
from specc.runtime.backends.step_io import StepResult
from specc.runtime.drafters.host_drafter import HostDrafter, host_drafter
from specc.runtime.drafters.prediction import TRUST
from specc.runtime.drafters.vote_weights import VoteWeights, leader
from specc.runtime.requests.salt import BySalt, Salt
from specc.runtime.scheduling.request import Request
from specc.speculation.plans import VOTE, SpecPlan

# salts whose votes are kept
_SALTS = 1024


def hosts_of(plans: Iterable[SpecPlan]) -> list[SpecPlan]:
    """Plans whose steps take what a prediction has, the shallowest first.

    Those to which the host alone proposes; where there are none, those that it has a part in.
    """
    reading = sorted((x for x in plans if x.reads_proposals), key=lambda x: x.max_depth)
    return [plan for plan in reading if plan.is_hosts] or reading


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
            name: BySalt(partial(_weights_of, plan), _SALTS)
            for name, plan in plans.items()
            if plan.combine == VOTE
        }
        self._hosts = hosts_of(plans.values())
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
            by_salt = self._weights[plan.name]
            rows = {salt: by_salt.of(salt).next_row() for salt in _salts_of(requests)}
            weights = [rows[request.salt] for request in requests]
            extra["vote_weights"] = torch.tensor(weights, dtype=torch.float32)
        for part in self._parts.values():
            if part.brings(plan):
                extra |= part.inputs(plan, requests)
        return extra

    def brings(self, plan: SpecPlan) -> bool:
        """Whether steps of a plan read anything of the host, which has to know their requests."""
        return plan.name in self._weights or any(x.brings(plan) for x in self._parts.values())

    def plan_for(self, request: Request, chosen: SpecPlan) -> SpecPlan:
        """The plan of a request in the next step: one that takes what its prediction has.

        Args:
            request: with all of its tokens known.
            chosen: by the policy, which stays where the prediction has nothing, or has a part in it
                as it is.
        """
        prediction = request.prediction
        if prediction is None or not self._hosts:
            return chosen
        has_models = chosen.reads_proposals and not chosen.is_hosts
        found, length = prediction.propose(request.output_token_ids, 1)
        if not found or has_models:
            return chosen
        # what few tokens speak for may be wrong
        plan = self._hosts[-1] if length >= TRUST else self._hosts[0]
        return plan if plan.suits(request.params) else chosen

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
        rows = extra["vote_weights"].tolist()
        for salt in _salts_of(requests):
            own = [i for i, request in enumerate(requests) if request.salt == salt]
            weights = self._weights[plan.name].of(salt)
            accepted = [step.num_accepted[i] for i in own]
            # a leader's chain is the one that was verified
            first = leader(rows[own[0]])
            for place, drafter in enumerate(plan.drafters):
                if not drafter.is_asked:
                    counts = [
                        self._agreed(
                            requests[i],
                            drafter,
                            plan.max_depth,
                            step.output_tokens[i][: step.num_accepted[i] + 1],
                        )
                        for i in own
                    ]
                    weights.observe(place, counts, plan.max_depth)
                elif place == first:
                    weights.observe(place, accepted, plan.max_depth)

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


def _weights_of(plan: SpecPlan, salt: Salt | None) -> VoteWeights:
    asked = [i for i, x in enumerate(plan.drafters) if x.is_asked]
    return VoteWeights(len(plan.drafters), asked)


def _salts_of(requests: Iterable[Request]) -> list[Salt | None]:
    """Each once, in the order of the requests."""
    return list(dict.fromkeys(request.salt for request in requests))
