"""`specc::write_rows` and `specc::take_rows`: rows of any width in a paged slab, one launch each.

A program moves a piece of some tokens' rows: rows are as wide as several hidden states.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specc.kernels.cuda.shipped import TYPE_NAMES, Shipped
from specc.kernels.cuda.write_kv import SEARCH

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# columns of a row that a program moves, at most
_COLUMNS = 1024
_NUM_WARPS = 4
_COUNTS = ("num_rows", "per_token", "num_seqs", "num_blocks", "num_pages", "block_size")
# what differs between slabs alone, and what a compiler gains by knowing
_NOT_SPECIALIZED = (*_COUNTS, "stride_table")


@triton.jit
def _places(
    q_start, slots, block_table, o_i, num_rows, per_token, num_seqs, num_blocks, num_pages,
    block_size, stride_table, BB: tl.constexpr,
):  # fmt: skip
    """Block and row in it of each row [BT] of the tokens, and which rows have one.

    A row has none if its slot is -1, if no sequence owns its token, or if its slot or block lies
    outside of table or slab.
    """
    o_t = o_i // per_token
    b_b = tl.full(o_i.shape, -1, tl.int32)  # [BT]
    for i in range(0, num_seqs, BB):
        o_b = i + tl.arange(0, BB)
        m_b = o_b < num_seqs
        b_start = tl.load(q_start + o_b, mask=m_b, other=0)  # [BB]
        m_before = m_b[None, :] & (b_start[None, :] <= o_t[:, None])  # [BT, BB]
        b_b += tl.sum(m_before.to(tl.int32), 1)
    m_i = (o_i < num_rows) & (b_b >= 0) & (o_t < tl.load(q_start + num_seqs))
    b_slot = tl.load(slots + o_i, mask=m_i, other=-1)
    m_i = m_i & (b_slot >= 0) & (b_slot < num_pages * block_size)
    b_slot = tl.where(m_i, b_slot, 0)
    p_table = block_table + b_b.to(tl.int64) * stride_table + b_slot // block_size
    b_block = tl.load(p_table, mask=m_i, other=-1)
    m_i = m_i & (b_block >= 0) & (b_block < num_blocks)
    return tl.where(m_i, b_block, 0).to(tl.int64), (b_slot % block_size).to(tl.int64), m_i


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def _write_rows_kernel(
    x, slab, q_start, slots, block_table, num_rows, per_token, num_seqs, num_blocks, num_pages,
    block_size, stride_table, width, stride_x, stride_sb, stride_ss,
    BT: tl.constexpr, BW: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    o_i = tl.program_id(0) * BT + tl.arange(0, BT)
    o_w = tl.program_id(1) * BW + tl.arange(0, BW)
    b_block, b_row, m_i = _places(
        q_start, slots, block_table, o_i, num_rows, per_token, num_seqs, num_blocks, num_pages,
        block_size, stride_table, BB,
    )  # fmt: skip
    m_moved = m_i[:, None] & (o_w < width)[None, :]
    b_x = tl.load(x + o_i.to(tl.int64)[:, None] * stride_x + o_w[None, :], mask=m_moved)
    p_slab = slab + (b_block * stride_sb + b_row * stride_ss)[:, None] + o_w[None, :]
    tl.store(p_slab, b_x, mask=m_moved)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def _take_rows_kernel(
    out, slab, q_start, slots, block_table, num_rows, per_token, num_seqs, num_blocks, num_pages,
    block_size, stride_table, width, stride_sb, stride_ss,
    BT: tl.constexpr, BW: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    o_i = tl.program_id(0) * BT + tl.arange(0, BT)
    o_w = tl.program_id(1) * BW + tl.arange(0, BW)
    b_block, b_row, m_i = _places(
        q_start, slots, block_table, o_i, num_rows, per_token, num_seqs, num_blocks, num_pages,
        block_size, stride_table, BB,
    )  # fmt: skip
    m_w = (o_w < width)[None, :]
    p_slab = slab + (b_block * stride_sb + b_row * stride_ss)[:, None] + o_w[None, :]
    b_x = tl.load(p_slab, mask=m_i[:, None] & m_w, other=0.0)
    p_out = out + o_i.to(tl.int64)[:, None] * width + o_w[None, :]
    tl.store(p_out, b_x, mask=(o_i < num_rows)[:, None] & m_w)


def config(num_rows: int, width: int) -> tuple[int, int]:
    """Rows of a program, and columns of them."""
    return 1 if num_rows <= 64 else 4, min(triton.next_power_of_2(width), _COLUMNS)


def write_rows(x: Tensor, slab: Tensor, q_start: Tensor, slot: Tensor, block_table: Tensor) -> None:
    """Write rows of the live tokens to the slab; see `write_rows_reference`."""
    num_tokens, width = x.shape if x.dim() == 2 else (0, 0)
    if x.dim() != 2 or x.dtype != slab.dtype or slab.dim() != 3 or slab.shape[2] != width:
        raise ValueError(
            f"write_rows: found x {list(x.shape)} of {x.dtype}, slab {list(slab.shape)} of"
            f" {slab.dtype}; needed [Nt, W] and [blocks, block_size, W] of one type"
        )
    _check("write_rows", slab, q_start, block_table)
    _check_slots("write_rows", slot, (num_tokens,))
    _check_strides("write_rows", x=x, slab=slab, block_table=block_table)
    if num_tokens == 0 or width == 0 or block_table.numel() == 0:
        return
    block_t, block_w = config(num_tokens, width)
    grid = (triton.cdiv(num_tokens, block_t), triton.cdiv(width, block_w))
    _write_rows_kernel[grid](
        x, slab, q_start, slot, block_table, num_tokens, 1, *_sizes(slab, block_table), width,
        x.stride(0), *slab.stride()[:2],
        BT=block_t, BW=block_w, BB=SEARCH, num_warps=_NUM_WARPS,
    )  # fmt: skip


def take_rows(slab: Tensor, slots: Tensor, q_start: Tensor, block_table: Tensor) -> Tensor:
    """Read rows of the slab for each token; see `take_rows_reference`."""
    if slab.dim() != 3 or slots.dim() != 2:
        raise ValueError(
            f"take_rows: found slab {list(slab.shape)}, slots {list(slots.shape)};"
            " needed [blocks, block_size, W] and [Nt, K]"
        )
    _check("take_rows", slab, q_start, block_table)
    _check_slots("take_rows", slots, tuple(slots.shape))
    _check_strides("take_rows", slab=slab, block_table=block_table)
    width, num_rows = slab.shape[2], slots.numel()
    out = torch.empty(*slots.shape, width, dtype=slab.dtype, device=slab.device)
    if num_rows == 0 or width == 0:
        return out
    block_t, block_w = config(num_rows, width)
    grid = (triton.cdiv(num_rows, block_t), triton.cdiv(width, block_w))
    _take_rows_kernel[grid](
        out, slab, q_start, slots, block_table, num_rows, slots.shape[1],
        *_sizes(slab, block_table), width, *slab.stride()[:2],
        BT=block_t, BW=block_w, BB=SEARCH, num_warps=_NUM_WARPS,
    )  # fmt: skip
    return out


def _sizes(slab: Tensor, block_table: Tensor) -> tuple[int, ...]:
    num_seqs, num_pages = block_table.shape
    return num_seqs, slab.shape[0], num_pages, slab.shape[1], block_table.stride(0)


def _check(name: str, slab: Tensor, q_start: Tensor, block_table: Tensor) -> None:
    if slab.dtype not in DTYPES:
        raise ValueError(f"{name}: found {slab.dtype}; needed one of {', '.join(map(str, DTYPES))}")
    integers = {"q_start": q_start, "block_table": block_table}
    if (
        block_table.dim() != 2
        or q_start.shape != (block_table.shape[0] + 1,)
        or any(x.dtype != torch.int32 for x in integers.values())
        or not q_start.is_contiguous()
    ):
        found = ", ".join(f"{n} {list(x.shape)} of {x.dtype}" for n, x in integers.items())
        raise ValueError(f"{name}: found {found}; needed [B + 1] and [B, n] of torch.int32")


def _check_slots(name: str, slots: Tensor, shape: tuple[int, ...]) -> None:
    if slots.shape != shape or slots.dtype != torch.int32 or not slots.is_contiguous():
        raise ValueError(
            f"{name}: found slots {list(slots.shape)} of {slots.dtype}, strides"
            f" {slots.stride()}; needed {list(shape)} of torch.int32, contiguous"
        )


def _check_strides(name: str, **tensors: Tensor) -> None:
    for label, tensor in tensors.items():
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(
                f"{name}: found strides {tensor.stride()} of {label};"
                " needed 1 in the last dimension"
            )


def shipped(capability: int) -> Iterator[Shipped]:
    """Every configuration that engines launch on a capability: loads and stores alone."""
    for dtype in DTYPES:
        for kernel, moved in ((_write_rows_kernel, "x"), (_take_rows_kernel, "out")):
            types = {dtype: (moved, "slab"), torch.int32: ("q_start", "slots", "block_table")}
            for num_rows in (1, 512):
                block_t, block_w = config(num_rows, 3 * _COLUMNS)
                name = f"{'write' if moved == 'x' else 'take'}-{TYPE_NAMES[dtype]}-rows{block_t}"
                yield Shipped.of(name, kernel, types, BT=block_t, BW=block_w, BB=SEARCH)
