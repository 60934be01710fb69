"""`specc::add_norm_rope_write`: a layer up to its attention, one launch for few rows.

A program owns columns of both halves of one head, which a rotation turns into each other. Heads of
q come first, then those of k and of v, which go to the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from specc.kernels.cuda.dependent import (
    ask_and_wait,
    launch_options,
    let_next_start,
)
from specc.kernels.cuda.few_rows import (
    BLOCK_TOTAL,
    check_product,
    in_rows,
    normed_options,
    shipped_normed,
    tile_for,
)
from specc.kernels.cuda.few_rows_loops import looked_up, normed_pair, store_sum
from specc.kernels.cuda.few_rows_tiles import TILES, Tile
from specc.kernels.cuda.rms_norm import add_rms_norm
from specc.kernels.cuda.rope_write import rope_write
from specc.kernels.cuda.shipped import Shipped
from specc.kernels.cuda.strided_rows import FLOATS, check
from specc.kernels.cuda.write_kv import cache_rows, check_cache

NAME = "add_norm_rope_write"
# sequences that one step of the search looks at
SEARCH = 16
COUNTS = (
    "num_rows", "num_seqs", "num_heads", "num_kv_heads", "num_blocks", "num_pages", "block_size",
    "stride_table",
)  # fmt: skip
STRIDES = (
    "stride_cos", "stride_sin", "stride_kcb", "stride_kcs", "stride_kch", "stride_vcb",
    "stride_vcs", "stride_vch",
)  # fmt: skip


def add_norm_rope_write(
    x: Tensor,
    residual: Tensor,
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
    """See `add_norm_rope_write_reference`."""
    places = cos, sin, k_cache, v_cache, q_start, slot, block_table
    check_product(NAME, x, residual, gamma, weight, bias)
    tile = tile_for(NAME, x.shape[:-1].numel(), weight)
    if tile is None:
        normed, total = add_rms_norm(x, residual, gamma, eps, unit_offset)
        return in_launches(NAME, normed, weight, bias, *places), total
    total = x.new_empty(x.shape)
    norm = gamma, float(eps), float(unit_offset)
    rows = None, in_rows(x), in_rows(residual)
    return in_one_launch(NAME, tile, rows, norm, weight, bias, total, *places), total


def in_launches(
    operator: str, normed: Tensor, weight: Tensor, bias: Tensor | None, *places: Tensor
) -> Tensor:
    """Product, rotation and write, each by itself; see `rope_write`."""
    cos, sin, k_cache, v_cache, q_start, slot, block_table = places
    num_tokens = normed.shape[:-1].numel()
    num_heads, kv_heads, head_dim = heads_of(operator, num_tokens, weight, k_cache, slot)
    y = functional.linear(normed, weight, bias).view(num_tokens, -1, head_dim)
    q, k, v = y.transpose(0, 1).split([num_heads, kv_heads, kv_heads])
    return rope_write(q, k, v, cos, sin, k_cache, v_cache, q_start, slot, block_table)


def in_one_launch(
    operator: str,
    tile: Tile,
    rows: tuple[Tensor | None, Tensor, Tensor | None],
    norm: tuple[Tensor, float, float],
    weight: Tensor,
    bias: Tensor | None,
    total: Tensor,
    *places: Tensor,
) -> Tensor:
    """Norm, product, rotation and write.

    Args:
        rows: tokens and the embedding that they name rows of; or None, x and its residual.
        norm: gamma, eps, and what is added to gamma.
        total: [..., K], which gets the rows that are normalized.
        places: as of `rope_write`.
    """
    (tokens, x, residual), (gamma, eps, offset) = rows, norm
    cos, sin, k_cache, v_cache, _, slot, block_table = places
    num_tokens = total.shape[:-1].numel()
    num_heads, kv_heads, head_dim = heads_of(operator, num_tokens, weight, k_cache, slot)
    check_places(operator, total, *places)
    out = x.new_empty(num_tokens, num_heads, head_dim)
    if total.numel():
        per_head = triton.cdiv(head_dim // 2, tile.block_n)
        _add_norm_rope_write_kernel[((num_heads + 2 * kv_heads) * per_head,)](
            tokens, x, residual, gamma, weight, bias, *places, out, total,
            num_tokens, block_table.shape[0], num_heads, kv_heads,
            k_cache.shape[0], block_table.shape[1], k_cache.shape[1], block_table.stride(0),
            *((None, None) if tokens is None else (x.shape[0], tokens.stride(0))),
            head_dim, x.shape[1], eps, offset,
            cos.stride(0), sin.stride(0), *k_cache.stride()[:3], *v_cache.stride()[:3],
            BT=BLOCK_TOTAL,
            BB=SEARCH,
            **normed_options(tile, x.dtype, gamma.dtype),
            **launch_options(x.dtype, tile.starts_early),
        )  # fmt: skip
    return out.transpose(0, 1)


def heads_of(
    operator: str, num_tokens: int, weight: Tensor, k_cache: Tensor, slot: Tensor
) -> tuple[int, int, int]:
    """Heads of q, heads of k, and their size.

    Raises:
        ValueError: another number of tokens than of slots, or no heads of q.
    """
    kv_heads, head_dim = k_cache.shape[2:]
    num_heads = weight.shape[0] // head_dim - 2 * kv_heads
    check(
        num_heads > 0 and weight.shape[0] % head_dim == 0 and num_tokens == slot.shape[0],
        operator,
        f"{num_tokens} rows, weight {list(weight.shape)}, k_cache {list(k_cache.shape)}",
        f"{len(slot)} rows, and heads of q besides {2 * kv_heads} of k and v of {head_dim} each",
    )
    return num_heads, kv_heads, head_dim


def check_places(
    operator: str,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_start: Tensor,
    slot: Tensor,
    block_table: Tensor,
) -> None:
    """Raises ValueError: tables or places that the kernel would misread."""
    num_tokens, (kv_heads, head_dim) = slot.shape[0], k_cache.shape[2:]
    # k and v in the shape that they are written in
    like = x.new_empty(kv_heads, num_tokens, head_dim)
    check_cache(operator, like, like, k_cache, v_cache, q_start, slot, block_table)
    for name, table in (("cos", cos), ("sin", sin)):
        is_table = table.shape == (num_tokens, head_dim) and table.stride(-1) == 1
        check(
            is_table and table.dtype in FLOATS and head_dim % 2 == 0,
            operator,
            f"{name} {table.dtype} {list(table.shape)}",
            f"[{num_tokens}, {head_dim}], columns side by side",
        )


def shipped(capability: int) -> Iterator[Shipped]:
    """Every tile, with and without a bias."""
    absent = dict.fromkeys(("tokens", "num_embeddings", "token_stride"))
    return shipped_in_one_launch(capability, TILES, ("residual",), **absent)


def shipped_in_one_launch(
    capability: int,
    tiles: Mapping[torch.dtype, Iterable[Tile]],
    rows: Sequence[str],
    **absent: None,
) -> Iterator[Shipped]:
    """Configurations with some of the arguments, as `shipped_normed` has them."""
    types = {torch.int32: ("q_start", "slot", "block_table"), torch.int64: ("tokens",)}
    rows = (*rows, "cos", "sin", "k_cache", "v_cache", "total")
    return shipped_normed(
        _add_norm_rope_write_kernel, capability, tiles, rows, types,
        BT=BLOCK_TOTAL, BB=SEARCH, **absent,
    )  # fmt: skip


# the last tokens of sequences lie apart, and start where they will: nothing is known of them
@triton.jit(do_not_specialize=[*COUNTS, "num_embeddings", "token_stride", "tokens"])
def _add_norm_rope_write_kernel(
    tokens,  # [num_rows] rows of x, or none: all of them
    x,
    residual,  # like x, or none
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
    num_embeddings,  # rows of x; none without tokens, like the next
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
    if tokens is None:
        o_r = tl.arange(0, BM)
        m_r = o_r < num_rows
    else:
        o_r, m_r = looked_up(tokens, token_stride, num_rows, num_embeddings, BM)
    b_a, b_b = normed_pair(
        x, residual, gamma, weight, o_r, m_r, o_a, o_a + D // 2,
        K, eps, offset, BM, BN, BK, COPIES, PRECISION, FORM, STAGES,
    )  # fmt: skip
    let_next_start(IS_DEPENDENT)
    rotate_and_write(
        b_a, b_b, bias, cos, sin, k_cache, v_cache, q_start, slot, block_table, out,
        i_h, o_d, o_a, num_rows, num_seqs, num_heads, num_kv_heads, num_blocks, num_pages,
        block_size, stride_table, D, stride_cos, stride_sin,
        stride_kcb, stride_kcs, stride_kch, stride_vcb, stride_vcs, stride_vch, BM, BB,
    )  # fmt: skip
    store_sum(x, residual, total, o_r, m_r, num_rows, K, i_n, tl.num_programs(0), BM, BT)


@triton.jit
def head_columns(i_n, D, BN: tl.constexpr):
    """Head of a program, its columns [BN] in the first half, and their rows in the weight."""
    half = D // 2
    per_head = (half + BN - 1) // BN
    i_h = i_n // per_head
    o_d = (i_n % per_head) * BN + tl.arange(0, BN)
    return i_h, o_d, i_h * D + tl.minimum(o_d, half - 1)


@triton.jit
def rotate_and_write(
    b_a, b_b, bias, cos, sin, k_cache, v_cache, q_start, slot, block_table, out,
    i_h, o_d, o_a, num_rows, num_seqs, num_heads, num_kv_heads, num_blocks, num_pages,
    block_size, stride_table, D, stride_cos, stride_sin,
    stride_kcb, stride_kcs, stride_kch, stride_vcb, stride_vcs, stride_vch,
    BM: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """Both halves of a head, [BM, BN] in float32: rotated to `out`, or to the caches."""
    half = D // 2
    m_d = (o_d < half)[None, :]
    if bias is not None:
        b_a += tl.load(bias + o_a).to(tl.float32)[None, :]
        b_b += tl.load(bias + o_a + half).to(tl.float32)[None, :]
    o_m = tl.arange(0, BM)
    m_m = o_m < num_rows
    m_out = m_m[:, None] & m_d
    o_m2 = o_m[:, None].to(tl.int64)
    if i_h < num_heads + num_kv_heads:
        p_cos = cos + o_m2 * stride_cos + o_d[None, :]  # [BM, BN]
        p_sin = sin + o_m2 * stride_sin + o_d[None, :]
        b_cos = tl.load(p_cos, mask=m_out, other=0.0).to(tl.float32)
        b_sin = tl.load(p_sin, mask=m_out, other=0.0).to(tl.float32)
        b_cos2 = tl.load(p_cos + half, mask=m_out, other=0.0).to(tl.float32)
        b_sin2 = tl.load(p_sin + half, mask=m_out, other=0.0).to(tl.float32)
        b_turned = b_a * b_cos - b_b * b_sin
        b_b = b_b * b_cos2 + b_a * b_sin2
        b_a = b_turned
    # rounded to the dtype of the activations first, whatever the cache has
    b_a = b_a.to(out.dtype.element_ty)
    b_b = b_b.to(out.dtype.element_ty)
    if i_h < num_heads:
        p_out = out + (o_m2 * num_heads + i_h) * D + o_d[None, :]
        tl.store(p_out, b_a, mask=m_out)
        tl.store(p_out + half, b_b, mask=m_out)
    else:
        b_block, b_row, m_live = cache_rows(
            q_start, slot, block_table, o_m, m_m, num_seqs, num_blocks, num_pages,
            block_size, stride_table, BB,
        )  # fmt: skip
        m_kv = m_live[:, None] & m_d
        if i_h < num_heads + num_kv_heads:
            i_kv = (i_h - num_heads).to(tl.int64)
            p_row = k_cache + b_block * stride_kcb + b_row * stride_kcs + i_kv * stride_kch
            p_kc = p_row[:, None] + o_d[None, :]
            tl.store(p_kc, b_a.to(k_cache.dtype.element_ty), mask=m_kv)
            tl.store(p_kc + half, b_b.to(k_cache.dtype.element_ty), mask=m_kv)
        else:
            i_kv = (i_h - num_heads - num_kv_heads).to(tl.int64)
            p_row = v_cache + b_block * stride_vcb + b_row * stride_vcs + i_kv * stride_vch
            p_vc = p_row[:, None] + o_d[None, :]
            tl.store(p_vc, b_a.to(v_cache.dtype.element_ty), mask=m_kv)
            tl.store(p_vc + half, b_b.to(v_cache.dtype.element_ty), mask=m_kv)
