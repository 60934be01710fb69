"""`rms_norm` and `add_rms_norm` in one launch each; oracles in `specc.kernels.reference.fused`.

A program normalizes whole rows, so one pass over memory is all there is. Long rows (a hidden
state) get a program each; short ones (heads, as in Qwen3) share one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from specc.kernels.cuda.dependent import launch_options, wait_for_earlier, with_dependent
from specc.kernels.cuda.shipped import TYPE_NAMES, Shipped
from specc.kernels.cuda.strided_rows import FLOATS, check, rows_of

MAX_SIZE = 16384


def _config(block_r: int, block_d: int, num_warps: int) -> dict[str, Any]:
    """Keywords of a launch: rows and columns of a program, and its warps."""
    return {"BLOCK_R": block_r, "BLOCK_D": block_d, "num_warps": num_warps, "num_stages": 1}


# 16 elements a thread and at least two warps; 32 elements of the longest rows, which spills nothing
_CONFIGS = {
    64: _config(16, 64, 2),
    128: _config(8, 128, 2),
    256: _config(4, 256, 2),
    512: _config(2, 512, 2),
    1024: _config(1, 1024, 2),
    2048: _config(1, 2048, 4),
    4096: _config(1, 4096, 8),
    8192: _config(1, 8192, 8),
    16384: _config(1, 16384, 16),
}


def config(size: int) -> dict[str, Any]:
    """Launch parameters for rows of `size` elements, on every device and for every dtype."""
    return _CONFIGS[max(64, triton.next_power_of_2(size))]


def rms_norm(x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
    """See `rms_norm_reference`."""
    _check("rms_norm", x, weight)
    out = x.new_empty(x.shape)
    _launch(x, None, weight, out, None, eps, unit_offset)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """See `add_rms_norm_reference`."""
    _check("add_rms_norm", x, weight)
    check(
        residual.shape == x.shape and residual.dtype == x.dtype,
        "add_rms_norm",
        f"residual {residual.dtype} {list(residual.shape)}",
        f"that of x, {x.dtype} {list(x.shape)}",
    )
    out, total = x.new_empty(x.shape), x.new_empty(x.shape)
    _launch(x, residual, weight, out, total, eps, unit_offset)
    return out, total


def shipped(capability: int) -> Iterator[Shipped]:
    """Every configuration, with and without the sum; the same for all capabilities."""
    for dtype in FLOATS:
        types = {dtype: ("x", "residual", "gamma", "out", "total"), float: ("eps", "offset")}
        for item in _CONFIGS.values():
            for kind, absent in (("norm", ("residual", "total")), ("add", ())):
                name = f"{TYPE_NAMES[dtype]}-{kind}-d{item['BLOCK_D']}"
                own = Shipped.of(name, _rms_norm_kernel, types, **item, **dict.fromkeys(absent))
                yield from with_dependent(own, capability, dtype)


def _check(operator: str, x: Tensor, weight: Tensor) -> None:
    size = x.shape[-1] if x.dim() else 0
    check(1 <= size <= MAX_SIZE, operator, f"x {list(x.shape)}", f"rows of 1 … {MAX_SIZE} elements")
    check(
        x.dtype in FLOATS and weight.dtype in FLOATS,
        operator,
        f"x {x.dtype}, weight {weight.dtype}",
        "float32, bfloat16 or float16",
    )
    check(
        weight.shape == (size,) and weight.is_contiguous(),
        operator,
        f"weight {list(weight.shape)}, strides {weight.stride()}",
        f"a contiguous [{size}]",
    )


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    out: Tensor,
    total: Tensor | None,
    eps: float,
    unit_offset: bool,
) -> None:
    if not x.numel():
        return
    rows = rows_of(x) if residual is None else rows_of(x, residual)
    item = config(x.shape[-1])
    _rms_norm_kernel[(triton.cdiv(rows.num_rows, item["BLOCK_R"]),)](
        rows.tensors[0],
        None if residual is None else rows.tensors[1],
        weight,
        out,
        total,
        rows.num_rows,
        rows.num_inner,
        x.shape[-1],
        *rows.strides[0],
        *rows.strides[-1],
        float(eps),
        float(unit_offset),
        **item,
        **launch_options(x.dtype),
    )


@triton.jit(do_not_specialize=["num_rows", "num_inner"])
def _rms_norm_kernel(
    x,
    residual,
    gamma,
    out,
    total,
    num_rows,
    num_inner,
    D,
    x_outer,
    x_inner,
    residual_outer,
    residual_inner,
    eps,
    offset,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_earlier(IS_DEPENDENT)
    o_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    m_rd = (o_r < num_rows)[:, None] & m_d[None, :]  # [BR, BD]
    o_outer, o_inner = o_r // num_inner, o_r % num_inner
    o_out = o_r[:, None] * D + o_d[None, :]
    p_x = x + (o_outer * x_outer + o_inner * x_inner)[:, None] + o_d[None, :]
    b_x = tl.load(p_x, mask=m_rd, other=0.0).to(tl.float32)  # [BR, BD]
    if residual is not None:
        o_residual = o_outer * residual_outer + o_inner * residual_inner
        p_residual = residual + o_residual[:, None] + o_d[None, :]
        b_x += tl.load(p_residual, mask=m_rd, other=0.0).to(tl.float32)
        b_total = b_x.to(total.dtype.element_ty)
        tl.store(total + o_out, b_total, mask=m_rd)
        # the next layers read the rounded sum: normalize what they see
        b_x = b_total.to(tl.float32)
    b_scale = tl.rsqrt(tl.sum(b_x * b_x, axis=1) / D + eps)  # [BR]
    b_gamma = tl.load(gamma + o_d, mask=m_d, other=0.0).to(tl.float32) + offset
    b_out = b_x * b_scale[:, None] * b_gamma[None, :]
    tl.store(out + o_out, b_out.to(out.dtype.element_ty), mask=m_rd)
