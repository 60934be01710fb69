"""P-EAGLE heads as one module, for passes over flat tokens.

Source: vllm-project/speculators models/peagle/core.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specc.passes.drafters.feature_head import FeatureHead
from specc.passes.drafters.head_modules import by_target_ids
from specc.passes.drafters.peagle_spec import MASK, PeagleSpec


class MaskedHead(FeatureHead):
    """An EAGLE-3 head in which a row may read a vector in place of the target's hidden states."""

    def __init__(self, spec: PeagleSpec) -> None:
        super().__init__(spec)
        self.register_parameter(MASK, nn.Parameter(torch.empty(spec.mask_shape)))

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, position_ids: Tensor, features: Tensor, is_tapped: Tensor
    ) -> Tensor:
        """Predict the token after each row's.

        Args:
            input_ids: [1, Nt] int64, token i + 1 of the row of token i, or masks.
            position_ids: [1, Nt] int64, i.
            features: [1, Nt, A · H], see `FeatureHead.forward`.
            is_tapped: [1, Nt, 1] bool, whether the row reads `features`; else it is a mask.
        Returns:
            logits [1, Nt, V] by the target's ids.
        """
        mask = self.get_parameter(MASK).view(-1)
        read = torch.where(is_tapped, features, mask)
        x = self.through_layers(self.fc(self._normed(read)), input_ids, position_ids)
        return by_target_ids(self.lm_head(self.norm(x)), self.columns)
