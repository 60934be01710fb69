"""Drafts that read the newest token and masks after it: one pass proposes all levels of a tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specc.drafters.one_pass import OnePass


class MaskedPass(OnePass):
    """Rows of context that it has not read, the newest token, and masks.

    What a pass writes for masks, and for what is rejected, is overwritten by the next one: it
    begins with all that the last step may have accepted, and reaches as far as the last one did.
    """

    # whether rows of context are fed their tokens, and see those before them; else they are the
    # target's hidden states, which nothing of a pass changes
    reads_tokens: ClassVar[bool] = False
    # rows of tokens are as many before those of the target
    rows_behind: ClassVar[int] = 0

    def num_written(self, depth: int) -> int:
        return self.size

    def num_read(self, depth: int) -> int:
        """Rows of the context that a step may have accepted, the newest token, and masks."""
        return depth + 1 + self.num_written(depth)

    def num_logits(self, depth: int) -> int:
        return depth

    def catch_up(self, depth: int, is_combined: bool) -> int:
        """It reads what was accepted, the token before, and the root."""
        return depth + 2

    def rows_seen(self, before: int) -> Tensor | None:
        """Which rows of the pass each of its rows sees; None: all up to itself.

        Args:
            before: rows of the context that the pass begins with.
        """
        return None

    def logit_places(self, before: int, depth: int) -> Tensor:
        """Rows of a pass whose logits steps read, those of depths first.

        Args:
            before: see `rows_seen`.
            depth: of the tree.
        """
        first = before + self.first_row
        return torch.arange(first, first + depth)

    def constants(self, depth: int) -> dict[str, Tensor]:
        before = depth + 1
        return {
            f"{self.name}_masks": torch.full((self.num_read(depth),), self.mask_token_id),
            f"{self.name}_places": self.logit_places(before, depth),
        }

    def pass_inputs(
        self, tokens: Sequence[int], root: int, table: Tensor, depth: int
    ) -> list[Tensor | None]:
        before, size = len(tokens) - 1, self.num_written(depth)
        own = root - self.rows_behind
        rows = torch.arange(own - before, own + size)
        return [
            torch.tensor([*tokens, *[self.mask_token_id] * (size - 1)]),
            rows,
            torch.tensor([0, before + size], dtype=torch.int32),
            rows.int(),
            torch.tensor([own], dtype=torch.int32),
            self.rows_seen(before),
            table,
            self.logit_places(before, depth),
        ]


@dataclass(frozen=True)
class CausalMasks(MaskedPass):
    """The newest token proposes the one after it, mask m the one after that, and so on.

    No row depends on those after it: a pass has as many masks as its tree needs, and `size` is how
    deep a tree may be.
    """

    reads_tokens = True
    from_anchor: bool = True
    is_causal: bool = True

    @property
    def is_possible(self) -> bool:
        return self.is_plain(self.facts.kind)

    @property
    def rows_ahead(self) -> int:
        """The newest token is read as those before it are, and its row stays."""
        return 1

    def num_written(self, depth: int) -> int:
        return depth

    def describe(self) -> str:
        """For people."""
        return (
            "masks after the newest token propose all levels of a tree in one pass; mask token"
            f" {self.mask_token_id}"
        )
