"""`specc::embed_norm_rope_write`: from tokens to the first attention, one launch for few rows.

As `add_norm_rope_write`, but that a row of x is the row of the embedding that a token names, and
nothing is added to it. A token out of range has a row of zeros.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from specc.kernels.cuda.add_norm_rope_write import (
    COUNTS,
    SEARCH,
    STRIDES,
    check_places,
    head_columns,
    heads_of,
    rotate_and_write,
)
from specc.kernels.cuda.dependent import (
    ask_and_wait,
    launch_options,
    let_next_start,
    with_dependent,
)
from specc.kernels.cuda.few_rows import BLOCK_TOTAL, EMBED, check_product, precision, tile_for
from specc.kernels.cuda.few_rows_loops import looked_up, normed_pair, store_sum
from specc.kernels.cuda.few_rows_tiles import EMBED_TILES
from specc.kernels.cuda.rms_norm import rms_norm
from specc.kernels.cuda.rope_write import rope_write
from specc.kernels.cuda.shipped import TYPE_NAMES, Shipped
from specc.kernels.cuda.strided_rows import FLOATS, check

NAME = EMBED
_COUNTS = (*COUNTS, "num_embeddings", "token_stride")
# the last tokens of sequences lie apart, and start where they will: nothing is known of them
_UNKNOWN = (*_COUNTS, "tokens")


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
    check_product(NAME, embedding, None, gamma, weight, bias, "embedding")
    check(
        embedding.dim() == 2 and embedding.is_contiguous(),
        NAME,
        f"embedding {list(embedding.shape)}, strides {embedding.stride()}",
        "a contiguous [V, K]",
    )
    check(tokens.dtype == torch.int64, NAME, f"tokens {tokens.dtype}", "int64")
    num_heads, kv_heads, head_dim = heads_of(NAME, tokens.numel(), weight, k_cache, slot)
    tile = tile_for(NAME, tokens.numel(), weight)
    places = (k_cache, v_cache, q_start, slot, block_table)
    if tile is None:
        x = functional.embedding(tokens, embedding)
        y = functional.linear(rms_norm(x, gamma, eps, unit_offset), weight, bias)
        heads = y.view(tokens.numel(), -1, head_dim).transpose(0, 1)
        q, k, v = heads.split([num_heads, kv_heads, kv_heads])
        return rope_write(q, k, v, cos, sin, *places), x
    out = embedding.new_empty(tokens.numel(), num_heads, head_dim)
    total = embedding.new_empty(*tokens.shape, embedding.shape[1])
    check_places(NAME, total, cos, sin, *places)
    if total.numel():
        ids, (num_blocks, block_size) = tokens.reshape(-1), k_cache.shape[:2]
        num_seqs, num_pages = block_table.shape
        per_head = triton.cdiv(head_dim // 2, tile.block_n)
        _embed_norm_rope_write_kernel[((num_heads + 2 * kv_heads) * per_head,)](
            ids, embedding, gamma, weight, bias, cos, sin, k_cache, v_cache,
            q_start, slot, block_table, out, total,
            ids.numel(), num_seqs, num_heads, kv_heads, num_blocks, num_pages, block_size,
            block_table.stride(0), embedding.shape[0], ids.stride(0),
            head_dim, embedding.shape[1],
            float(eps), float(unit_offset), cos.stride(0), sin.stride(0),
            *k_cache.stride()[:3], *v_cache.stride()[:3],
            **tile.sizes,
            BT=BLOCK_TOTAL,
            COPIES=tile.copies(gamma.dtype),
            BB=SEARCH,
            PRECISION=precision(embedding.dtype),
            **launch_options(embedding.dtype, tile.starts_early),
            **tile.options,
        )  # fmt: skip
    return out.transpose(0, 1), total


def shipped(capability: int) -> Iterator[Shipped]:
    """Every tile, with and without a bias."""
    for dtype in FLOATS:
        pointer = f"*{TYPE_NAMES[dtype]}"
        for tile in EMBED_TILES[dtype]:
            for has_bias in (False, True):
                given = ("embedding", "gamma", "weight", "cos", "sin", "k_cache", "v_cache")
                given += ("out", "total", *(("bias",) if has_bias else ()))
                places = ("q_start", "slot", "block_table")
                item = Shipped(
                    name=f"{pointer[1:]}-{tile.name}{'-bias' if has_bias else ''}",
                    kernel=_embed_norm_rope_write_kernel,
                    signature=dict.fromkeys(given, pointer)
                    | dict.fromkeys(places, "*i32")
                    | {"tokens": "*i64"}
                    | dict.fromkeys((*_COUNTS, "D", "K", *STRIDES), "i32")
                    | {"eps": "fp32", "offset": "fp32"},
                    constexprs=({} if has_bias else {"bias": None})
                    | tile.sizes
                    | {"BT": BLOCK_TOTAL, "COPIES": tile.copies(dtype)}
                    | {"BB": SEARCH, "PRECISION": precision(dtype)},
                    **tile.options,
                    divisible=(*given, *places, "D", "K", *STRIDES),
                )
                yield from with_dependent(item, capability, dtype)


@triton.jit(do_not_specialize=_UNKNOWN)
def _embed_norm_rope_write_kernel(
    tokens,
    embedding,
    gamma,
    weight,
    bias,
    cos,
    sin,
    k_cache,
    v_cache,
    q_start,
    slot,
    block_table,
    out,
    total,
    num_rows,
    num_seqs,
    num_heads,
    num_kv_heads,
    num_blocks,
    num_pages,
    block_size,
    stride_table,
    num_embeddings,
    token_stride,
    D,
    K,
    eps,
    offset,
    stride_cos,
    stride_sin,
    stride_kcb,
    stride_kcs,
    stride_kch,
    stride_vcb,
    stride_vcs,
    stride_vch,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    FORM: tl.constexpr,
    STAGES: tl.constexpr,
    BT: tl.constexpr,
    COPIES: tl.constexpr,
    BB: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    i_n = tl.program_id(0)
    i_h, o_d, o_a = head_columns(i_n, D, BN)
    ask_and_wait(weight, o_a, o_a + D // 2, K, IS_DEPENDENT)
    o_r, m_r = looked_up(tokens, token_stride, num_rows, num_embeddings, BM)
    b_a, b_b = normed_pair(
        embedding, None, gamma, weight, o_r, m_r, o_a, o_a + D // 2,
        K, eps, offset, BM, BN, BK, COPIES, PRECISION, FORM, STAGES,
    )  # fmt: skip
    let_next_start(IS_DEPENDENT)
    rotate_and_write(
        b_a, b_b, bias, cos, sin, k_cache, v_cache, q_start, slot, block_table, out,
        i_h, o_d, o_a, num_rows, num_seqs, num_heads, num_kv_heads, num_blocks, num_pages,
        block_size, stride_table, D, stride_cos, stride_sin,
        stride_kcb, stride_kcs, stride_kch, stride_vcb, stride_vcs, stride_vch, BM, BB,
    )  # fmt: skip
    num_programs = tl.num_programs(0)
    store_sum(embedding, None, total, o_r, m_r, num_rows, K, i_n, num_programs, BM, BT)
