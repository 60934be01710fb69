"""`specc::invariant_attend`: attention of a row to the last bit whatever else is in the pass.

One configuration for heads of a size: what a launch chooses by its shapes is how many programs
share the keys of a tile, which changes no bit (`invariant_attend_kernels`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from specc.kernels.cuda.arrivals import counters
from specc.kernels.cuda.attend import check_heads
from specc.kernels.cuda.attend_call import (
    DTYPES,
    ROWS,
    SEARCH,
    AttendCall,
    padded,
    types_of,
)
from specc.kernels.cuda.attend_visits import NO_WINDOW
from specc.kernels.cuda.invariant_attend_kernels import (
    FIRST_KEYS,
    SPLITS,
    invariant_attend_kernel,
)
from specc.kernels.cuda.shipped import TYPE_NAMES, Shipped
from specc.kernels.cuda.strided_rows import check
from specc.kernels.operators.attention import SPLIT_ROWS

# rows of a tile: those of the first operand of an instruction
BLOCK_M = 16


@dataclass(frozen=True)
class InvariantConfig:
    """Keys of a step, warps of a program and steps in flight."""

    block_n: int
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, Any]:
        """What Triton is told; a multiplication fused with an addition would be another sum."""
        sizes = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return sizes | {"enable_fp_fusion": False}


def config(dtype: torch.dtype, head_dim: int) -> InvariantConfig:
    """Launch parameters, on every device: bits follow from them.

    Args:
        head_dim: the larger one of keys and values.
    """
    if dtype == torch.float32:
        return InvariantConfig(16, 8, 3)
    if head_dim <= 128:
        # of four warps ptxas spills on sm_90 and sm_100 from 80 columns on
        return InvariantConfig(64, 4 if head_dim <= 64 else 8, 5)
    return InvariantConfig(32, 8, 5)


def invariant_attend(*tensors: Tensor | None, **options: Any) -> Tensor:
    """As `attend_reference`; ancestors have to be those of a tree."""
    return run(AttendCall.of(*tensors, **options))


def run(call: AttendCall, is_split: bool | None = None) -> Tensor:
    """Attend; `is_split` says whether each split of the keys has a program of its own.

    None: where there is room for their parts. The result is the same to the last bit.
    """
    check_heads(call)
    is_plain = call.k_cache.dtype == call.q.dtype
    check(is_plain, "invariant_attend", f"k_cache {call.k_cache.dtype}", f"{call.q.dtype}")
    out = call.q.new_empty(call.num_tokens, call.num_heads, call.value_dim)
    if call.num_tokens == 0 or call.num_seqs == 0:
        return out.zero_().transpose(0, 1)
    _launch(call, out, is_split)
    return out.transpose(0, 1)


def splits_of(capacity: int) -> int:
    """Splits of so many keys."""
    count = 0
    while _split_start(count) < capacity:
        count += 1
    return count


def _split_start(split: int) -> int:
    length, first = SPLITS.value, FIRST_KEYS.value
    return ((length + split % length << split // length) - length) * first


def _launch(call: AttendCall, out: Tensor, is_split: bool | None) -> None:
    tokens = max(1, BLOCK_M // call.group)
    if call.tokens_each:
        tiles = call.num_seqs * triton.cdiv(call.tokens_each, tokens)
    else:
        tiles = call.num_tokens // tokens + call.num_seqs
    units = tiles * call.num_kv_heads * triton.cdiv(call.group, BLOCK_M)
    splits = splits_of(call.capacity)
    if is_split is None:
        is_split = splits > 1 and units * splits * BLOCK_M <= SPLIT_ROWS
    num_parts = units * splits if is_split else 0
    partial = call.q.new_empty(num_parts, BLOCK_M, call.value_dim, dtype=torch.float32)
    sums = call.q.new_empty(num_parts, 2, BLOCK_M, dtype=torch.float32)
    arrived = counters(call.k_cache, units) if is_split else call.q.new_empty(0, dtype=torch.int32)
    invariant_attend_kernel[(units, splits if is_split else 1)](
        call.q, call.k_cache, call.v_cache, out, partial, sums, arrived,
        *call.places[:4],
        # absent, a tensor of their type: one binary for both
        call.position if call.ancestors is None else call.ancestors,
        *call.places[5:], call.window or NO_WINDOW.value, call.sink,
        call.num_tokens, call.num_seqs, call.num_heads, call.group, *call.sizes,
        tokens, splits if is_split else 0,
        *call.strides, call.block_table.stride(0), call.stride_words,
        **_sizes(call.q.dtype, call.head_dim, call.value_dim),
        **call.all_beside,
    )  # fmt: skip


def _sizes(dtype: torch.dtype, head_dim: int, value_dim: int) -> dict[str, Any]:
    columns = padded(head_dim)
    c = config(dtype, max(head_dim, value_dim))
    return {
        "D": head_dim, "DV": value_dim, "BD": columns, "BDV": padded(value_dim),
        "BM": BLOCK_M, "BN": c.block_n,
        "BC": min(32, columns) if dtype == torch.float32 else columns, "BB": SEARCH,
        **c.options,
    }  # fmt: skip


def shipped(capability: int) -> Iterator[Shipped]:
    """One configuration for each dtype and size of heads; prompts have no words of ancestors."""
    for dtype in DTYPES:
        for head_dim in (64, 80, 96, 128, 256):
            yield Shipped.of(
                f"{TYPE_NAMES[dtype]}-d{head_dim}",
                invariant_attend_kernel, {dtype: (*ROWS, "out")}, types_of(),
                **_sizes(dtype, head_dim, head_dim),
            )  # fmt: skip
