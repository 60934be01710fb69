"""Medusa heads (arXiv:2401.10774): each reads one row, the target's, and proposes for one depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specc.bounds import MOST_IDS, number
from specc.drafters.facts import Cache, DrafterFacts, Passes
from specc.drafters.one_pass import OnePass

FACTS = DrafterFacts(
    kind="medusa",
    called="set of Medusa heads",
    passes=Passes.ONE,
    cache=Cache.NONE,
    module="medusa",
    reads_hidden=True,
    methods=("medusa",),
)


@dataclass(frozen=True)
class MedusaHeads(OnePass):
    """They read the target's hidden states of the token before the anchor: head j of `size`
    proposes token j + 1 after it. No rows of a cache, so nothing of a sequence is read before, or
    kept.
    """

    facts = FACTS
    mask_token_id: int = number(0, MOST_IDS, default=0)
    from_anchor: bool = True
    is_flat: bool = True

    @property
    def is_possible(self) -> bool:
        is_plain = not (self.is_biased or self.hidden_columns or self.confidence or self.kind)
        is_plain = is_plain and not self.candidates
        return self.is_flat and self.from_anchor and is_plain

    def num_read(self, depth: int) -> int:
        return 1

    def pass_inputs(
        self, tokens: Sequence[int], root: int, table: Tensor, depth: int
    ) -> list[Tensor | None]:
        """All heads read the hidden state of the token before the root."""
        place = torch.tensor([root], dtype=torch.int32)
        return [
            torch.tensor([tokens[-1]]),
            place.long(),
            torch.tensor([0, 1], dtype=torch.int32),
            place,
            place,
            None,
            table,
            torch.tensor([0]),
            torch.tensor([[root - 1, -1]], dtype=torch.int32),
        ]

    def num_tapped(self, depth: int, catch_up: int) -> int:
        return 1

    def num_logits(self, depth: int) -> int:
        """All heads have some, and those of the tree are put in the order of its levels.

        While the pass joins what its heads have made there are twice as many of these: its
        workspace has them.
        """
        return self.size + depth

    def catch_up(self, depth: int, is_combined: bool) -> int:
        """They read no token."""
        return 1

    def constants(self, depth: int) -> dict[str, Tensor]:
        return {f"{self.name}_places": torch.arange(depth)}

    def describe_logits(self, depth: int) -> str:
        return f"{self.size} Medusa heads, and of {depth} depths in order,"

    def describe(self) -> str:
        return f"{self.size} heads read one row: {self.num_proposed} tokens a pass"
