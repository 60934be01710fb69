"""What a kind of draft brings to be fitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from specc.fit.target import Sizes
from specc.fit.texts import Texts, TextStore


@dataclass(frozen=True)
class LayerShape:
    """Of a draft's layers.

    Args:
        width: d.
        inner: of MLPs.
        heads: of attention.
        kv_heads: of those, with keys of their own.
        head_dim: of each.
    """

    width: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of_width(cls, width: int) -> LayerShape:
        """A usual one."""
        size = 128 if width >= 2048 else 64 if width >= 128 else max(2, width // 4 * 2)
        heads = max(1, width // size)
        kv_heads = next(n for n in range(max(1, heads // 2), 0, -1) if heads % n == 0)
        return cls(width, 2 * width, heads, kv_heads, size)

    def fields(self, sizes: Sizes, trained_length: int) -> dict[str, Any]:
        """Of a configuration of one layer, as transformers names them."""
        return {
            "vocab_size": sizes.vocab_size,
            "hidden_size": self.width,
            "intermediate_size": self.inner,
            "num_hidden_layers": 1,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": trained_length,
            "rms_norm_eps": sizes.eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "tie_word_embeddings": False,
            "bos_token_id": sizes.bos_token_id,
            "eos_token_id": sizes.eos_token_id,
        }


@dataclass(frozen=True)
class DraftShape:
    """What to build.

    Args:
        layer: of its layers.
        boundaries: of the target that it reads.
        depth: tokens that it proposes in a row.
        trained_length: positions of the texts that it is going to learn from.
        kept: [Vd] int64, the target's ids that it proposes, ascending.
        mask_token_id: what stands for tokens that are not known.
    """

    layer: LayerShape
    boundaries: tuple[int, ...]
    depth: int
    trained_length: int
    kept: Tensor
    mask_token_id: int


class Fitter(Protocol):
    """A kind of draft."""

    # tokens that a draft proposes in a row
    depth: int
    # whether it proposes some of the target's ids alone
    has_draft_vocab: bool
    # tokens of a step of training, about
    batch_tokens: int

    def check(self, sizes: Sizes) -> None:
        """Raises ConfigError: a target that it is not fitted to."""

    def build(self, sizes: Sizes, shape: DraftShape) -> nn.Module:
        """A draft with random layers."""

    def begin(self, draft: Any, store: TextStore) -> None:
        """Prepare it for these texts."""

    def losses(
        self, draft: Any, texts: Texts, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, a scalar; by depth its part, and the share of places where both agree."""

    def end(self, draft: Any) -> None:
        """Leave what a checkpoint has of it."""

    def hits(self, draft: Any, text: Texts, depth: int) -> Tensor:
        """[roots, depth] bool, whether it proposes what came; see `Chains.follow`."""

    def save(self, draft: Any, sizes: Sizes, boundaries: Sequence[int], directory: Path) -> None:
        """Write its files as they are published."""
