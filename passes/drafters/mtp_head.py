"""An MTP module, for passes over flat tokens; the layer in it is of the target's own class."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from specc.errors import HeadError


class MtpHead(nn.Module):
    """The MTP module of a model; see `mtp_spec` for what is said of it where.

    Args:
        deeper: of transformers, with a layer more than the target: the last one is the module's.
    """

    def __init__(self, deeper: Any) -> None:
        super().__init__()
        base, config = deeper.base_model, deeper.config
        parts = {key: getattr(base, key, None) for key in ("layers", "norm", "rotary_emb")}
        if None in parts.values() or not hasattr(config, "rms_norm_eps"):
            raise HeadError(
                f"an MTP module of {type(deeper).__name__}",
                "a model of layers with one rotary embedding, and norms of one kind",
                "choose another --draft",
            )
        self.config = config
        # a tuple: what it has beside its last layer is no part of the module
        self._deeper = (deeper,)
        width, norm = int(config.hidden_size), type(base.norm)
        self.embed_tokens = deeper.get_input_embeddings()
        self.enorm = norm(width, eps=config.rms_norm_eps)
        self.hnorm = norm(width, eps=config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.layer = base.layers[-1]
        self.rotary_emb = base.rotary_emb
        self.norm = norm(width, eps=config.rms_norm_eps)
        self.lm_head = deeper.get_output_embeddings()

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        """As of models of transformers: `registered_attention` may choose how the layer attends."""
        return True

    def _init_weights(self, module: nn.Module) -> None:
        """Fill the buffers of what was made on the meta device."""
        self._deeper[0]._init_weights(module)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        features: Tensor,
        own_features: Tensor,
        is_tapped: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Predict the token after each row's.

        Args:
            input_ids: [1, Nt] int64, token i + 1 of the row of token i.
            position_ids: [1, Nt] int64, i; all rows of a sequence count from the same token on.
            features: [1, Nt, H], the target's hidden state at token i, after its final norm.
            own_features: [1, Nt, H], what the row of token i - 1 has handed on.
            is_tapped: [1, Nt, 1] bool, whether the row reads `features`, else `own_features`.
        Returns:
            what each row hands on [1, Nt, H], and logits [1, Nt, V].
        """
        from transformers.masking_utils import create_causal_mask

        hidden = torch.where(is_tapped, features, own_features)
        embedded = self.embed_tokens(input_ids)
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=x,
            attention_mask=None,
            past_key_values=None,
            position_ids=position_ids,
        )
        rotation = self.rotary_emb(x, position_ids)
        x = self.layer(
            x, position_embeddings=rotation, attention_mask=mask, position_ids=position_ids
        )
        handed_on = self.norm(x)
        return handed_on, self.lm_head(handed_on)
