"""`specc::commit_kv` in one launch: rows of all layers, K and V, staged in registers.

A program owns some columns of all rows that a sequence moves in one layer. It reads them all, then
writes them all, so sources and targets may overlap in any way.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specc.kernels.cuda.shipped import Shipped
from specc.kernels.cuda.strided_rows import check, said
from specc.speculation.tree import MAX_NODES

# bits are moved, whatever they mean
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# elements that a program stages
STAGED = 8192


@triton.jit
def cache_rows(b_slot, table, table_stride, num_slots, num_blocks, block_size):
    """Rows of the flat cache that slots lie in; -1 for none, and for what lies beyond a table."""
    m_slot = (b_slot >= 0) & (b_slot < num_slots)
    o_slot = tl.where(m_slot, b_slot, 0)
    b_block = tl.load(table + o_slot // block_size * table_stride, mask=m_slot, other=-1)
    m_slot = m_slot & (b_block >= 0) & (b_block < num_blocks)
    return tl.where(m_slot, b_block.to(tl.int64) * block_size + o_slot % block_size, -1)


@triton.jit(
    do_not_specialize=[
        "source_stride",
        "source_step",
        "target_stride",
        "target_step",
        "table_stride",
        "table_step",
        "num_moves",
        "num_slots",
        "num_blocks",
        "block_size",
    ]
)
def commit_kv_kernel(
    slab,
    source,
    target,
    block_table,
    source_stride,
    source_step,
    target_stride,
    target_step,
    table_stride,
    table_step,
    num_moves,
    num_slots,
    num_blocks,
    block_size,
    ROW: tl.constexpr,
    BP: tl.constexpr,
    BD: tl.constexpr,
):
    i_d = tl.program_id(0)
    i_l = tl.program_id(1).to(tl.int64)
    i_b = tl.program_id(2).to(tl.int64)
    o_p = tl.arange(0, BP)
    m_p = o_p < num_moves
    b_source = tl.load(source + i_b * source_stride + o_p * source_step, mask=m_p, other=-1)
    b_target = tl.load(target + i_b * target_stride + o_p * target_step, mask=m_p, other=-1)
    p_table = block_table + i_b * table_stride
    b_from = cache_rows(
        b_source.to(tl.int64), p_table, table_step, num_slots, num_blocks, block_size
    )
    b_to = cache_rows(b_target.to(tl.int64), p_table, table_step, num_slots, num_blocks, block_size)
    m_move = (b_from >= 0) & (b_to >= 0) & (b_source != b_target)
    o_d = i_d * BD + tl.arange(0, BD)
    m_moved = m_move[:, None] & (o_d < ROW)[None, :]  # [BP, BD]
    p_layer = slab + i_l * num_blocks * block_size * ROW
    b_row = tl.load(p_layer + b_from[:, None] * ROW + o_d[None, :], mask=m_moved)
    # other threads hold rows that this one overwrites
    tl.debug_barrier()
    tl.store(p_layer + b_to[:, None] * ROW + o_d[None, :], b_row, mask=m_moved)


def config(num_moves: int, row: int) -> dict[str, int]:
    block_p = triton.next_power_of_2(max(num_moves, 1))
    block_d = min(triton.next_power_of_2(row), max(16, STAGED // block_p), 2048)
    return {"BP": block_p, "BD": block_d, "num_warps": 8 if block_p * block_d > 2048 else 4}


def commit_kv(slab: Tensor, source: Tensor, target: Tensor, block_table: Tensor) -> None:
    is_right = slab.dim() == 6 and slab.shape[1] in (1, 2) and slab.is_contiguous()
    needed = "contiguous [L, 2, blocks, block_size, HK, D], or 1 part of a layer"
    check(is_right, "commit_kv", said("slab", slab), needed)
    _check_moves(source, target, block_table)
    num_layers, num_parts, num_blocks, block_size, heads, dim = slab.shape
    batch, num_moves = source.shape
    row = heads * dim
    if slab.numel() == 0 or source.numel() == 0 or block_table.shape[1] == 0:
        return
    sizes = config(num_moves, row)
    commit_kv_kernel[(triton.cdiv(row, sizes["BD"]), num_layers * num_parts, batch)](
        slab.view(BITS[slab.element_size()]),
        source,
        target,
        block_table,
        *source.stride(),
        *target.stride(),
        *block_table.stride(),
        num_moves,
        block_table.shape[1] * block_size,
        num_blocks,
        block_size,
        ROW=row,
        **sizes,
    )


def _check_moves(source: Tensor, target: Tensor, block_table: Tensor) -> None:
    moves = {"source": source, "target": target, "block_table": block_table}
    found = ", ".join(said(name, x) for name, x in moves.items())
    is_right = all(x.dtype in (torch.int32, torch.int64) for x in (source, target))
    is_right = is_right and block_table.dim() == 2 and block_table.dtype == torch.int32
    is_right = is_right and source.dim() == 2 and source.shape == target.shape
    needed = "[B, P], [B, P] of int32 or int64, [B, n] of int32"
    check(is_right and len(source) == len(block_table), "commit_kv", found, needed)
    num_moves = source.shape[1]
    found = f"{num_moves} moves a sequence"
    check(num_moves <= MAX_NODES, "commit_kv", found, f"at most {MAX_NODES}")


def shipped(capability: int) -> Iterator[Shipped]:
    """The same for every compute capability: loads and stores alone."""
    moves = {torch.int32: ("source", "target", "block_table")}
    for element in (2, 4):
        for row in (512, 1024):
            for num_moves in (1, 4, 8, 16, 64, 1024):
                name = f"bits{8 * element}-row{row}-moves{num_moves}"
                sizes = config(num_moves, row)
                slab = {BITS[element]: ("slab",)}
                yield Shipped.of(name, commit_kv_kernel, slab, moves, ROW=row, **sizes)
