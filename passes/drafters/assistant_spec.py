"""Gemma 4 assistants that fit a target.

| part | tensor |
|---|---|
| of the target's embedding and a hidden state, side by side | `pre_projection.weight` [d, 2 H] |
| layers, of Gemma 4 without keys and values | `model.layers.i.…`, `model.norm.weight` |
| head, which is no embedding of anything | `model.embed_tokens.weight` [V, d] |
| what a token hands on | `post_projection.weight` [H, d] |
| clusters of ids, and their ids one after the other | `masked_embedding.…` [C, d], [V] |

Source: huggingface/transformers models/gemma4_assistant.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specc.drafters.assistant import AssistantDraft
from specc.drafters.model import PREFIX
from specc.passes.drafters.head_spec import HeadSpec

FULL, SLIDING = "full_attention", "sliding_attention"
# targets whose embedding multiplies its rows by the root of their width
_SCALED = "gemma"


@dataclass(frozen=True)
class Clusters:
    """Ids by cluster, of a head that computes logits of the ids of some clusters alone.

    Args:
        count: C.
        chosen: clusters whose ids get logits; those of others are -inf.
        ids: [C, V / C] int64 of each cluster.
    """

    count: int
    chosen: int
    ids: Tensor


@dataclass(frozen=True, eq=False)
class AssistantSpec(HeadSpec):
    """An assistant that fits its target; `config` is of its layers.

    Args:
        clusters: of its head; None where all ids get logits.
    """

    clusters: Clusters | None

    @property
    def width(self) -> int:
        """H: what it hands on is as wide as the target's hidden states."""
        return self.target.width

    @property
    def embedding_scale(self) -> float:
        model_type = str(getattr(self.target.config, "model_type", ""))
        return self.target.width**0.5 if _SCALED in model_type else 1.0

    @property
    def kinds(self) -> list[str]:
        """Kinds of its layers."""
        return sorted(set(self.config.layer_types))

    def heads_of(self, kind: str) -> tuple[int, int]:
        """KV heads, and columns of each, of layers of a kind."""
        place = self.config.layer_types.index(kind)
        layer = self.config.per_layer_config[place]
        return int(layer.num_key_value_heads), int(layer.head_dim)

    def drafter(self, name: str) -> AssistantDraft:
        few = 0 if self.clusters is None else self.clusters.chosen * self.clusters.ids.shape[1]
        return AssistantDraft(int(name.removeprefix(PREFIX)), few)

    def describe(self) -> list[str]:
        """What it is, a line each, for people."""
        count, d = int(self.config.num_hidden_layers), int(self.config.hidden_size)
        head = "head: its own, all ids"
        if self.clusters is not None:
            head = f"head: its own, {self.clusters.chosen} of {self.clusters.count} clusters of ids"
        return [
            f"Gemma 4 assistant, files of {self.layout}, {count} layers of {d} without keys and"
            " values of their own",
            "reads the target after the final norm, and the last layer of each kind:"
            f" {', '.join(self.kinds)}",
            f"embedding: the target's; {head}",
        ]
