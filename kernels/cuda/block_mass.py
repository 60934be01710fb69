"""`specc::block_mass`: how much attention the blocks of a sequence get, two launches.

A program has a sequence and a head, and goes through the keys twice: for the maximum and the sum of
each voter's softmax, then for the weights, block by block. The second launch adds up the heads, in
order, so that a result does not depend on which program comes first. Where nobody votes, programs
end at once, so that a captured step can hold the launches.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specc.artifact.kv_rows import holds_quantized
from specc.kernels.cuda.kv_quantized import check_words, in_words, load_scales, values_of
from specc.kernels.cuda.shipped import TYPE_NAMES, Shipped, Types
from specc.kernels.cuda.strided_rows import check, check_dense
from specc.kernels.operators.block_mass import MOST_VOTERS
from specc.kernels.reference.kv_rows import columns_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_DIM = 256
_LOG2_E = 1.4426950408889634
_NUM_WARPS = 4
# ptxas by itself makes room for one more program than that, and spills
_MAX_REGISTERS = 168
# columns that a program adds up, and rows of a block unless it is said otherwise
_COLUMNS, _BLOCK_SIZE = 256, 16


@triton.jit
def _scores(
    b_q, p_q, p_k, p_table, p_words, o_key, m_key, m_voter, b_position, length, num_words,
    num_blocks, block_size, stride_kcb, stride_kcs, scale,
    D: tl.constexpr, BD: tl.constexpr, IS_TREE: tl.constexpr,
):  # fmt: skip
    """Scores [BT, BN] as powers of two, -inf for what a voter does not see."""
    o_d = tl.arange(0, BD)
    i_page = o_key // block_size
    b_block = tl.load(p_table + i_page, mask=m_key, other=0)
    # what a broken table names stays inside the cache
    b_block = tl.minimum(tl.maximum(b_block, 0), num_blocks - 1).to(tl.int64)
    o_k = b_block * stride_kcb + (o_key - i_page * block_size) * stride_kcs
    IS_QUANTIZED: tl.constexpr = p_k.dtype.element_ty.primitive_bitwidth == 8
    if IS_QUANTIZED and b_q.dtype == tl.float32:
        # without tensor cores a thread holds whole rows, quantized ones twice: a part at a time
        BC: tl.constexpr = min(16, BD)
        b_s = tl.zeros([b_q.shape[0], o_key.shape[0]], tl.float32)
        for i in tl.static_range(0, BD, BC):
            o_c = i + tl.arange(0, BC)
            b_part = tl.load(p_q + o_c, mask=m_voter[:, None] & (o_c < D), other=0.0)
            b_k = tl.load(p_k + o_k[:, None] + o_c, mask=m_key[:, None] & (o_c < D), other=0)
            b_s = tl.dot(b_part, tl.trans(values_of(b_k, tl.float32)), b_s, input_precision="ieee")
        b_s = b_s * scale
    else:
        b_k = tl.load(p_k + o_k[:, None] + o_d, mask=m_key[:, None] & (o_d < D), other=0.0)
        b_s = tl.dot(b_q, tl.trans(values_of(b_k, b_q.dtype)), input_precision="ieee") * scale
    if IS_QUANTIZED:
        b_s = b_s * load_scales(p_k + o_k, m_key, D, True)[None, :]
    if IS_TREE:
        o_node = o_key - length
        m_word = (o_node >= 0) & ((o_node >> 6) < num_words) & m_key
        p_word = p_words[:, None] + (o_node >> 6)[None, :]
        b_word = tl.load(p_word, mask=m_voter[:, None] & m_word[None, :], other=0)
        m_seen = (o_node < 0)[None, :] | (((b_word >> (o_node & 63)[None, :]) & 1) != 0)
    else:
        m_seen = o_key[None, :] <= b_position[:, None]
    return tl.where(m_seen & m_key[None, :] & m_voter[:, None], b_s, float("-inf"))


_NOT_SPECIALIZED = (
    "num_words", "num_blocks", "num_pages", "block_size", "num_columns", "num_heads",
    "num_kv_heads", "stride_table", "stride_mass",
)  # fmt: skip


@triton.jit
def _find_voters(slot, begin, last, BT: tl.constexpr):
    """The last live tokens [BT], the last one first, and -1 after the first one."""
    b_t = tl.full([BT], -1, tl.int32)
    found = 0
    while (last > begin) & (found < BT):
        o_t = last - BT + tl.arange(0, BT)
        m_live = (o_t >= begin) & (tl.load(slot + o_t, mask=o_t >= begin, other=-1) >= 0)
        num_live = tl.sum(m_live.to(tl.int32), 0)
        b_rank = found + num_live - tl.cumsum(m_live.to(tl.int32), 0)
        m_own = m_live[None, :] & (b_rank[None, :] == tl.arange(0, BT)[:, None])
        b_t = tl.maximum(b_t, tl.max(tl.where(m_own, o_t[None, :], -1), 1))
        found += num_live
        last -= BT
    return b_t


@triton.jit(do_not_specialize=[*_NOT_SPECIALIZED, "scale"])
def _votes_kernel(
    q,
    k_cache,
    q_start,
    position,
    slot,
    cache_len,
    words,
    block_table,
    mass,
    votes,
    used,
    scale,
    num_words,
    num_blocks,
    num_pages,
    block_size,
    num_columns,
    num_heads,
    num_kv_heads,
    stride_table,
    stride_mass,
    stride_qh,
    stride_qt,
    stride_kcb,
    stride_kcs,
    stride_kch,
    D: tl.constexpr,
    BD: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    IS_TREE: tl.constexpr,
):
    """Votes of a head of a sequence on each of its blocks; and how many blocks are used."""
    i_b = tl.program_id(0).to(tl.int64)
    i_h = tl.program_id(1).to(tl.int64)
    begin = tl.load(q_start + i_b)
    last = tl.load(q_start + i_b + 1)
    length = tl.load(cache_len + i_b)
    p_table = block_table + i_b * stride_table
    p_k = k_cache + i_h // (num_heads // num_kv_heads) * in_words(stride_kch, k_cache)
    stride_kcb, stride_kcs = in_words(stride_kcb, k_cache), in_words(stride_kcs, k_cache)

    end = 0
    if tl.load(mass + i_b * stride_mass) >= 0.0:
        for i in range(begin, last, BT):
            o_t = i + tl.arange(0, BT)
            end = tl.maximum(end, tl.max(tl.load(slot + o_t, mask=o_t < last, other=-1)) + 1)
        end = tl.minimum(end, tl.minimum(num_pages, num_columns) * block_size)
    num_used = (end + block_size - 1) // block_size
    tl.store(used + i_b, num_used, mask=i_h == 0)

    if end > 0:
        b_t = _find_voters(slot, begin, last, BT)
        m_voter = b_t >= 0
        b_position = tl.load(position + b_t, mask=m_voter, other=0)
        p_words = words + b_t.to(tl.int64) * num_words
        o_d = tl.arange(0, BD)
        p_q = q + i_h * stride_qh + b_t.to(tl.int64)[:, None] * stride_qt
        b_q = tl.load(p_q + o_d, mask=m_voter[:, None] & (o_d < D), other=0.0)
        b_m = tl.full([BT], float("-inf"), tl.float32)
        b_l = tl.zeros([BT], tl.float32)
        for i in range(0, end, BN):
            o_key = i + tl.arange(0, BN)
            b_s = _scores(
                b_q, p_q, p_k, p_table, p_words, o_key, o_key < end, m_voter, b_position, length,
                num_words, num_blocks, block_size, stride_kcb, stride_kcs, scale, D, BD, IS_TREE,
            )  # fmt: skip
            b_most = tl.maximum(b_m, tl.max(b_s, 1))
            # of a row that has seen nothing yet: -inf less -inf is no number
            b_base = tl.where(b_most == float("-inf"), 0.0, b_most)
            b_l = b_l * tl.exp2(b_m - b_base) + tl.sum(tl.exp2(b_s - b_base[:, None]), 1)
            b_m = b_most
        b_base = tl.where(b_m == float("-inf"), 0.0, b_m)
        b_share = tl.where(b_l > 0.0, 1.0 / tl.where(b_l > 0.0, b_l, 1.0), 0.0)
        p_votes = votes + (i_b * num_heads + i_h) * num_columns
        for column in range(0, num_used):
            b_sum = tl.zeros([BN], tl.float32)
            after = tl.minimum(end, (column + 1) * block_size)
            for i in range(column * block_size, after, BN):
                o_key = i + tl.arange(0, BN)
                b_s = _scores(
                    b_q, p_q, p_k, p_table, p_words, o_key, o_key < after, m_voter, b_position,
                    length, num_words, num_blocks, block_size, stride_kcb, stride_kcs, scale, D, BD,
                    IS_TREE,
                )  # fmt: skip
                b_sum += tl.sum(tl.exp2(b_s - b_base[:, None]) * b_share[:, None], 0)
            tl.store(p_votes + column, tl.sum(b_sum, 0))


@triton.jit(do_not_specialize=["num_columns", "num_heads", "stride_mass"])
def _add_kernel(votes, used, mass, num_columns, num_heads, stride_mass, BC: tl.constexpr):
    """Add up what the heads of a sequence say, in order."""
    i_b = tl.program_id(0).to(tl.int64)
    o_c = tl.program_id(1) * BC + tl.arange(0, BC)
    m_c = o_c < tl.load(used + i_b)
    p_mass = mass + i_b * stride_mass + o_c
    b_mass = tl.load(p_mass, mask=m_c, other=0.0)
    for i in range(0, num_heads):
        p_votes = votes + (i_b * num_heads + i) * num_columns + o_c
        b_mass += tl.load(p_votes, mask=m_c, other=0.0)
    tl.store(p_mass, b_mass, mask=m_c)


def _tile(block_size: int) -> int:
    """Keys that a program reads together: those of a block, where they are not too many."""
    return min(64, max(16, triton.next_power_of_2(block_size)))


def most_head_dim(dtype: torch.dtype) -> int:
    """Queries of a program lie in registers: wider ones in float32 have no room there."""
    return MAX_HEAD_DIM if dtype.itemsize == 2 else MAX_HEAD_DIM // 2


def block_mass(
    q: Tensor,
    k_cache: Tensor,
    q_start: Tensor,
    position: Tensor,
    slot: Tensor,
    cache_len: Tensor,
    ancestors: Tensor | None,
    block_table: Tensor,
    mass: Tensor,
    *,
    scale: float,
) -> None:
    """Add what the last queries vote to the mass of blocks; see `block_mass_reference`."""
    if mass.shape[1] == 0:
        return
    num_heads, _, head_dim = q.shape
    num_blocks, block_size, num_kv_heads, _ = k_cache.shape
    num_seqs, num_pages = block_table.shape
    _check(q, k_cache, mass, num_seqs, num_pages)
    if num_seqs == 0:
        return
    num_words = 0 if ancestors is None else ancestors.shape[1]
    num_columns = mass.shape[1]
    votes = torch.empty(num_seqs, num_heads, num_columns, dtype=torch.float32, device=q.device)
    used = torch.empty(num_seqs, dtype=torch.int32, device=q.device)
    _votes_kernel[num_seqs, num_heads](
        q, k_cache, q_start, position, slot, cache_len,
        position if ancestors is None else ancestors, block_table, mass, votes, used,
        scale * _LOG2_E, num_words, num_blocks, num_pages, block_size, num_columns, num_heads,
        num_kv_heads, block_table.stride(0), mass.stride(0), *q.stride()[:2],
        *k_cache.stride()[:3],
        D=head_dim,
        BD=max(16, triton.next_power_of_2(head_dim)),
        BT=MOST_VOTERS,
        BN=_tile(block_size),
        IS_TREE=ancestors is not None,
        **_options(q.dtype, holds_quantized(k_cache.dtype)),
    )  # fmt: skip
    _add_kernel[num_seqs, triton.cdiv(num_columns, _COLUMNS)](
        votes, used, mass, num_columns, num_heads, mass.stride(0), BC=_COLUMNS,
        num_warps=_NUM_WARPS,
    )  # fmt: skip


def _options(dtype: torch.dtype, is_quantized: bool) -> dict[str, int]:
    """Warps of a program, and registers that a thread may have."""
    # given a limit, ptxas takes all of it, and spills
    if is_quantized and dtype == torch.float32:
        return {"num_warps": 2 * _NUM_WARPS}
    return {"num_warps": _NUM_WARPS, "maxnreg": _MAX_REGISTERS}


def _check(q: Tensor, k_cache: Tensor, mass: Tensor, num_seqs: int, num_pages: int) -> None:
    """Refuse what the kernel would misread."""
    head_dim, num_kv_heads, columns = q.shape[2], k_cache.shape[2], columns_of(k_cache)
    is_known = k_cache.dtype == q.dtype or holds_quantized(k_cache.dtype)
    name, most = "block_mass", most_head_dim(q.dtype)
    check(
        q.dtype in DTYPES and is_known and mass.dtype == torch.float32,
        name,
        f"{q.dtype}, {k_cache.dtype} and mass {mass.dtype}",
        f"one of {', '.join(map(str, DTYPES))} twice, or quantized keys, and torch.float32",
    )
    found = f"head sizes {head_dim} and {columns} in {q.dtype}"
    check(0 < head_dim == columns <= most, name, found, f"one size of 1 to {most}")
    found = f"{q.shape[0]} heads and {num_kv_heads} KV heads"
    check(q.shape[0] % num_kv_heads == 0, name, found, "a multiple")
    check(
        mass.shape[0] >= num_seqs and mass.shape[1] >= num_pages,
        name,
        f"{mass.shape[0]} rows and {mass.shape[1]} columns of mass",
        f"{num_seqs} and {num_pages}, those of the block table",
    )
    check_words(name, {"k_cache": k_cache})
    check_dense(name, q=q, k_cache=k_cache, mass=mass)


_SHIPPED_HEAD_DIMS = (64, 80, 96, 128, 256)


def shipped(capability: int, is_quantized: bool = False) -> Iterator[Shipped]:
    """Every configuration with blocks of 16 rows, for all capabilities; see `attend.shipped`."""
    places = ("q_start", "slot", "cache_len", "block_table", "used")
    types: Types = {torch.int32: places, torch.int64: ("position", "words")}
    types |= {torch.float32: ("mass", "votes"), float: ("scale",)}
    for dtype in DTYPES:
        options = _options(dtype, is_quantized)
        for head_dim in _SHIPPED_HEAD_DIMS:
            for is_tree in (False, True) if head_dim <= most_head_dim(dtype) else ():
                yield Shipped.of(
                    f"{TYPE_NAMES[dtype]}-d{head_dim}-{'tree' if is_tree else 'causal'}",
                    _votes_kernel, {dtype: ("q", "k_cache")}, types,
                    D=head_dim, BD=max(16, triton.next_power_of_2(head_dim)),
                    BT=MOST_VOTERS, BN=_tile(_BLOCK_SIZE), IS_TREE=is_tree, **options,
                )  # fmt: skip
    added = {torch.float32: ("votes", "mass"), torch.int32: ("used",)}
    yield Shipped.of("add", _add_kernel, added, BC=_COLUMNS)
