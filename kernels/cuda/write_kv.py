"""`specc::write_kv`: keys and values of the in-flight tokens into the paged cache, one launch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specc.artifact.kv_rows import holds_quantized
from specc.kernels.cuda.kv_quantized import check_words, in_words, store_row
from specc.kernels.cuda.shipped import TYPE_NAMES, Shipped
from specc.kernels.cuda.strided_rows import check, check_dense
from specc.kernels.reference.kv_rows import columns_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_DIM = 256
CACHES = ("k_cache", "v_cache")
# sequences that one step of the search looks at
SEARCH = 256


@triton.jit
def cache_rows(
    q_start, slot, block_table, o_t, m_t, num_seqs, num_blocks, num_pages, block_size,
    stride_table, BB: tl.constexpr, o_i=None,
):  # fmt: skip
    """Block and row in it of each token [BT], and which tokens have one.

    A token is dead if its slot is -1, if no sequence owns it, or if its slot or block lies outside
    of table or cache. o_i [BT] are places of slots, where they are others than of tokens.
    """
    b_b = tl.full(o_t.shape, -1, tl.int32)  # [BT]
    for i in range(0, num_seqs, BB):
        o_b = i + tl.arange(0, BB)
        m_b = o_b < num_seqs
        b_start = tl.load(q_start + o_b, mask=m_b, other=0)  # [BB]
        m_before = m_b[None, :] & (b_start[None, :] <= o_t[:, None])  # [BT, BB]
        b_b += tl.sum(m_before.to(tl.int32), 1)
    m_t = m_t & (b_b >= 0) & (o_t < tl.load(q_start + num_seqs))
    b_slot = tl.load(slot + (o_t if o_i is None else o_i), mask=m_t, other=-1)
    m_t = m_t & (b_slot >= 0) & (b_slot < num_pages * block_size)
    b_slot = tl.where(m_t, b_slot, 0)
    p_table = block_table + b_b.to(tl.int64) * stride_table + b_slot // block_size
    b_block = tl.load(p_table, mask=m_t, other=-1)
    m_t = m_t & (b_block >= 0) & (b_block < num_blocks)
    return tl.where(m_t, b_block, 0).to(tl.int64), (b_slot % block_size).to(tl.int64), m_t


_NOT_SPECIALIZED = ("num_tokens", "num_seqs", "num_blocks", "num_pages", "block_size")


@triton.jit(do_not_specialize=[*_NOT_SPECIALIZED, "num_kv_heads", "stride_table"])
def _write_kv_kernel(
    k,
    v,
    k_cache,
    v_cache,
    q_start,
    slot,
    block_table,
    num_tokens,
    num_seqs,
    num_kv_heads,
    num_blocks,
    num_pages,
    block_size,
    stride_kh,
    stride_kt,
    stride_vh,
    stride_vt,
    stride_kcb,
    stride_kcs,
    stride_kch,
    stride_vcb,
    stride_vcs,
    stride_vch,
    stride_table,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
    BB: tl.constexpr,
):
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)
    o_h = tl.program_id(1) * BH + tl.arange(0, BH)
    b_block, b_row, m_t = cache_rows(
        q_start, slot, block_table, o_t, o_t < num_tokens, num_seqs, num_blocks, num_pages,
        block_size, stride_table, BB,
    )  # fmt: skip
    m_row = m_t[:, None, None] & (o_h < num_kv_heads)[None, :, None]  # [BT, BH, 1]
    o_t = o_t.to(tl.int64)[:, None, None]
    o_h = o_h.to(tl.int64)[None, :, None]
    b_block = b_block[:, None, None]
    b_row = b_row[:, None, None]

    stride_kcb, stride_kcs = in_words(stride_kcb, k_cache), in_words(stride_kcs, k_cache)
    stride_vcb, stride_vcs = in_words(stride_vcb, v_cache), in_words(stride_vcs, v_cache)
    stride_kch, stride_vch = in_words(stride_kch, k_cache), in_words(stride_vch, v_cache)

    o_d = tl.arange(0, BD)[None, None, :]
    m_k = m_row & (o_d < D)  # [BT, BH, BD]
    b_k = tl.load(k + o_t * stride_kt + o_h * stride_kh + o_d, mask=m_k, other=0.0)
    p_k = k_cache + b_block * stride_kcb + b_row * stride_kcs + o_h * stride_kch
    store_row(p_k, o_d, b_k, m_row, D)

    o_dv = tl.arange(0, BDV)[None, None, :]
    m_v = m_row & (o_dv < DV)  # [BT, BH, BDV]
    b_v = tl.load(v + o_t * stride_vt + o_h * stride_vh + o_dv, mask=m_v, other=0.0)
    p_v = v_cache + b_block * stride_vcb + b_row * stride_vcs + o_h * stride_vch
    store_row(p_v, o_dv, b_v, m_row, DV)


def config(num_tokens: int, num_kv_heads: int) -> tuple[int, int, int]:
    """Tokens and heads of a program, and its warps: 4 for 8 rows of a head.

    16 rows get 8: ptxas gives sm_80 32 registers and spills with 4.
    """
    block_h = min(8, triton.next_power_of_2(num_kv_heads))
    block_t = 1 if num_tokens <= 64 else 8 // block_h * 2
    return block_t, block_h, max(4, block_t * block_h // 2)


def write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_start: Tensor,
    slot: Tensor,
    block_table: Tensor,
) -> None:
    """Write K and V of the live tokens to the cache; see `write_kv_reference`."""
    check_cache("write_kv", k, v, k_cache, v_cache, q_start, slot, block_table)
    num_kv_heads, num_tokens, head_dim = k.shape
    num_blocks, block_size = v_cache.shape[:2]
    value_dim = v.shape[2]
    num_seqs, num_pages = block_table.shape
    if num_tokens == 0 or num_seqs == 0:
        return
    block_t, block_h, num_warps = config(num_tokens, num_kv_heads)
    grid = (triton.cdiv(num_tokens, block_t), triton.cdiv(num_kv_heads, block_h))
    _write_kv_kernel[grid](
        k, v, k_cache, v_cache, q_start, slot, block_table,
        num_tokens, num_seqs, num_kv_heads, num_blocks, num_pages, block_size,
        *k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3],
        block_table.stride(0),
        **_sizes(head_dim, value_dim, block_t, block_h, num_warps),
    )  # fmt: skip


def _sizes(
    head_dim: int, value_dim: int, block_t: int, block_h: int, num_warps: int
) -> dict[str, int]:
    padded = {"BD": triton.next_power_of_2(head_dim), "BDV": triton.next_power_of_2(value_dim)}
    blocks = {"BT": block_t, "BH": block_h, "BB": SEARCH, "num_warps": num_warps}
    return {"D": head_dim, "DV": value_dim, **padded, **blocks}


def check_cache(
    name: str,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_start: Tensor,
    slot: Tensor,
    block_table: Tensor,
) -> None:
    """Refuse what a kernel that writes to the cache would misread."""
    rows = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache}
    for label, tensor in rows.items():
        is_known = tensor.dtype in DTYPES or (label in CACHES and holds_quantized(tensor.dtype))
        check(is_known, name, f"{tensor.dtype}", f"one of {', '.join(map(str, DTYPES))}")
    num_kv_heads, num_tokens, head_dim = k.shape
    value_dim = v.shape[2]
    is_right = v.shape[:2] == k.shape[:2] and k_cache.shape[:2] == v_cache.shape[:2]
    for cache, size in ((k_cache, head_dim), (v_cache, value_dim)):
        is_right = is_right and (*cache.shape[2:-1], columns_of(cache)) == (num_kv_heads, size)
    check(
        is_right,
        name,
        ", ".join(f"{label} {tuple(tensor.shape)}" for label, tensor in rows.items()),
        "[HK, Nt, D], [HK, Nt, DV], [blocks, block_size, HK, D], [blocks, block_size, HK, DV]",
    )
    for size in (head_dim, value_dim):
        check(0 < size <= MAX_HEAD_DIM, name, f"head size {size}", f"1 to {MAX_HEAD_DIM}")
    places = {"q_start": q_start, "slot": slot, "block_table": block_table}
    check(
        q_start.shape == (block_table.shape[0] + 1,) and slot.shape == (num_tokens,),
        name,
        ", ".join(f"{label} {tuple(tensor.shape)}" for label, tensor in places.items()),
        f"[B + 1], [{num_tokens}] and [B, n]",
    )
    check_words(name, {"k_cache": k_cache, "v_cache": v_cache})
    check_dense(name, **rows, **places)


_SHIPPED_HEAD_DIMS = (64, 80, 96, 128, 256)


def shipped(capability: int) -> Iterator[Shipped]:
    """Every configuration that engines launch on a capability."""
    places = ("q_start", "slot", "block_table")
    for dtype in DTYPES:
        types = {dtype: ("k", "v", "k_cache", "v_cache"), torch.int32: places}
        for head_dim in _SHIPPED_HEAD_DIMS:
            for blocks in sorted({config(1, 8), config(512, 8)}):
                name = f"write_kv-{TYPE_NAMES[dtype]}-d{head_dim}-tokens{blocks[0]}"
                sizes = _sizes(head_dim, head_dim, *blocks)
                yield Shipped.of(name, _write_kv_kernel, types, **sizes)
