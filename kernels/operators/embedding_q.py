"""Lookups in quantized weights."""

from __future__ import annotations

import torch
from torch import Tensor

from specc.kernels.operator import Lookup, Operator, Reads
from specc.kernels.operators.linear import PACKED
from specc.kernels.reference.embedding_q import embedding_q_reference


def _embedding_q_fake(
    weight: Tensor, tokens: Tensor, num_embeddings: int, width: int, layout: str
) -> Tensor:
    return weight.new_empty(tokens.shape[0], width, dtype=torch.float32)


EMBEDDING_Q = Operator(
    "embedding_q(Tensor weight, Tensor tokens, int num_embeddings, int width, str layout)"
    " -> Tensor",
    reference=embedding_q_reference,
    fake=_embedding_q_fake,
    tokens=Lookup("weight", "tokens"),
    cut=PACKED,
    reads=Reads(rows="weight"),
    cpu=True,
)
