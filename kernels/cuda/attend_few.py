"""`specc::attend` for a single sequence of few rows: when it is taken, its launch, what ships."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from specc.artifact.kv_rows import holds_quantized
from specc.kernels.cuda.attend_call import ROWS, AttendCall, shipped_pages
from specc.kernels.cuda.attend_config import AttendConfig
from specc.kernels.cuda.attend_few_kernels import attend_few_kernel
from specc.kernels.cuda.dependent import launch_options, with_dependent
from specc.kernels.cuda.shipped import TYPE_NAMES, Shipped

# after `attend_wide`, which takes 17 rows or more of heads of 128: rows of a sequence, with those
# that fill up a token's to a power of two
MOST_ROWS = 32
HEAD_DIMS = (64, 128)
DTYPES = (torch.bfloat16, torch.float16)
# compute capabilities on which it was measured to be faster
CAPABILITIES = (90,)


@dataclass(frozen=True)
class FewConfig(AttendConfig):
    """Launch parameters; `num_stages` where a program has many key blocks.

    Args:
        max_splits: splits of a tile's keys.
        merge_rows: rows that are merged at a time.
        merge_parts: parts that are merged at a time.
        least_blocks: key blocks of a split, at least, where there are several.
    """

    max_splits: int = 1
    merge_rows: int = 1
    merge_parts: int = 1
    least_blocks: int = 1

    def splits_of(self, call: AttendCall, num_counters: int, num_sms: int) -> int:
        """Splits of a tile at most: as many as `num_sms` multiprocessors hold, or a call says.

        Args:
            num_counters: tiles of all KV heads, or shares of them, that have programs.
        """
        # one for each program that runs at a time, and none without a key block
        most = min(self.programs_per_sm * num_sms // num_counters, self.max_splits)
        most = most if call.num_splits is None else call.num_splits
        return max(1, min(most, triton.cdiv(call.capacity, self.block_n)))


# (head size, rows) → FewConfig; rows are the most of a sequence. With more than 16 of them two
# tiles read the same keys, which on an H200 is faster than one tile of 32 rows.
_TABLE = {
    (64, 16): FewConfig(16, 64, 4, 5, 2, 255, 32, 4, 32),
    (64, 32): FewConfig(16, 64, 4, 5, 2, 255, 16, 8, 16, 2),
    (128, 16): FewConfig(16, 64, 4, 5, 2, None, 32, 4, 32),
    (128, 32): FewConfig(16, 64, 4, 5, 2, None, 16, 8, 16, 2),
}


def config(head_dim: int, rows: int, is_quantized: bool = False) -> FewConfig:
    """Launch parameters for heads of a size, and so many rows of a sequence.

    Args:
        is_quantized: caches are quantized, beside which what they stand for takes registers.
    """
    c = _TABLE[head_dim, 16 if rows <= 16 else 32]
    return replace(c, block_n=32) if is_quantized and head_dim > 64 else c


def row_bits(group: int) -> int:
    """Bits that number the rows of a token: its heads, and what makes them a power of two."""
    return (group - 1).bit_length()


def find(call: AttendCall, capability: int) -> FewConfig | None:
    """Launch parameters for a call, if it is one of those that this is for."""
    rows = call.num_tokens << row_bits(call.group)
    suits = (
        call.num_seqs == 1
        and rows <= MOST_ROWS
        and call.window == 0
        and call.q.dtype in DTYPES
        and call.head_dim == call.value_dim
        and call.head_dim in HEAD_DIMS
        and capability // 10 * 10 in CAPABILITIES
    )
    if not suits:
        return None
    c = config(call.head_dim, rows, holds_quantized(call.k_cache.dtype))
    return c if call.has_whole_pages(c.block_n) else None


def launch(c: FewConfig, call: AttendCall, out: Tensor, num_sms: int) -> None:
    """Launch the kernel with what `find` has found; `out` [Nt, H, D] is written."""
    shift = row_bits(call.group)
    num_tiles = triton.cdiv(call.num_tokens << shift, c.block_m)
    num_counters = num_tiles * call.num_kv_heads
    max_splits = c.splits_of(call, num_counters, num_sms)
    num_parts = num_counters * max_splits if max_splits > 1 else 0
    attend_few_kernel[(call.num_kv_heads, max_splits, num_tiles)](
        call.q, call.k_cache, call.v_cache, out, *call.parts(num_parts, c.block_m, num_counters),
        *call.places,
        call.num_tokens, call.num_heads, call.group, shift, *call.sizes, max_splits,
        *call.strides, call.stride_words,
        **_sizes(call.head_dim, c),
        PAGE=call.page(c.block_n),
        IS_TREE=call.ancestors is not None,
        **launch_options(call.q.dtype),
        **call.beside,
        **c.options,
    )  # fmt: skip


def _sizes(head_dim: int, c: FewConfig) -> dict[str, int]:
    return {
        "D": head_dim, "BM": c.block_m, "BN": c.block_n,
        "BR": c.merge_rows, "BP": c.merge_parts, "MIN_BLOCKS": c.least_blocks,
    }  # fmt: skip


# older than the keys that the kernel before writes: it finds its places by them; of the cache only
# rows that it does not write
_EARLY = ("q_start", "position", "slot", "cache_len", "block_table", "k_cache", "v_cache")


def shipped(capability: int, is_quantized: bool = False) -> Iterator[Shipped]:
    """Every configuration that engines launch on a capability; see `attend.shipped`."""
    for dtype in DTYPES if capability in CAPABILITIES else ():
        for head_dim in HEAD_DIMS:
            for rows in (16, 32):
                c = config(head_dim, rows, is_quantized)
                for item in shipped_pages(
                    f"{TYPE_NAMES[dtype]}-d{head_dim}-rows{rows}",
                    attend_few_kernel, dtype, c.block_n, (*ROWS, "out"),
                    **_sizes(head_dim, c), **c.options, early=_EARLY,
                ):  # fmt: skip
                    yield from with_dependent(item, capability, dtype)
