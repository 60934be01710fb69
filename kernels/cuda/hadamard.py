"""`specc::hadamard` in one launch: rows of queries and keys that no rotation stands before.

Where one does, `rope_write` transforms what it has rotated, by the same function.
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

MAX_SIZE = 256


@triton.jit
def transformed(b_x, SIZE: tl.constexpr):
    """Rows […, BD] of float32 times the matrix, SIZE columns at a time, BD a multiple of these.

    Sums are those of the oracle, in its order. The xor of two numbers and of one of them is the
    other one: a reduction of two exchanges them, in registers or between threads of a warp.
    """
    shape: tl.constexpr = b_x.shape
    count: tl.constexpr = b_x.numel
    m_second = tl.arange(0, 2)[None, :, None] == 1
    for i in tl.static_range(0, SIZE.bit_length() - 1):
        b = tl.reshape(b_x, [count >> (i + 1), 2, 1 << i])
        b_bits = b.to(tl.int32, bitcast=True)
        b_bits ^= tl.xor_sum(b_bits, 1, keep_dims=True)
        b_other = b_bits.to(tl.float32, bitcast=True)
        b_x = tl.reshape(tl.where(m_second, b_other - b, b_other + b), shape)
    return b_x * (SIZE**-0.5)


@triton.jit(do_not_specialize=["num_rows", "num_inner"])
def _hadamard_kernel(
    x,
    out,
    num_rows,
    num_inner,
    outer,
    inner,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_earlier(IS_DEPENDENT)
    o_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_d = tl.arange(0, BLOCK_D)
    m_rd = (o_r < num_rows)[:, None] & (o_d < D)[None, :]  # [BR, BD]
    p_x = x + ((o_r // num_inner) * outer + (o_r % num_inner) * inner)[:, None] + o_d[None, :]
    b_x = transformed(tl.load(p_x, mask=m_rd, other=0.0).to(tl.float32), SIZE)
    p_out = out + o_r[:, None] * D + o_d[None, :]
    tl.store(p_out, b_x.to(out.dtype.element_ty), mask=m_rd)


def config(size: int) -> dict[str, Any]:
    """Launch parameters for rows of `size` columns: 16 numbers a thread."""
    block_d = max(32, triton.next_power_of_2(size))
    sizes = {"D": size, "SIZE": size & -size, "BLOCK_R": 1024 // block_d, "BLOCK_D": block_d}
    return {**sizes, "num_warps": 2, "num_stages": 1}


def hadamard(x: Tensor) -> Tensor:
    """See `hadamard_reference`."""
    size = x.shape[-1] if x.dim() else 0
    needed = f"rows of 1 … {MAX_SIZE} columns of a float"
    is_right = 1 <= size <= MAX_SIZE and x.dtype in FLOATS
    check(is_right, "hadamard", f"x {x.dtype} {list(x.shape)}", needed)
    out = x.new_empty(x.shape)
    if out.numel():
        rows, item = rows_of(x), config(size)
        _hadamard_kernel[(triton.cdiv(rows.num_rows, item["BLOCK_R"]),)](
            rows.tensors[0], out, rows.num_rows, rows.num_inner, *rows.strides[0],
            **item, **launch_options(x.dtype),
        )  # fmt: skip
    return out


# heads of models, those with latents included, whose keys are whole where rows are quantized
SIZES = (64, 80, 96, 128, 192, 256)


def shipped(capability: int) -> Iterator[Shipped]:
    """Every configuration that engines launch; the same for all capabilities."""
    for dtype in FLOATS:
        for size in SIZES:
            own = Shipped.of(
                f"{TYPE_NAMES[dtype]}-d{size}", _hadamard_kernel, {dtype: ("x", "out")},
                **config(size),
            )  # fmt: skip
            yield from with_dependent(own, capability, dtype)
