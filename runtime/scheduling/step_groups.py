"""What requests can run of the plans that a policy chose, and the groups that come of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from specc.runtime.drafters.host_drafts import HostDrafts
from specc.runtime.policies.base import Policy, live_nodes_of
from specc.runtime.scheduling.batch import StepGroup
from specc.runtime.scheduling.look_ahead import LookAhead
from specc.runtime.scheduling.request import Request
from specc.speculation.plans import OFF, SpecPlan


@dataclass(frozen=True)
class StepGroups:
    """Makes the groups of batches: requests that run the same plan in a step.

    Args:
        position_limit: positions 0 … position_limit - 1 exist in every model.
        shares_pass: all groups go through the target together.
        cuts_trees: the target can verify a part of each request's tree.
    """

    host_drafts: HostDrafts
    position_limit: int
    shares_pass: bool
    cuts_trees: bool

    def wish(self, request: Request, plan: SpecPlan, ahead: LookAhead) -> SpecPlan | None:
        """What a request runs of what the policy chose; None where results in flight decide."""
        if not ahead.is_queued:
            return plan if self._speculates(request, plan, request.cache_len) else OFF
        least, most = ahead.least(request), ahead.most(request)
        does = self._speculates(request, plan, request.cache_len + most)
        if not most:
            return plan if does else OFF
        if self._speculates(request, plan, request.cache_len + least) != does:
            return None
        if does and (ahead.lags(request, plan) or self.host_drafts.brings(plan)):
            return None
        return plan if does else OFF

    def with_predictions(
        self, requests: Sequence[Request], plans: Sequence[SpecPlan], ahead: LookAhead
    ) -> list[SpecPlan] | None:
        """What a policy chose for each request, but for those whose predictions go on.

        None where that depends on tokens in flight.
        """
        awake = [s for s in requests if s.prediction is not None and s.prediction.is_awake]
        if any(ahead.most(request) for request in awake):
            return None
        return [self.host_drafts.plan_for(s, x) for s, x in zip(requests, plans, strict=True)]

    def readers(self, request: Request, plan: SpecPlan) -> tuple[int, ...]:
        """Drafts that read a prompt along with the target."""
        speculates = self._speculates(request, plan, request.prefill_end)
        return tuple(plan.draft_lens) if speculates else ()

    def of(
        self,
        requests: Sequence[Request],
        plans: Mapping[int, SpecPlan],
        ahead: LookAhead,
        policy: Policy,
    ) -> list[StepGroup]:
        """The groups of a batch; those that cannot speculate are the last one, plain.

        Args:
            requests: in the order that they have in their groups.
            plans: of those that run, by identity.
            ahead: rows that are on their way.
            policy: says how much of each tree is verified.
        """
        members: dict[str, tuple[SpecPlan, list[Request]]] = {}
        for request in requests:
            if (plan := plans.get(id(request))) is not None:
                members.setdefault(plan.name, (plan, []))[1].append(request)
        _, plain = members.pop(OFF.name, (OFF, []))
        groups = [self._group(plan, own, ahead) for plan, own in members.values()]
        return self._cut([*groups, self._group(OFF, plain, ahead)] if plain else groups, policy)

    def _group(self, plan: SpecPlan, requests: list[Request], ahead: LookAhead) -> StepGroup:
        extra = self.host_drafts.inputs(plan, requests) if plan.speculates else {}
        tokens = tuple(map(ahead.most, requests)) if ahead.is_queued else ()
        lags = bool(plan.models) and any(ahead.lags(request, plan) for request in requests)
        predicts = plan.reads_proposals and any(
            s.prediction and s.prediction.proposed for s in requests
        )
        return StepGroup(plan, requests, extra, tokens, lags, predicts=predicts)

    def _cut(self, groups: list[StepGroup], policy: Policy) -> list[StepGroup]:
        """Leave to the target what the policy has it verify.

        Where a pass takes all groups, plans in tiles have passes of their own, and so have all
        others beside them: of whole trees.
        """
        # asked at each step: most policies leave trees as they are
        if not self.cuts_trees or type(policy).live_nodes is Policy.live_nodes:
            return groups
        if self.shares_pass and any(group.plan.tile is not None for group in groups):
            return groups
        return [
            replace(group, live=live) if (live := live_nodes_of(policy, group)) else group
            for group in groups
        ]

    def _speculates(self, request: Request, plan: SpecPlan, cache_len: int) -> bool:
        """The plan drafts, the request can take part, and the deepest node has a position."""
        fits = cache_len + plan.max_depth < self.position_limit
        return plan.speculates and fits and request.may_draft and plan.suits(request.params)
