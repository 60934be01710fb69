"""Trace a model with torch.export over padded batches; no weight is read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from specc.passes.frontend.attention_function import registered_attention
from specc.passes.frontend.rotary import constant_frequencies
from specc.passes.frontend.trace import ModelCall, export, require_logits, to_program
from specc.passes.program import PADDED_INPUTS, Program


class _PaddedCall(ModelCall):
    """Present a model with all inputs of a padded pass; most stay unused placeholders."""

    def forward(
        self, tokens: Tensor, positions: Tensor, write_index: Tensor, logit_rows: Tensor
    ) -> Tensor:
        return self.logits(tokens, positions)


def trace_padded(model: nn.Module, name: str, rope_length: int | None = None) -> Program:
    """Trace `model(input_ids [B, N], position_ids [B, N]) -> logits [B, N, V]`, both dynamic.

    Args:
        rope_length: see `rotary.constant_length`.
    Raises:
        NotCausalLMError: the model does not take these inputs or return logits of this shape.
        UnsupportedGraphError: torch cannot trace it.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    i64: dict[str, Any] = {"dtype": torch.int64, "device": device}
    inputs = {
        "tokens": torch.zeros(3, 8, **i64),
        "positions": torch.arange(8, **i64).expand(3, 8).contiguous(),
        "write_index": torch.zeros(3, **i64),
        "logit_rows": torch.zeros(6, **i64),
    }
    batch, nodes = Dim("batch", min=1, max=4096), Dim("nodes", min=1, max=1 << 20)
    dynamic = {
        "tokens": {0: batch, 1: nodes},
        "positions": {0: batch, 1: nodes},
        "write_index": {0: batch},
        "logit_rows": {0: Dim("rows", min=1, max=1 << 20)},
    }
    with registered_attention(model), constant_frequencies(model, rope_length) as frequencies:
        exported = export(_PaddedCall(model), model, inputs, dynamic)
        (tokens,) = exported.graph_module.graph.find_nodes(op="placeholder", target="tokens")
        require_logits(exported, type(model).__name__, batch=str(tokens.meta["val"].shape[0]))
        return to_program(exported, model, name, PADDED_INPUTS, frequencies)
