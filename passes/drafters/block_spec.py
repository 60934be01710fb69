"""What a block drafter is, once its files are read and its target is known."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from specc.drafters.block import BlockDraft
from specc.passes.drafters.head_spec import EMBEDDING, HEAD, HeadSpec, RopeFacts


@dataclass(frozen=True, eq=False)
class BlockSpec(HeadSpec):
    """A DFlash or DSpark drafter; `config` is Qwen3's.

    Args:
        block: what one pass of it fills.
        draft_vocab_size: Vd, rows of its head.
        target_ids: [Vd] int64, the target's id of each row of the head, ascending; None where row
            i is id i.
        windows: of each of its layers, 0 is all: rows before the anchor that a block sees where
            `is_anchored`, else rows up to its own that each row sees.
        is_anchored: windows count from the anchor, for all rows of a block.
        rank: r, of what is added to the logits for the token before (DSpark); 0 is nothing.
        rope: of its layers.
    """

    block: BlockDraft
    draft_vocab_size: int
    target_ids: Tensor | None
    windows: tuple[int, ...]
    is_anchored: bool
    rank: int
    rope: RopeFacts

    def window_of(self, layer: int) -> int:
        """Keys up to its own that a row of a layer sees, 0 is all; the anchor's, of all of them."""
        window = self.windows[layer]
        return window + 1 if window and self.is_anchored else window

    def drafter(self, name: str) -> BlockDraft:
        return replace(self.block, draft=name)

    def without_confidence(self) -> BlockSpec:
        return replace(self, block=self.block.without_confidence())

    @property
    def hands_on(self) -> bool:
        """No: all that follows a token finds is in the caches."""
        return False

    def describe(self) -> list[str]:
        """What it is, a line each, for people."""
        taps = ", ".join(str(place) for place in self.boundaries)
        last = " after the final norm" if self.is_last_normed else ""
        ids = f"{self.draft_vocab_size} of {self.target.vocab_size} ids"
        owner = {True: "the target's", False: "its own"}
        rope = f"rotary embedding: {self.rope.kind}, theta {self.rope.theta:g}"
        windows = ", ".join(str(window) if window else "all" for window in self.windows)
        return [
            f"{self.kind} drafter, files of {self.layout}, {len(self.windows)} layers of"
            f" {self.width}",
            f"reads the target at boundaries {taps}{last}",
            self.block.describe(),
            f"embedding: {owner[EMBEDDING in self.shared]};"
            f" head: {owner[HEAD in self.shared]}, {ids}",
            f"{rope}, trained for {self.rope.trained_length} positions; rows seen: {windows}",
        ]
