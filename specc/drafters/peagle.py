"""P-EAGLE heads (arXiv:2602.01469): EAGLE-3 heads that propose all levels of a tree from masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specc.drafters.eagle3 import FACTS as EAGLE3
from specc.drafters.facts import Passes
from specc.drafters.masked import CausalMasks

FACTS = replace(
    EAGLE3,
    kind="peagle",
    called="P-EAGLE head",
    passes=Passes.ONE,
    module="peagle",
    hands_on=False,
    methods=(),
)


@dataclass(frozen=True)
class PeagleDraft(CausalMasks):
    """A row pairs the target's hidden states of a token with the next token, as of EAGLE-3; masks
    after the newest one read a vector of their own in place of hidden states.
    """

    facts = FACTS
    rows_behind = 1
    kind: str = FACTS.kind

    def num_tapped(self, depth: int, catch_up: int) -> int:
        """Of the context, and of the row of the root."""
        return depth + 2

    def pass_inputs(
        self, tokens: Sequence[int], root: int, table: Tensor, depth: int
    ) -> list[Tensor | None]:
        given = super().pass_inputs(tokens, root, table, depth)
        slots = given[3]
        assert slots is not None
        tapped = slots.clone()
        tapped[len(tokens) :] = -1
        return [*given, torch.stack([tapped, torch.full_like(tapped, -1)], 1)]
