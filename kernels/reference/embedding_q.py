"""The oracle of lookups in quantized weights."""

from __future__ import annotations

from torch import Tensor

from specc.artifact.decoded_rows import decode_rows
from specc.artifact.quantized_layout import QuantizedLayout


def embedding_q_reference(
    weight: Tensor, tokens: Tensor, num_embeddings: int, width: int, layout: str
) -> Tensor:
    """Look tokens up in a quantized table, which a projection may multiply by, too.

    Args:
        weight: uint8 [blocks, bytes], see `specc.artifact.quantized_layout`.
        tokens: [T] int64, each in 0 … N - 1.
        num_embeddings: N.
        width: K.
        layout: name of it, as `QuantizedLayout.named` takes it.
    Returns:
        [T, K] float32: (u - z) · s, or v · s, rounded once.
    """
    return decode_rows(weight, tokens, (num_embeddings, width), QuantizedLayout.named(layout))
