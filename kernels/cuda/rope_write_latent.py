"""`specc::rope_write_latent`: rotation beside latents, and the write of their rows, one launch.

A program has some heads of a token's queries, or its row of the cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specc.kernels.cuda.dependent import launch_options, wait_for_earlier, with_dependent
from specc.kernels.cuda.shipped import TYPE_NAMES, Shipped
from specc.kernels.cuda.strided_rows import FLOATS, check, check_dense
from specc.kernels.cuda.write_kv import SEARCH, cache_rows
from specc.kernels.reference.latent import PAIRS

NAME = "rope_write_latent"
# heads of a program, and its warps
BLOCK_HEADS, WARPS = 4, 4
_TENSORS = ("q", "q_rest", "latent", "shared", "cos", "sin", "k_cache", "out")
_COUNTS = ("num_tokens", "num_heads", "num_seqs", "num_blocks", "num_pages", "block_size")


def rope_write_latent(
    q: Tensor,
    q_rest: Tensor,
    latent: Tensor,
    shared: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_start: Tensor,
    slot: Tensor,
    block_table: Tensor,
    pairs: str,
) -> Tensor:
    """See `rope_write_latent_reference`."""
    rows = (q, q_rest, latent, shared, cos, sin)
    _check(rows, k_cache, q_start, slot, block_table, pairs)
    num_heads, num_tokens, size = q.shape
    width = q_rest.shape[2]
    out = q.new_empty(num_tokens, num_heads, size + width)
    if out.numel():
        grid = (num_tokens, triton.cdiv(num_heads, BLOCK_HEADS) + 1)
        _rope_write_latent_kernel[grid](
            *rows, k_cache, out, q_start, slot, block_table,
            num_tokens, num_heads, block_table.shape[0], k_cache.shape[0], block_table.shape[1],
            k_cache.shape[1], block_table.stride(0),
            *q.stride()[:2], *q_rest.stride()[:2], latent.stride(1), shared.stride(1),
            cos.stride(0), sin.stride(0), *k_cache.stride()[:2],
            **_sizes(size, width),
            **launch_options(q.dtype),
            PAIRS=pairs,
            num_warps=WARPS,
            num_stages=1,
        )  # fmt: skip
    return out.transpose(0, 1)


def _sizes(size: int, width: int) -> dict[str, int]:
    padded = {"BR": triton.next_power_of_2(size), "BP": triton.next_power_of_2(width // 2)}
    return {"R": size, "P": width, "BH": BLOCK_HEADS, "BB": SEARCH} | padded


def _check(
    rows: tuple[Tensor, ...],
    k_cache: Tensor,
    q_start: Tensor,
    slot: Tensor,
    block_table: Tensor,
    pairs: str,
) -> None:
    q, q_rest, _latent, _shared, cos, sin = rows
    is_rows = all(x.dim() == 3 and x.dtype == q.dtype for x in rows[:4]) and q.dtype in FLOATS
    found = ", ".join(f"{x.dtype} {list(x.shape)}" for x in rows)
    check(is_rows, NAME, found, "q, q_rest, latent and shared of three dimensions and one float")
    (num_heads, num_tokens, size), width = q.shape, q_rest.shape[2]
    wanted = (
        q.shape, (num_heads, num_tokens, width), (1, num_tokens, size), (1, num_tokens, width),
        (num_tokens, width), (num_tokens, width),
    )  # fmt: skip
    fits = all(x.shape == shape for x, shape in zip(rows, wanted, strict=True))
    is_even = size > 0 and width > 0 and width % 2 == 0
    tables = cos.dtype in FLOATS and sin.dtype in FLOATS
    needed = "[H, Nt, R], [H, Nt, P], [1, Nt, R], [1, Nt, P], [Nt, P], [Nt, P], P even"
    check(fits and is_even and tables, NAME, found, needed)
    is_cache = k_cache.dim() == 4 and k_cache.shape[2:] == (1, size + width)
    places = q_start.shape == (block_table.shape[0] + 1,) and slot.shape == (num_tokens,)
    named = {"k_cache": k_cache, "q_start": q_start, "slot": slot, "block_table": block_table}
    check(
        is_cache and k_cache.dtype in FLOATS and places,
        NAME,
        ", ".join(f"{name} {x.dtype} {list(x.shape)}" for name, x in named.items()),
        f"[blocks, block_size, 1, {size + width}] of floats, [B + 1], [{num_tokens}], [B, n]",
    )
    names = ("q", "q_rest", "latent", "shared", "cos", "sin")
    check_dense(NAME, **dict(zip(names, rows, strict=True)), **named)
    check(pairs in PAIRS, NAME, pairs, f"one of {', '.join(PAIRS)}")


def shipped(capability: int) -> Iterator[Shipped]:
    """The widths of DeepSeek and MiniCPM3, and every way to pair columns."""
    for dtype in FLOATS:
        types = {dtype: _TENSORS, torch.int32: ("q_start", "slot", "block_table")}
        for size, width in ((512, 64), (256, 32)):
            for pairs in PAIRS:
                item = Shipped.of(
                    f"{TYPE_NAMES[dtype]}-{pairs}-r{size}-p{width}",
                    _rope_write_latent_kernel, types,
                    **_sizes(size, width), PAIRS=pairs, num_warps=WARPS, num_stages=1,
                )  # fmt: skip
                yield from with_dependent(item, capability, dtype)


@triton.jit
def _turn(
    p_x, p_y, p_cos, p_sin, m_x, P: tl.constexpr, BP: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    """Rotate rows at p_x [BH, 1] into p_y."""
    HALF: tl.constexpr = P // 2
    o_p = tl.arange(0, BP)[None, :]
    m_p = o_p < HALF
    if PAIRS == "halves":
        o_a, o_b = o_p, HALF + o_p
    else:
        o_a, o_b = 2 * o_p, 2 * o_p + 1
    b_a = tl.load(p_x + o_a, mask=m_x & m_p, other=0.0).to(tl.float32)  # [BH, BP]
    b_b = tl.load(p_x + o_b, mask=m_x & m_p, other=0.0).to(tl.float32)
    b_cos = tl.load(p_cos + o_p, mask=m_p, other=0.0).to(tl.float32)  # [1, BP]
    b_sin = tl.load(p_sin + o_p, mask=m_p, other=0.0).to(tl.float32)
    b_cos2 = tl.load(p_cos + HALF + o_p, mask=m_p, other=0.0).to(tl.float32)
    b_sin2 = tl.load(p_sin + HALF + o_p, mask=m_p, other=0.0).to(tl.float32)
    if PAIRS == "apart":
        o_a, o_b = o_p, HALF + o_p
    # rounded to the dtype of the activations first, whatever the cache has
    b_y = (b_a * b_cos - b_b * b_sin).to(p_x.dtype.element_ty)
    tl.store(p_y + o_a, b_y.to(p_y.dtype.element_ty), mask=m_x & m_p)
    b_y = (b_b * b_cos2 + b_a * b_sin2).to(p_x.dtype.element_ty)
    tl.store(p_y + o_b, b_y.to(p_y.dtype.element_ty), mask=m_x & m_p)


@triton.jit(do_not_specialize=[*_COUNTS, "stride_table"])
def _rope_write_latent_kernel(
    q,
    q_rest,
    latent,
    shared,
    cos,
    sin,
    k_cache,
    out,
    q_start,
    slot,
    block_table,
    num_tokens,
    num_heads,
    num_seqs,
    num_blocks,
    num_pages,
    block_size,
    stride_table,
    stride_qh,
    stride_qt,
    stride_rh,
    stride_rt,
    stride_lt,
    stride_st,
    stride_cos,
    stride_sin,
    stride_kcb,
    stride_kcs,
    R: tl.constexpr,
    P: tl.constexpr,
    BR: tl.constexpr,
    BP: tl.constexpr,
    BH: tl.constexpr,
    BB: tl.constexpr,
    PAIRS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_earlier(IS_DEPENDENT)
    i_t, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p_cos, p_sin = cos + i_t * stride_cos, sin + i_t * stride_sin
    o_r = tl.arange(0, BR)[None, :]
    if i_h < tl.num_programs(1) - 1:
        o_h = (i_h * BH + tl.arange(0, BH))[:, None].to(tl.int64)
        m_h = o_h < num_heads
        p_out = out + (i_t * num_heads + o_h) * (R + P)  # [BH, 1]
        b_q = tl.load(q + i_t * stride_qt + o_h * stride_qh + o_r, mask=m_h & (o_r < R), other=0.0)
        tl.store(p_out + o_r, b_q, mask=m_h & (o_r < R))
        p_rest = q_rest + i_t * stride_rt + o_h * stride_rh
        _turn(p_rest, p_out + R, p_cos, p_sin, m_h, P, BP, PAIRS)
    else:
        o_t = tl.program_id(0) + tl.arange(0, 1)
        b_block, b_row, m_t = cache_rows(
            q_start, slot, block_table, o_t, o_t < num_tokens, num_seqs, num_blocks, num_pages,
            block_size, stride_table, BB,
        )  # fmt: skip
        m_t = m_t[:, None]
        p_row = k_cache + (b_block * stride_kcb + b_row * stride_kcs)[:, None]  # [1, 1]
        b_latent = tl.load(latent + i_t * stride_lt + o_r, mask=m_t & (o_r < R), other=0.0)
        tl.store(p_row + o_r, b_latent.to(k_cache.dtype.element_ty), mask=m_t & (o_r < R))
        p_shared = shared + i_t * stride_st + tl.zeros([1, 1], tl.int32)
        _turn(p_shared, p_row + R, p_cos, p_sin, m_t, P, BP, PAIRS)
