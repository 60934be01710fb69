"""Suffix decoding: the host looks in a request, and in what earlier ones have put out."""

from __future__ import annotations

import torch
from torch import Tensor

from specc.drafters.drafter import Drafter
from specc.runtime.drafters.host_drafter import Tokens
from specc.runtime.drafters.lookup import HostLookup
from specc.runtime.drafters.suffix_index import OutputIndex
from specc.runtime.scheduling.request import Request
from specc.speculation.plans import SpecPlan


class HostSuffix(HostLookup):
    """Proposes for steps."""

    def __init__(self, block_size: int, shares_outputs: bool) -> None:
        super().__init__(block_size, shares_outputs)
        self._outputs = OutputIndex()

    def brings(self, plan: SpecPlan) -> bool:
        return plan.reads_proposals

    def inputs(self, plan: SpecPlan, requests: list[Request]) -> dict[str, Tensor]:
        count = plan.max_depth
        (drafter,) = (x for x in plan.drafters if x.facts.is_hosts)
        rows = [self.propose(request, count, drafter)[0] for request in requests]
        padded = [[*row, *[-1] * (count - len(row))] for row in rows]
        return {"proposals": torch.tensor(padded, dtype=torch.int64)}

    def propose(self, request: Tokens, num_tokens: int, drafter: Drafter) -> tuple[list[int], int]:
        own, length = super().propose(request, num_tokens, drafter)
        other, other_length = self._outputs.propose(request.token_ids, num_tokens)
        return (other, other_length) if other_length > length else (own, length)

    def finish(self, request: Tokens) -> None:
        """Later ones may look its output up."""
        # nothing of its prompt: whoever sees what is accepted could ask what others have sent
        if self.shares_outputs:
            self._outputs.add(request.output_token_ids)


HOST = HostSuffix
