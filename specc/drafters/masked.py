"""Drafts that read the newest token and masks after it: one pass proposes all levels of a tree."""

from __future__ import annotations

from collections.abc import Sequence
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

    def constants(self, depth: int) -> dict[str, Tensor]:
        before = depth + 1
        first = before + self.first_row
        return {
            f"{self.name}_masks": torch.full((self.num_read(depth),), self.mask_token_id),
            f"{self.name}_places": torch.arange(first, first + depth),
        }

    def pass_inputs(
        self, tokens: Sequence[int], root: int, table: Tensor, depth: int
    ) -> list[Tensor | None]:
        before, size = len(tokens) - 1, self.num_written(depth)
        own = root - self.rows_behind
        rows = torch.arange(own - before, own + size)
        first = before + self.first_row
        return [
            torch.tensor([*tokens, *[self.mask_token_id] * (size - 1)]),
            rows,
            torch.tensor([0, before + size], dtype=torch.int32),
            rows.int(),
            torch.tensor([own], dtype=torch.int32),
            self.rows_seen(before),
            table,
            torch.arange(first, first + depth),
        ]
