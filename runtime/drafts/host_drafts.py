"""What the host does for the drafts of a step: votes' weights, proposals of its index, and the
blocks that self-drafts see.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor

from specc.runtime.backends.step_io import StepResult
from specc.runtime.drafts.suffix_index import OutputIndex, SuffixIndex
from specc.runtime.drafts.vote_weights import VoteWeights, leader
from specc.runtime.scheduling.request import Request
from specc.speculation.plan_names import lookup_ngram
from specc.speculation.plans import SUFFIX, VOTE, SpecPlan


class HostDrafts:
    """State of an engine's drafts that lives on the host, across steps and requests.

    Args:
        plans: of the engine, by name.
        block_size: rows of a block of its cache.
        shares_outputs: what one request has put out is looked up for others.
    """

    def __init__(
        self, plans: Mapping[str, SpecPlan], block_size: int = 0, shares_outputs: bool = True
    ) -> None:
        self._block_size = block_size
        self._weights = {
            name: VoteWeights(
                len(plan.drafts), [i for i, d in enumerate(plan.drafts) if d in plan.asked]
            )
            for name, plan in plans.items()
            if plan.combine == VOTE
        }
        has_suffix = any(SUFFIX in plan.drafts for plan in plans.values())
        self._shares_outputs = shares_outputs and has_suffix
        self._outputs = OutputIndex()

    def inputs(self, plan: SpecPlan, requests: list[Request]) -> dict[str, Tensor]:
        """What a step of this plan reads besides rows; see `StepInputs.extra`."""
        extra = {}
        if plan.name in self._weights:
            row = torch.tensor(self._weights[plan.name].next_row(), dtype=torch.float32)
            extra["vote_weights"] = row.expand(len(requests), -1).contiguous()
        if plan.speculates and SUFFIX in plan.drafts:
            count = plan.max_depth
            rows = [self.propose(request, count, SUFFIX)[0] for request in requests]
            extra["proposals"] = torch.tensor(
                [[*row, *[-1] * (count - len(row))] for row in rows], dtype=torch.int64
            )
        if plan.chooses_blocks:
            extra["chosen_blocks"] = torch.tensor(
                [self._columns(plan, request) for request in requests], dtype=torch.int64
            )
        return extra

    def _columns(self, plan: SpecPlan, request: Request) -> list[int]:
        """Columns of the block table that the plan's views see, of one after the other."""
        choice, length = request.block_choice, request.cache_len
        found = (choice.columns(view, length, self._block_size) for view in plan.views)
        return list(itertools.chain(*found))

    def brings(self, plan: SpecPlan) -> bool:
        """Whether steps of a plan read anything of the host, which has to know their requests."""
        has_suffix = plan.speculates and SUFFIX in plan.drafts
        return plan.name in self._weights or has_suffix or plan.chooses_blocks

    def propose(self, request: Request, num_tokens: int, draft: str) -> tuple[list[int], int]:
        """What followed the longest suffix of a request, here or in earlier outputs.

        Args:
            request: whose last tokens are looked up.
            num_tokens: proposals at most.
            draft: `lookup-N`, which compares N tokens at most and stays in the request, or
                `suffix`.
        Returns:
            tokens, and how long the suffix was.
        """
        index = self._index_of(request)
        own, length = index.propose(num_tokens, lookup_ngram(draft))
        if draft != SUFFIX:
            return own, length
        other, other_length = self._outputs.propose(request.token_ids, num_tokens)
        return (other, other_length) if other_length > length else (own, length)

    def observe(
        self,
        plan: SpecPlan,
        requests: list[Request],
        extra: Mapping[str, Tensor],
        step: StepResult,
    ) -> None:
        """Take the outcome of a step.

        Args:
            plan: of the step.
            requests: that took part, as they were before it.
            extra: what `inputs` gave it.
            step: its results.
        """
        if plan.name not in self._weights or not requests:
            return
        weights = self._weights[plan.name]
        # a leader's chain is the one that was verified
        first = leader(extra["vote_weights"][0].tolist())
        for place, draft in enumerate(plan.drafts):
            if draft not in plan.asked:
                counts = [
                    self._agreed(request, draft, plan.max_depth, tokens[: count + 1])
                    for request, tokens, count in zip(
                        requests, step.output_tokens, step.num_accepted, strict=True
                    )
                ]
                weights.observe(place, counts, plan.max_depth)
            elif place == first:
                weights.observe(place, step.num_accepted, plan.max_depth)

    def _agreed(
        self, request: Request, draft: str, num_tokens: int, output_tokens: list[int]
    ) -> int:
        """Tokens that a lookup proposed and the target took."""
        proposed, _ = self.propose(request, num_tokens, draft)
        pairs = zip(proposed, output_tokens, strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    def finish(self, request: Request) -> None:
        """A request has ended: later ones may look its output up."""
        # nothing of its prompt: whoever sees what is accepted could ask what others have sent
        if self._shares_outputs:
            self._outputs.add(request.output_token_ids)

    def _index_of(self, request: Request) -> SuffixIndex:
        if request.suffix_index is None:
            request.suffix_index = SuffixIndex()
        index = request.suffix_index
        index.extend(request.token_ids[len(index) :])
        return index
