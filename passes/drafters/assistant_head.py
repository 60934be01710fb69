"""A Gemma 4 assistant as one module, for passes over flat tokens; its layers are transformers' own.

Keys and values are those of its target. The module takes them as rows of the tokens of a pass;
`ReadTargetCaches` then has it read what the target has written in their place.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from specc.passes.drafters.assistant_spec import SLIDING, AssistantSpec


class AssistantHead(nn.Module):
    """Parameters are named as those of transformers, without `model.`; the embedding is the
    target's.
    """

    embed_scale: Tensor

    def __init__(self, spec: AssistantSpec) -> None:
        super().__init__()
        from transformers import AutoModel

        config, width = spec.config, spec.target.width
        base: Any = AutoModel.from_config(_with_owners(config))
        self.config, self.spec = config, spec
        # a tuple: its embedding is no part of the module
        self._base = (base,)
        d, rows = int(config.hidden_size), int(config.vocab_size)
        self.embed_tokens = nn.Embedding(rows, width)
        self.register_buffer("embed_scale", torch.tensor(spec.embedding_scale), persistent=False)
        self.pre_projection = nn.Linear(2 * width, d, bias=False)
        self.layers = base.layers[len(spec.kinds) :]
        self.norm, self.rotary_emb = base.norm, base.rotary_emb
        self.post_projection = nn.Linear(d, width, bias=False)
        self.lm_head = nn.Linear(d, rows, bias=False)
        self.masked_embedding = None if spec.clusters is None else _Clusters(spec)

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        """As of models of transformers: `registered_attention` may choose how layers attend."""
        return True

    def _init_weights(self, module: Any) -> None:
        """Fill the buffers of what was made on the meta device."""
        with torch.device("cpu"):
            if type(module) is type(self):
                module.embed_scale.fill_(self.spec.embedding_scale)
            elif isinstance(module, _Clusters):
                clusters = module.spec.clusters
                assert clusters is not None, "a head of clusters"
                module.ids.copy_(clusters.ids)
            else:
                self._base[0]._init_weights(module)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        features: Tensor,
        own_features: Tensor,
        is_tapped: Tensor,
        full_attention_keys: Tensor | None = None,
        full_attention_values: Tensor | None = None,
        sliding_attention_keys: Tensor | None = None,
        sliding_attention_values: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Predict the token after each row's.

        Args:
            input_ids: [1, Nt] int64.
            position_ids: [1, Nt] int64, of a sequence's root, whatever the token's depth is.
            features: [1, Nt, H], the target's hidden state before the root, after its final norm.
            own_features: [1, Nt, H], what the row of the token's parent has handed on.
            is_tapped: [1, Nt, 1] bool, whether the row reads `features`, else `own_features`.
            full_attention_keys: [1, Nt, HK · D], where there are such layers; likewise the others.
        Returns:
            what each row hands on [1, Nt, H], and logits [1, Nt, V]: -inf of ids whose cluster is
            not among the best.
        """
        given = {
            "full_attention": (full_attention_keys, full_attention_values),
            SLIDING: (sliding_attention_keys, sliding_attention_values),
        }
        embedded = self.embed_tokens(input_ids)
        embedded = embedded * self.embed_scale.to(embedded.dtype)
        hidden = torch.where(is_tapped, features, own_features)
        x = self.pre_projection(torch.cat([embedded, hidden], dim=-1))
        before, at = position_ids[:, None, None, :], position_ids[:, None, :, None]
        shared, masks, rotations = {}, {}, {}
        for kind in self.spec.kinds:
            heads, columns = self.spec.heads_of(kind)
            shape = (*x.shape[:-1], heads, columns)
            keys, values = (
                rows.view(shape).transpose(1, 2) for rows in given[kind] if rows is not None
            )
            shared[kind] = keys, values
            # as of layers with rows of their own; what they see is the pass's that gives these way
            masks[kind] = before <= at
            if kind == SLIDING:
                masks[kind] = masks[kind] & (before > at - self.config.sliding_window)
            rotations[kind] = self.rotary_emb(x, position_ids, kind)
        for layer, kind in zip(self.layers, self.config.layer_types, strict=True):
            x = layer(
                x,
                shared_kv_states=shared,
                position_embeddings=rotations[kind],
                attention_mask=masks[kind],
                position_ids=position_ids,
            )
        x = self.norm(x)
        handed_on = self.post_projection(x)
        if self.masked_embedding is None:
            return handed_on, self.lm_head(x)
        return handed_on, self.masked_embedding(x, self.lm_head.weight)


def _with_owners(config: Any) -> Any:
    """A configuration with a layer of each kind before all others, which have the keys and values
    of these: transformers makes no model in which nothing has them.
    """
    types, sizes = list(config.layer_types), ("head_dim", "num_key_value_heads")
    own = [{key: getattr(layer, key) for key in sizes} for layer in config.per_layer_config]
    kinds = sorted(set(types))
    found = copy.deepcopy(config)
    found.per_layer_config = None
    found.num_hidden_layers, found.layer_types = len(kinds) + len(types), [*kinds, *types]
    found.num_kv_shared_layers = len(types)
    layers = [*(own[types.index(kind)] for kind in kinds), *own]
    found.per_layer_config = dict(enumerate(layers))
    return found


class _Clusters(nn.Module):
    """Logits of the ids of the best clusters."""

    ids: Tensor

    def __init__(self, spec: AssistantSpec) -> None:
        super().__init__()
        assert spec.clusters is not None
        self.spec, self.chosen = spec, spec.clusters.chosen
        d = int(spec.config.hidden_size)
        self.centroids = nn.Linear(d, spec.clusters.count, bias=False)
        ids = torch.empty(spec.clusters.ids.shape, dtype=torch.int64)
        self.register_buffer("ids", ids, persistent=False)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """[1, Nt, V] of rows [1, Nt, d], by a table [V, d]."""
        y = x.squeeze(0)
        best = torch.topk(self.centroids(y), self.chosen, dim=-1).indices
        ids = self.ids.index_select(0, best.flatten()).view(y.shape[0], -1)
        rows = nn.functional.embedding(ids, table)
        logits = torch.bmm(y.unsqueeze(1), rows.transpose(1, 2)).squeeze(1)
        nothing = torch.full_like(y[:, :1], float("-inf")).expand(-1, table.shape[0])
        return nothing.scatter(-1, ids, logits).unsqueeze(0)
