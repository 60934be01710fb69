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
from specc.kernels.cuda.strided_rows import check, check_dense, check_tensors, said
from specc.kernels.cuda.write_kv import SEARCH, cache_rows

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# columns of a row that a program moves, at most
_COLUMNS = 1024
_NUM_WARPS = 4
_COUNTS = ("num_rows", "per_token", "num_seqs", "num_blocks", "num_pages", "block_size")
# what differs between slabs alone, and what a compiler gains by knowing
_NOT_SPECIALIZED = (*_COUNTS, "stride_table")


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def _rows_kernel(
    x, out, slab, q_start, slots, block_table, num_rows, per_token, num_seqs, num_blocks, num_pages,
    block_size, stride_table, width, stride_x, stride_sb, stride_ss,
    BT: tl.constexpr, BW: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """Rows of x go to the slab, or where there are none, those of the slab to `out`."""
    o_i = tl.program_id(0) * BT + tl.arange(0, BT)
    o_w = tl.program_id(1) * BW + tl.arange(0, BW)
    b_block, b_row, m_i = cache_rows(
        q_start, slots, block_table, o_i // per_token, o_i < num_rows, num_seqs, num_blocks,
        num_pages, block_size, stride_table, BB, o_i,
    )  # fmt: skip
    m_w = (o_w < width)[None, :]
    p_slab = slab + (b_block * stride_sb + b_row * stride_ss)[:, None] + o_w[None, :]
    o_row = o_i.to(tl.int64)[:, None]
    m_moved = m_i[:, None] & m_w
    if x is not None:
        b_x = tl.load(x + o_row * stride_x + o_w[None, :], mask=m_moved)
        tl.store(p_slab, b_x, mask=m_moved)
    else:
        b_x = tl.load(p_slab, mask=m_moved, other=0.0)
        p_out = out + o_row * width + o_w[None, :]
        tl.store(p_out, b_x, mask=(o_i < num_rows)[:, None] & m_w)


def config(num_rows: int, width: int) -> tuple[int, int]:
    """Rows of a program, and columns of them."""
    return 1 if num_rows <= 64 else 4, min(triton.next_power_of_2(width), _COLUMNS)


def write_rows(x: Tensor, slab: Tensor, q_start: Tensor, slot: Tensor, block_table: Tensor) -> None:
    """Write rows of the live tokens to the slab; see `write_rows_reference`."""
    num_tokens, width = x.shape if x.dim() == 2 else (0, 0)
    is_right = x.dim() == 2 and x.dtype == slab.dtype
    is_right = is_right and slab.dim() == 3 and slab.shape[2] == width
    found = f"{said('x', x)}, {said('slab', slab)}"
    check(is_right, "write_rows", found, "[Nt, W] and [blocks, block_size, W] of one type")
    _check("write_rows", slab, q_start, block_table)
    check_tensors("write_rows", torch.int32, (num_tokens,), is_contiguous=True, slots=slot)
    check_dense("write_rows", x=x, slab=slab)
    if num_tokens and width and block_table.numel():
        _launch(x, None, slab, q_start, slot, block_table, 1)


def take_rows(slab: Tensor, slots: Tensor, q_start: Tensor, block_table: Tensor) -> Tensor:
    """Read rows of the slab for each token; see `take_rows_reference`."""
    found = said("slab", slab)
    check(slab.dim() == 3, "take_rows", found, "[blocks, block_size, W]")
    _check("take_rows", slab, q_start, block_table)
    check_tensors("take_rows", torch.int32, ("Nt", "K"), is_contiguous=True, slots=slots)
    check_dense("take_rows", slab=slab)
    width, num_rows = slab.shape[2], slots.numel()
    out = torch.empty(*slots.shape, width, dtype=slab.dtype, device=slab.device)
    if num_rows and width:
        _launch(None, out, slab, q_start, slots, block_table, slots.shape[1])
    return out


def _launch(
    x: Tensor | None,
    out: Tensor | None,
    slab: Tensor,
    q_start: Tensor,
    slots: Tensor,
    block_table: Tensor,
    per_token: int,
) -> None:
    num_rows, width, (num_seqs, num_pages) = slots.numel(), slab.shape[2], block_table.shape
    block_t, block_w = config(num_rows, width)
    grid = (triton.cdiv(num_rows, block_t), triton.cdiv(width, block_w))
    _rows_kernel[grid](
        x, out, slab, q_start, slots, block_table, num_rows, per_token,
        num_seqs, slab.shape[0], num_pages, slab.shape[1], block_table.stride(0), width,
        None if x is None else x.stride(0), *slab.stride()[:2],
        BT=block_t, BW=block_w, BB=SEARCH, num_warps=_NUM_WARPS,
    )  # fmt: skip


def _check(name: str, slab: Tensor, q_start: Tensor, block_table: Tensor) -> None:
    check(slab.dtype in DTYPES, name, f"{slab.dtype}", f"one of {', '.join(map(str, DTYPES))}")
    check_tensors(name, torch.int32, ("B", "n"), block_table=block_table)
    size = block_table.shape[0] + 1
    check_tensors(name, torch.int32, (size,), is_contiguous=True, q_start=q_start)


def shipped(capability: int) -> Iterator[Shipped]:
    """Every configuration that engines launch on a capability: loads and stores alone."""
    for dtype in DTYPES:
        types = {dtype: ("x", "out", "slab"), torch.int32: ("q_start", "slots", "block_table")}
        for name, absent in (("write", ("out",)), ("take", ("x", "stride_x"))):
            for num_rows in (1, 512):
                block_t, block_w = config(num_rows, 3 * _COLUMNS)
                yield Shipped.of(
                    f"{name}-{TYPE_NAMES[dtype]}-rows{block_t}", _rows_kernel, types,
                    **dict.fromkeys(absent), BT=block_t, BW=block_w, BB=SEARCH,
                )  # fmt: skip
