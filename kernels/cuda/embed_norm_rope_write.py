"""`specc::embed_norm_rope_write`: from tokens to the first attention, one launch for few rows.

The kernel is that of `add_norm_rope_write`, but that a row of x is the row of the embedding that a
token names, and nothing is added to it. A token out of range has a row of zeros.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from specc.kernels.cuda.add_norm_rope_write import (
    in_launches,
    in_one_launch,
    shipped_in_one_launch,
)
from specc.kernels.cuda.few_rows import EMBED, check_product, tile_for
from specc.kernels.cuda.few_rows_tiles import EMBED_TILES
from specc.kernels.cuda.rms_norm import rms_norm
from specc.kernels.cuda.shipped import Shipped
from specc.kernels.cuda.strided_rows import check

NAME = EMBED


def embed_norm_rope_write(
    tokens: Tensor,
    embedding: Tensor,
    gamma: Tensor,
    eps: float,
    unit_offset: bool,
    weight: Tensor,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_start: Tensor,
    slot: Tensor,
    block_table: Tensor,
) -> tuple[Tensor, Tensor]:
    """See `embed_norm_rope_write_reference`."""
    places = cos, sin, k_cache, v_cache, q_start, slot, block_table
    check_product(NAME, embedding, None, gamma, weight, bias, "embedding")
    check(
        embedding.dim() == 2 and embedding.is_contiguous(),
        NAME,
        f"embedding {list(embedding.shape)}, strides {embedding.stride()}",
        "a contiguous [V, K]",
    )
    check(tokens.dtype == torch.int64, NAME, f"tokens {tokens.dtype}", "int64")
    tile = tile_for(NAME, tokens.numel(), weight)
    if tile is None:
        x = functional.embedding(tokens, embedding)
        normed = rms_norm(x, gamma, eps, unit_offset)
        return in_launches(NAME, normed, weight, bias, *places), x
    total = embedding.new_empty(*tokens.shape, embedding.shape[1])
    norm = gamma, float(eps), float(unit_offset)
    rows = tokens.reshape(-1), embedding, None
    return in_one_launch(NAME, tile, rows, norm, weight, bias, total, *places), total


def shipped(capability: int) -> Iterator[Shipped]:
    """Every tile, with and without a bias."""
    return shipped_in_one_launch(capability, EMBED_TILES, (), residual=None)
