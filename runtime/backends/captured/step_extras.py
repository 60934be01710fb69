"""What a captured step does besides: masks between its stages, and log probabilities after."""

from __future__ import annotations

from typing import NamedTuple

from specc.runtime.constraints.mask_rules import MaskRules


class StepKind(NamedTuple):
    """What a step does besides; each kind is captured by itself, when it is first asked for.

    Args:
        is_scored: compute log probabilities.
        is_masked: masks change the logits that acceptance looks at.
        has_biases: so do biases.
        reads_draft: masks follow from what the device drafts.
    """

    is_scored: bool = False
    is_masked: bool = False
    has_biases: bool = False
    reads_draft: bool = False


class StepExtras(NamedTuple):
    """What the host asks of a step besides.

    Args:
        is_scored: log probabilities of what it emits.
        masks: of its trees.
    """

    is_scored: bool = False
    masks: MaskRules | None = None

    @property
    def kind(self) -> StepKind:
        masks = self.masks
        if masks is None:
            return StepKind(self.is_scored)
        return StepKind(self.is_scored, True, masks.has_biases, masks.reads_draft)
