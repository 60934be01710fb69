"""Suffix decoding: the host looks in a request, and in what earlier ones have put out.

What it proposes for steps may also be what a request's prediction has, see `prediction.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specc.drafters.drafter import Drafter
from specc.runtime.drafters.host_drafter import Tokens
from specc.runtime.drafters.lookup import HostLookup
from specc.runtime.drafters.suffix_index import OutputIndex
from specc.runtime.requests.salt import BySalt, Salt, shares
from specc.runtime.scheduling.request import Request
from specc.speculation.plans import SpecPlan

# salts whose outputs are kept, and tokens of each; a token takes about 100 bytes
_SALTS, _SALT_TOKENS = 64, 1 << 14


class HostSuffix(HostLookup):
    """Proposes for steps."""

    def __init__(self, block_size: int, shares_outputs: bool) -> None:
        super().__init__(block_size, shares_outputs)
        self._outputs = BySalt(_outputs_of, _SALTS)

    def brings(self, plan: SpecPlan) -> bool:
        return plan.reads_proposals

    def inputs(self, plan: SpecPlan, requests: list[Request]) -> dict[str, Tensor]:
        count = plan.max_depth
        (drafter,) = (x for x in plan.drafters if x.facts.is_hosts)
        rows = [self._for_step(request, count, drafter) for request in requests]
        padded = [[*row, *[-1] * (count - len(row))] for row in rows]
        return {"proposals": torch.tensor(padded, dtype=torch.int64)}

    def propose(self, request: Tokens, num_tokens: int, drafter: Drafter) -> tuple[list[int], int]:
        own, length = super().propose(request, num_tokens, drafter)
        if not shares(request.salt):
            return own, length
        outputs = self._outputs.of(request.salt)
        other, other_length = outputs.propose(request.token_ids, num_tokens)
        return (other, other_length) if other_length > length else (own, length)

    def finish(self, request: Tokens) -> None:
        """Later ones may look its output up."""
        # nothing of its prompt: whoever sees what is accepted could ask what others have sent
        if self.shares_outputs and shares(request.salt):
            self._outputs.of(request.salt).add(request.output_token_ids)

    def _for_step(self, request: Request, num_tokens: int, drafter: Drafter) -> list[int]:
        """What a step is given: of the longest match, that of the prediction where two are."""
        found, length = self.propose(request, num_tokens, drafter)
        prediction = request.prediction
        if prediction is None:
            return found
        predicted, matched = prediction.propose(request.output_token_ids, num_tokens)
        prediction.proposed = predicted if matched >= length else []
        return prediction.proposed or found


def _outputs_of(salt: Salt | None) -> OutputIndex:
    return OutputIndex() if salt is None else OutputIndex(_SALT_TOKENS)


HOST = HostSuffix
