"""`specc::attend` for wide tiles on Hopper: when it is taken, its launches, what ships."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from specc.kernels.cuda import attend_few, dependent
from specc.kernels.cuda.attend_call import ROWS, AttendCall, shipped_pages, types_of
from specc.kernels.cuda.attend_config import SHORT_ROWS
from specc.kernels.cuda.attend_merge import merge_wide_kernel
from specc.kernels.cuda.attend_wide_kernels import attend_wide_kernel
from specc.kernels.cuda.shipped import TYPE_NAMES, Shipped

# rows of a tile: of one group of warps that multiplies, or of two
TILE_ROWS = (64, 128)
# of batches with no more rows a sequence, tiles of 16 rows read keys as fast as memory gives them:
# 16 sequences over 16k take 254 µs by them, by these 265
LEAST_ROWS = 17
# what `attend_few` takes over so few keys is left to it, whose one launch may start before the one
# before it ends: five nodes over 1k take 10.1 µs there and here 9.2 in two launches of which none
# may; over 2k 15.1 and 10.0
FEW_KEYS = 1536
HEAD_DIMS = (128,)
DTYPES = (torch.bfloat16, torch.float16)
# wgmma, and registers that warps hand to each other
CAPABILITIES = (90,)
# rows of all parts of results, at most; what memory plans count (passes/memory.py)
MOST_PART_ROWS = 8 * 160 * 128
# of several long sequences: splits of one, at least, and programs for each multiprocessor
_LEAST_SPLITS, _WIDEST = 4, 8
# left to itself, ptxas gives a thread so few that one program more fits, and spills
_MERGE_REGISTERS = 255


@dataclass(frozen=True)
class WideConfig:
    """Launch parameters.

    Args:
        block_m: rows of a tile, which has all of a sequence.
        block_n: keys of a step; 64, the bits that a step takes from ancestor words.
        stages: key blocks of the ring.
        min_blocks: key blocks of a split, at least, where there are several.
        merge_rows: rows that a program merges.
        merge_parts: parts that it merges at a time.
        merge_warps: warps of such a program.
    """

    block_m: int
    block_n: int = 64
    stages: int = 6
    min_blocks: int = 2
    merge_rows: int = 4
    merge_parts: int = 16
    merge_warps: int = 4

    @property
    def max_registers(self) -> int:
        """Of a thread as the program starts, before warps hand some to each other."""
        # what the register file holds, in eights; and no more than an instruction can name
        return min(65536 // (128 + 2 * self.block_m), 248) // 8 * 8


_TABLE = {rows: WideConfig(rows) for rows in TILE_ROWS}


def _is_able() -> bool:
    """Whether a launch is one of this process, by Triton's compiler."""
    return not dependent.INTERPRETED


def find(call: AttendCall, capability: int) -> WideConfig | None:
    """Launch parameters for a call, if it is one of those that this is for."""
    # all sequences have a tile each
    is_one_tile = call.num_seqs == 1 or call.tokens_each > 0
    suits = (
        _is_able()
        and is_one_tile
        and LEAST_ROWS <= call.mean_rows <= TILE_ROWS[-1]
        and call.window == 0
        # keys go from memory to the products as they are
        and call.q.dtype == call.k_cache.dtype
        and call.q.dtype in DTYPES
        and call.head_dim == call.value_dim
        and call.head_dim in HEAD_DIMS
        and capability in CAPABILITIES
    )
    is_small = call.capacity <= FEW_KEYS
    if not suits or (is_small and attend_few.find(call, capability) is not None):
        return None
    c = _TABLE[next(height for height in TILE_ROWS if height >= call.mean_rows)]
    if call.num_seqs * call.num_kv_heads * c.block_m > MOST_PART_ROWS:
        return None
    return c if call.has_whole_pages(c.block_n) else None


def splits_of(num_tiles: int, num_seqs: int, num_sms: int, capacity: int) -> int:
    """Splits of a tile, on average, of which `num_sms` multiprocessors run one program each.

    One wave of programs for one sequence, and for several whose caches hold few keys: 8 of 5 nodes
    over 1k take 17.1 µs with 2 splits and 29.0 with the 8 of four waves, 16 of 22 nodes 39.5 with
    one and 57.7 with 4. Of long caches there are two waves, in which others take what short ones
    leave: 16 sequences of up to 16k take 221 µs, 261 in one wave. Of sequences that are alike that
    costs little: 8 of 5 nodes over 32k take 262 µs with 4 splits, 258 with 2 (and 279
    with 8), 16 of 32 nodes over 16k 335 with 2, 328 with one. More tiles than multiprocessors would
    leave half of a wave empty: 24 of 5 nodes over 32k take 1004 with one split, 762 with 2.
    """
    if num_seqs == 1 or capacity <= SHORT_ROWS:
        return max(1, num_sms // num_tiles)
    return max(2 if num_tiles < 2 * num_sms else 1, 2 * num_sms // num_tiles)


def plan_splits(
    c: WideConfig,
    num_tiles: int,
    num_seqs: int,
    num_sms: int,
    capacity: int,
    num_splits: int | None = None,
) -> tuple[int, int]:
    """Splits that a tile has at most, and splits that all sequences share by lengths, or 0.

    Where caches may be long, the device gives each of several sequences as many splits as its keys
    are worth, and programs of the rest leave. One of 16k among 15 of 512 takes 76 µs, 169 with as
    many for each and 99 with 4 programs for each multiprocessor; 16 of 16k 346 instead of 332.
    """
    most, num_shares = num_splits or splits_of(num_tiles, num_seqs, num_sms, capacity), 0
    if num_splits is None and num_seqs > 1 and capacity > SHORT_ROWS:
        num_shares = num_seqs * most
        most = max(_LEAST_SPLITS, _WIDEST * num_sms // num_tiles)
    room = MOST_PART_ROWS // (num_tiles * c.block_m)
    most = min(most, triton.cdiv(capacity, c.block_n), room)
    return max(1, most), num_shares


def launch(c: WideConfig, call: AttendCall, out: Tensor, num_sms: int) -> None:
    """Launch the kernels with what `find` has found; `out` [Nt, H, D] is written.

    A tile has up to `num_splits` splits; of None as many as `plan_splits` says.
    """
    num_tiles = call.num_seqs * call.num_kv_heads
    max_splits, num_shares = plan_splits(
        c, num_tiles, call.num_seqs, num_sms, call.capacity, call.num_splits
    )
    partial = call.q.new_empty(num_tiles, max_splits, c.block_m, call.head_dim, dtype=torch.float32)
    lse = call.q.new_empty(num_tiles, c.block_m, max_splits, dtype=torch.float32)
    numbers = call.num_tokens, call.num_seqs, call.num_heads, call.group
    attend_wide_kernel[(call.num_kv_heads, max_splits, call.num_seqs)](
        call.q, call.k_cache, call.v_cache, partial, lse, *call.places,
        *numbers, *call.sizes, max_splits, num_shares,
        *call.strides, call.block_table.stride(0), call.stride_words,
        **_sizes(call.head_dim, c),
        PAGE=call.page(c.block_n),
        IS_TREE=call.ancestors is not None,
        **call.beside,
        num_warps=4,
        maxnreg=c.max_registers,
    )  # fmt: skip
    num_programs = triton.cdiv(call.mean_rows, c.merge_rows)
    merge_wide_kernel[(num_programs, call.num_kv_heads, call.num_seqs)](
        out, partial, lse, call.q_start, *numbers, call.tokens_each, max_splits,
        **_merge_sizes(call.head_dim, c),
    )  # fmt: skip


def _sizes(head_dim: int, c: WideConfig) -> dict[str, int]:
    return {
        "D": head_dim, "BM": c.block_m, "BN": c.block_n, "STAGES": c.stages,
        "MIN_BLOCKS": c.min_blocks,
    }  # fmt: skip


def _merge_sizes(head_dim: int, c: WideConfig) -> dict[str, int]:
    sizes = {"D": head_dim, "BM": c.block_m, "BR": c.merge_rows, "BP": c.merge_parts}
    return sizes | {"num_warps": c.merge_warps, "maxnreg": _MERGE_REGISTERS}


def shipped(capability: int) -> Iterator[Shipped]:
    """Every configuration that engines launch on a capability."""
    for dtype in DTYPES if capability in CAPABILITIES else ():
        for head_dim in HEAD_DIMS:
            for c in _TABLE.values():
                own = f"{TYPE_NAMES[dtype]}-d{head_dim}-rows{c.block_m}"
                yield from shipped_pages(
                    own, attend_wide_kernel, dtype, c.block_n, ROWS,
                    **_sizes(head_dim, c), maxnreg=c.max_registers,
                )  # fmt: skip
                yield Shipped.of(
                    f"merge-{own}", merge_wide_kernel, {dtype: ("out",)}, types_of(),
                    **_merge_sizes(head_dim, c),
                )  # fmt: skip
