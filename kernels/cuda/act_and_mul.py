"""`act_and_mul` in one launch; its oracle is `specc.kernels.reference.fused`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from specc.kernels.cuda.shipped import TYPE_NAMES, Shipped
from specc.kernels.cuda.strided_rows import FLOATS, check, rows_of
from specc.kernels.reference.fused import ACTIVATIONS, GATE_LIMIT, GATE_SHARPNESS

LIMIT = tl.constexpr(GATE_LIMIT)
SHARPNESS = tl.constexpr(GATE_SHARPNESS)

# 8 elements a thread; narrow layers, as of experts, share a program
_CONFIGS: dict[int, dict[str, Any]] = {
    block_i: {"BLOCK_R": 1024 // block_i, "BLOCK_I": block_i, "num_warps": 4, "num_stages": 1}
    for block_i in (64, 128, 256, 512, 1024)
}


def config(size: int) -> dict[str, Any]:
    """Launch parameters for results of `size` columns, on every device and for every dtype."""
    return _CONFIGS[min(1024, max(64, triton.next_power_of_2(size)))]


def act_and_mul(gate_up: Tensor, activation: str) -> Tensor:
    """See `act_and_mul_reference`."""
    columns = gate_up.shape[-1] if gate_up.dim() else 0
    check(
        columns > 0 and columns % 2 == 0,
        "act_and_mul",
        f"gate_up {list(gate_up.shape)}",
        "[..., 2 I], a gate beside as many columns to multiply",
    )
    check(gate_up.dtype in FLOATS, "act_and_mul", f"{gate_up.dtype}", "float32, bfloat16, float16")
    check(activation in ACTIVATIONS, "act_and_mul", activation, f"one of {', '.join(ACTIVATIONS)}")
    size = columns // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], size)
    if out.numel():
        _launch(gate_up, out, activation)
    return out


def shipped(capability: int) -> Iterator[Shipped]:
    """Every configuration and activation; the same for all capabilities."""
    for dtype in FLOATS:
        for item in _CONFIGS.values():
            for activation in ACTIVATIONS:
                yield Shipped.of(
                    f"{TYPE_NAMES[dtype]}-{activation}-i{item['BLOCK_I']}",
                    _act_and_mul_kernel, {dtype: ("gate_up", "out")},
                    ACTIVATION=activation, **item,
                )  # fmt: skip


def _launch(gate_up: Tensor, out: Tensor, activation: str) -> None:
    size = out.shape[-1]
    rows, item = rows_of(gate_up), config(size)
    grid = (triton.cdiv(rows.num_rows, item["BLOCK_R"]), triton.cdiv(size, item["BLOCK_I"]))
    _act_and_mul_kernel[grid](
        rows.tensors[0],
        out,
        rows.num_rows,
        rows.num_inner,
        size,
        *rows.strides[0],
        ACTIVATION=activation,
        **item,
    )


@triton.jit(do_not_specialize=["num_rows", "num_inner"])
def _act_and_mul_kernel(
    gate_up,
    out,
    num_rows,
    num_inner,
    size,
    outer,
    inner,
    ACTIVATION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    o_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    m_ri = (o_r < num_rows)[:, None] & (o_i < size)[None, :]  # [BR, BI]
    o_row = (o_r // num_inner) * outer + (o_r % num_inner) * inner
    p_gate = gate_up + o_row[:, None] + o_i[None, :]
    b_gate = tl.load(p_gate, mask=m_ri, other=0.0).to(tl.float32)
    b_up = tl.load(p_gate + size, mask=m_ri, other=0.0).to(tl.float32)
    b_out = activate(b_gate, ACTIVATION) * b_up
    tl.store(out + o_r[:, None] * size + o_i[None, :], b_out.to(out.dtype.element_ty), mask=m_ri)


@triton.jit
def activate(b_x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        b_y = b_x / (1.0 + tl.exp(-b_x))
    elif ACTIVATION == "gelu":
        b_y = 0.5 * b_x * (1.0 + tl.erf(b_x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 is the logistic function of 2u: no cancellation, and no tanh in Triton
        b_u = 0.7978845608028654 * (b_x + 0.044715 * b_x * b_x * b_x)
        b_y = b_x / (1.0 + tl.exp(-2.0 * b_u))
    else:
        # a comparison, since a maximum would lose NaN
        b_y = tl.where(b_x < 0.0, 0.0, b_x)
    return b_y


@triton.jit
def activated(b_x, activation):
    """By the number of the activation among `ACTIVATIONS`."""
    if activation == 0:
        b_x = activate(b_x, "silu")
    elif activation == 1:
        b_x = activate(b_x, "gelu")
    elif activation == 2:
        b_x = activate(b_x, "gelu_tanh")
    else:
        b_x = activate(b_x, "relu")
    return b_x


@triton.jit
def clamped(b_gate, b_up):
    """The gate of gpt-oss; see `gated` of the oracle."""
    # not by minima, which lose a NaN
    b_gate = tl.where(b_gate > LIMIT, LIMIT, b_gate)
    b_up = tl.where(b_up > LIMIT, LIMIT, tl.where(b_up < -LIMIT, -LIMIT, b_up))
    return b_gate / (1.0 + tl.exp(b_gate * -SHARPNESS)) * (b_up + 1.0)
