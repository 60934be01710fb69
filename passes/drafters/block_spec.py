"""What a block drafter is, once its files are read and its target is known."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from specc.drafters.block import BlockDraft
from specc.passes.drafters.block_parts import Conv, LogitScale
from specc.passes.drafters.head_spec import LayeredSpec


@dataclass(frozen=True, eq=False)
class BlockSpec(LayeredSpec):
    """A DFlash (1 or 2) or DSpark drafter; `config` is Qwen3's.

    Args:
        block: what one pass of it fills.
        is_anchored: windows are of rows before the anchor, for all rows of a block; else of rows up
            to each row's own.
        rank: r, of what is added to the logits for the token before (DSpark, DFlash 2); 0 is
            nothing.
        conv: convolutions of its layers (DFlash 2); None where there are none.
        scale: of logits, before anything is added.
        parts: shapes of further tensors, which steps read, by name (LiLiCorr).
    """

    block: BlockDraft
    is_anchored: bool
    rank: int
    conv: Conv | None = None
    scale: LogitScale = field(default_factory=LogitScale)
    parts: dict[str, tuple[int, ...]] = field(default_factory=dict)

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
        return [
            f"{self.kind} drafter, files of {self.layout}, {len(self.windows)} layers of"
            f" {self.width}",
            self.describe_taps(),
            self.block.describe(),
            *([] if self.conv is None else [self.conv.describe()]),
            *self.describe_layers(),
        ]
