"""Self-drafts: the host chooses which blocks of the target's cache they see."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from specc.runtime.drafters.host_drafter import HostDrafter
from specc.runtime.scheduling.request import Request
from specc.speculation.plans import SpecPlan


class HostViews(HostDrafter):
    """Brings columns of the block table that views see."""

    def brings(self, plan: SpecPlan) -> bool:
        return plan.chooses_blocks

    def inputs(self, plan: SpecPlan, requests: list[Request]) -> dict[str, Tensor]:
        columns = [self._columns(plan, request) for request in requests]
        return {"chosen_blocks": torch.tensor(columns, dtype=torch.int64)}

    def _columns(self, plan: SpecPlan, request: Request) -> list[int]:
        """Those of one view after the other."""
        choice, length = request.block_choice, request.cache_len
        found = (choice.columns(view, length, self.block_size) for view in plan.views)
        return list(itertools.chain(*found))


HOST = HostViews
