"""Medusa heads as one module: a row of the target's features becomes the logits of all depths."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specc.passes.drafters.head_modules import by_target_ids, linear_of
from specc.passes.drafters.medusa_spec import MedusaSpec


class MedusaHead(nn.Module):
    """Heads that read one row."""

    columns: Tensor | None

    def __init__(self, spec: MedusaSpec) -> None:
        super().__init__()
        width, self.config, self.spec = spec.width, spec.config, spec
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                linear_of(spec, f"blocks.{head}.{layer}", width, width)
                for layer in range(spec.num_layers)
            )
            for head in range(spec.block.size)
        )
        self.lm_head: nn.Linear | None = None
        self.lm_heads: nn.ModuleList | None = None
        if spec.has_one_projection:
            self.lm_head = nn.Linear(width, spec.num_rows, bias=False)
        else:
            self.lm_heads = nn.ModuleList(
                nn.Linear(width, spec.num_rows, bias=False) for _ in self.blocks
            )
        ids = spec.columns
        # values are there once `_init_weights` has run: a module may be on the meta device
        columns = None if ids is None else torch.zeros(ids.shape, dtype=ids.dtype)
        self.register_buffer("columns", columns, persistent=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor, features: Tensor) -> Tensor:
        """Logits of the tokens that the heads propose, side by side.

        Args:
            input_ids: [1, Nt] int64; not read.
            position_ids: [1, Nt] int64; not read.
            features: [1, Nt, H], the target's hidden state of a token, after its final norm.
        Returns:
            [1, Nt, D · V] of D heads, each by the target's ids: -inf of those that a projection has
            no row for. Head j is about the token j + 2 after the row's own.
        """
        found = []
        for head, layers in enumerate(self.blocks):
            x = features
            for layer in layers:  # type: ignore[attr-defined]
                x = x + F.silu(layer(x))
            found.append(by_target_ids(self._project(head, x), self.columns))
        return torch.cat(found, dim=-1)

    def _project(self, head: int, x: Tensor) -> Tensor:
        if self.lm_head is not None:
            return self.lm_head(x)
        assert self.lm_heads is not None
        return self.lm_heads[head](x)

    def _init_weights(self, module: Any) -> None:
        """Fill the buffer of what was made on the meta device."""
        if isinstance(module, MedusaHead) and module.columns is not None:
            assert self.spec.columns is not None
            module.columns.copy_(self.spec.columns)
