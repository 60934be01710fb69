"""What a P-EAGLE head is, once its files are read: an EAGLE-3 head, and what its masks are."""

from __future__ import annotations

from dataclasses import dataclass

from specc.drafters.peagle import PeagleDraft
from specc.passes.drafters.head_spec import EagleSpec
from specc.speculation.tree import MAX_NODES

# what a mask reads in place of hidden states: a tensor of the checkpoint, and the parameter
MASK = "mask_hidden"


@dataclass(frozen=True, eq=False)
class PeagleSpec(EagleSpec):
    """Args:
    mask_token_id: what stands for a token that is not known.
    mask_shape: of the tensor `MASK`; all dimensions but its last one are 1.
    """

    mask_token_id: int
    mask_shape: tuple[int, ...]

    @property
    def hands_on(self) -> bool:
        """No: a mask reads what every mask reads."""
        return False

    def drafter(self, name: str) -> PeagleDraft:
        return PeagleDraft(MAX_NODES, self.mask_token_id, draft=name)

    def describe(self) -> list[str]:
        return [*super().describe(), self.drafter("draft_0").describe()]
