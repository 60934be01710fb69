"""`specc::experts` by matrices in fragments (`specc.artifact.fragments`): launches of few tokens.

Both products are launched as those of `experts` are, with which each of them may be combined. No
GPU has run these kernels: they are compiled for all capabilities, and emulated.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from specc.artifact.fragments import HALF
from specc.artifact.quantized_layout import QuantizedLayout
from specc.artifact.weight_layout import BLOCK
from specc.kernels.cuda.dependent import launch_options, with_dependent
from specc.kernels.cuda.experts_fragments_kernels import (
    experts_fragments_down_kernel,
    experts_fragments_gate_up_kernel,
)
from specc.kernels.cuda.few_rows_tiles import FRAGMENT_LAYOUTS
from specc.kernels.cuda.linear_q_fragments import DTYPE, decoding
from specc.kernels.cuda.shipped import TYPE_NAMES, Shipped
from specc.kernels.reference.fused import ACTIVATIONS, CLAMPED

# columns of an instruction's rows, of all tokens of a launch
ROWS = (8, 16)
# experts of a token, at most
CHOSEN = 16
# warps of a program, tiles that each takes of a step, steps of the ring: K of gpt-oss, 2880, is
# 45 tiles of 4 bits, 16 of them a step
_WARPS, _TILES, _RING = 4, 4, 3


def gate_up(
    x: Tensor,
    ids: Tensor,
    stack: Tensor,
    bias: Tensor | None,
    num_experts: int,
    size: int,
    activation: str,
    layout: QuantizedLayout,
) -> Tensor:
    """Rows [pairs, size] that the second product reads; operands as of `experts`."""
    num_tokens, top_k = ids.shape
    out = x.new_empty(ids.numel(), size)
    experts_fragments_gate_up_kernel[(ids.numel(), size // HALF)](
        x, ids, stack.view(torch.int32), stack.view(torch.float32),
        x if bias is None else bias, out,
        ids.numel(), num_experts, top_k, 0 if bias is None else 2 * size,
        (*ACTIVATIONS, CLAMPED).index(activation), size, x.shape[1],
        **_options(layout, num_tokens),
    )  # fmt: skip
    return out


def down(
    inner: Tensor,
    ids: Tensor,
    stack: Tensor,
    bias: Tensor | None,
    num_experts: int,
    weights: Tensor,
    out: Tensor,
    arrived: Tensor,
    layout: QuantizedLayout,
) -> None:
    """The second product, and `out`: the sum of a token's experts. `arrived` has a zero a block."""
    (num_tokens, top_k), size = ids.shape, out.shape[1]
    found = inner.new_empty(ids.numel(), size, dtype=torch.float32)
    experts_fragments_down_kernel[(ids.numel(), size // BLOCK)](
        inner, ids, stack.view(torch.int32), stack.view(torch.float32),
        inner if bias is None else bias, found, weights, out, arrived,
        ids.numel(), num_experts, top_k, 0 if bias is None else size, size, inner.shape[1],
        **_options(layout, num_tokens),
    )  # fmt: skip


def _options(layout: QuantizedLayout, num_tokens: int) -> dict[str, Any]:
    rows = next(rows for rows in ROWS if num_tokens <= rows)
    options: dict[str, Any] = launch_options(DTYPE)
    return {
        **_constexprs(layout, rows),
        **options,
        "num_warps": _WARPS,
        "maxnreg": _registers(layout, rows),
    }


def _registers(layout: QuantizedLayout, rows: int) -> int:
    """Of a thread: ptxas of itself makes one program more of a multiprocessor fit, and spills."""
    if layout.name.startswith("int4-g32"):
        return 168 if rows == ROWS[0] else 232
    if rows == ROWS[0]:
        return 128
    return 200 if layout.has_zeros else 168


def _constexprs(layout: QuantizedLayout, rows: int) -> dict[str, Any]:
    sizes = {"W": _WARPS, "BM": rows, "BT": CHOSEN, "U": _TILES, "RING": _RING}
    return decoding(layout) | sizes


def shipped(capability: int) -> Iterator[Shipped]:
    """Both products of these layouts; the same for all capabilities."""
    for name, rows, is_down in itertools.product(FRAGMENT_LAYOUTS, ROWS, (False, True)):
        item = _product(QuantizedLayout.named(name), rows, is_down)
        yield from with_dependent(item, capability, DTYPE)


def _product(layout: QuantizedLayout, rows: int, is_down: bool) -> Shipped:
    pointers = dict.fromkeys(("x", "bias", "out"), f"*{TYPE_NAMES[DTYPE]}")
    if is_down:
        pointers |= {"found": "*fp32", "weights": "*fp32", "arrived": "*i32"}
    pointers |= {"ids": "*i64", "levels": "*i32", "scales": "*fp32"}
    own = () if is_down else ("activation",)
    integers = ("num_pairs", "num_experts", "top_k", "bias_size", *own, "size", "K")
    return Shipped(
        name=f"{layout.name}-{'down' if is_down else 'gate-up'}-m{rows}",
        kernel=experts_fragments_down_kernel if is_down else experts_fragments_gate_up_kernel,
        signature=pointers | dict.fromkeys(integers, "i32"),
        constexprs=_constexprs(layout, rows),
        num_warps=_WARPS,
        num_stages=3,
        max_registers=_registers(layout, rows),
        divisible=(*pointers, "K"),
    )
