"""Operands of `specc::experts`: whether its kernels read them as they are meant."""

from __future__ import annotations

import torch
from torch import Tensor

from specc.artifact.fragments import HALF
from specc.artifact.quantized_layout import QuantizedLayout
from specc.kernels.cuda.linear_q_fragments import DTYPE
from specc.kernels.cuda.strided_rows import FLOATS, check
from specc.kernels.reference.fused import ACTIVATIONS, CLAMPED
from specc.kernels.reference.products import gate_distance, num_matrices

NAME = "experts"


def fragments(layout: QuantizedLayout | None) -> QuantizedLayout | None:
    """The layout, if it is in fragments."""
    return layout if layout is not None and layout.is_fragments else None


def check_operands(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    stacks: tuple[Tensor, Tensor],
    layouts: list[QuantizedLayout | None],
    size: int,
    activation: str,
) -> int:
    """How many experts there are; operands as of `experts_reference`.

    Raises:
        ValueError: what the kernels would misread.
    """
    is_rows = x.dim() == 2 and x.dtype in FLOATS and x.shape[1] > 0
    check(is_rows, NAME, f"x {x.dtype} {list(x.shape)}", "[N, H] of floats")
    check(
        ids.dim() == 2 and ids.shape[0] == x.shape[0] and ids.dtype == torch.int64,
        NAME,
        f"ids {ids.dtype} {list(ids.shape)}",
        f"[{x.shape[0]}, K] of torch.int64",
    )
    check(
        weights.shape == ids.shape and weights.dtype in (torch.float32, x.dtype),
        NAME,
        f"weights {weights.dtype} {list(weights.shape)}",
        f"{list(ids.shape)} of torch.float32 or {x.dtype}",
    )
    hidden = x.shape[1]
    shapes = (2 * size, hidden), (hidden, size)
    num_experts = num_matrices(stacks[0], shapes[0], layouts[0])
    distances = gate_distance(activation, size), HALF
    for name, stack, shape, layout, distance in zip(
        ("gate_up", "down"), stacks, shapes, layouts, distances, strict=True
    ):
        if own := fragments(layout):
            order = own.as_fragments.paired(distance)
            is_fit = own == order and shape[0] % own.rows_together == 0
            needed = f"{order.name}, whole blocks, and rows of torch.bfloat16"
            check(is_fit and x.dtype == DTYPE, NAME, f"{name} {own.name}", needed)
        wanted = (num_experts, *shape)
        stored = wanted if layout is None else layout.stored_shape(wanted)
        dtype = x.dtype if layout is None else torch.uint8
        check(
            num_experts > 0 and size > 0 and stack.shape == stored and stack.dtype == dtype,
            NAME,
            f"{name} {stack.dtype} {list(stack.shape)}",
            f"gate_up [E, 2 I, {hidden}] and down [E, {hidden}, I] of {x.dtype}, or quantized",
        )
        check(
            stack.is_contiguous(), NAME, f"{name} of strides {stack.stride()}", "a contiguous one"
        )
    known = (*ACTIVATIONS, CLAMPED)
    check(activation in known, NAME, activation, f"one of {', '.join(known)}")
    return num_experts


def check_bias(name: str, bias: Tensor | None, shape: tuple[int, int], dtype: torch.dtype) -> None:
    check(
        bias is None or (bias.shape == shape and bias.dtype == dtype and bias.is_contiguous()),
        NAME,
        f"{name} {None if bias is None else (bias.dtype, list(bias.shape), bias.stride())}",
        f"a contiguous one of {dtype} {list(shape)}",
    )
