"""The patched interpreter computes in bfloat16 what torch computes, and the rest as it was."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

SIZE = 64


@triton.jit
def _binary_kernel(x, y, out, OP: tl.constexpr, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    b_x = tl.load(x + o)
    b_y = tl.load(y + o)
    if OP == "add":
        b = b_x + b_y
    elif OP == "sub":
        b = b_x - b_y
    elif OP == "mul":
        b = b_x * b_y
    elif OP == "div":
        b = b_x / b_y
    elif OP == "neg":
        b = -b_x
    elif OP == "abs":
        b = tl.abs(b_x)
    elif OP == "scalar":
        b = b_x * 3.5 + 1.0
    elif OP == "max":
        b = tl.maximum(b_x, b_y)
    elif OP == "where":
        b = tl.where(b_x > b_y, b_x, b_y * 2.0)
    elif OP == "less":
        b = (b_x < b_y) & (b_y > 0.0)
    elif OP == "equal":
        b = b_x == b_x
    elif OP == "fma":
        b = tl.fma(b_x, b_y, b_y)
    elif OP == "clamp":
        b = tl.clamp(b_x, -0.5, 0.5)
    tl.store(out + o, b)


BINARY = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: (x.float() / y.float()).to(x.dtype),
    "neg": lambda x, y: -x,
    "abs": lambda x, y: x.abs(),
    "scalar": lambda x, y: x * 3.5 + 1.0,
    "max": torch.maximum,
    "where": lambda x, y: torch.where(x > y, x, y * 2.0),
    "less": lambda x, y: (x < y) & (y > 0),
    "equal": lambda x, y: x == x,
    "fma": lambda x, y: (x.float() * y.float() + y.float()).to(x.dtype),
    "clamp": lambda x, y: x.clamp(-0.5, 0.5),
}


def _pair(device: torch.device) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, SIZE, device=device).bfloat16()
    x[:4] = torch.tensor([float("inf"), -float("inf"), 0.0, 1e-30])
    return x, y


@pytest.mark.parametrize("op", BINARY)
def test_elementwise(op: str, device: torch.device) -> None:
    x, y = _pair(device)
    want = BINARY[op](x, y)
    out = torch.empty_like(want)
    _binary_kernel[(1,)](x, y, out, op, SIZE)
    torch.testing.assert_close(out, want, rtol=0, atol=0, equal_nan=True)


@triton.jit
def _cast_kernel(x, out, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    tl.store(out + o, tl.load(x + o).to(out.dtype.element_ty))


@pytest.mark.parametrize("other", [torch.float32, torch.float16, torch.int32], ids=str)
@pytest.mark.parametrize("is_source", [True, False], ids=["from", "to"])
def test_casts(other: torch.dtype, is_source: bool, device: torch.device) -> None:
    x = torch.randn(SIZE, device=device) * 100
    # half-way cases: to even, up and down; the last float32 below infinity rounds to it
    x[:2] = torch.tensor([1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8])
    if other != torch.int32:
        x[2:5] = torch.tensor([float("nan"), float("inf"), 3.4e38])
        x[5] = 1.0 + 2.0**-8 + 2.0**-20
        # a NaN whose rounding would carry into the sign
        x[6] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    source, target = (torch.bfloat16, other) if is_source else (other, torch.bfloat16)
    x = x.to(source)
    out = torch.empty(SIZE, dtype=target, device=device)
    _cast_kernel[(1,)](x, out, SIZE)
    torch.testing.assert_close(out, x.to(target), rtol=0, atol=0, equal_nan=True)


@triton.jit
def _compare_then_cast_kernel(x, y, out, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    tl.store(out + o, (tl.load(x + o) > tl.load(y + o)).to(tl.float32))


def test_a_comparison_is_a_boolean(device: torch.device) -> None:
    x, y = _pair(device)
    out = torch.empty(SIZE, device=device)
    _compare_then_cast_kernel[(1,)](x, y, out, SIZE)
    torch.testing.assert_close(out, (x > y).float(), rtol=0, atol=0)


@triton.jit
def _dot_kernel(a, b, out, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    o_a = o[:, None] * SIZE + o[None, :]  # [SIZE, SIZE]
    b_product = tl.dot(tl.load(a + o_a), tl.load(b + o_a))
    tl.store(out + o_a, b_product)


def test_dot_accumulates_in_float32(device: torch.device) -> None:
    a, b = torch.randn(2, SIZE, SIZE, device=device).bfloat16()
    out = torch.empty(SIZE, SIZE, device=device)
    _dot_kernel[(1,)](a, b, out, SIZE)
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


@triton.jit
def _precise_dot_kernel(a, b, out, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    o = tl.arange(0, SIZE)
    o_a = o[:, None] * SIZE + o[None, :]  # [SIZE, SIZE]
    b_product = tl.dot(tl.load(a + o_a), tl.load(b + o_a), input_precision=PRECISION)
    tl.store(out + o_a, b_product)


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_products_in_tf32_read_ten_bits(precision: str, device: torch.device) -> None:
    a = torch.randn(SIZE, SIZE, device=device)
    b = torch.eye(SIZE, device=device)
    out = torch.empty(SIZE, SIZE, device=device)
    _precise_dot_kernel[(1,)](a, b, out, SIZE, precision)
    bits = a.view(torch.int32)
    want = a if precision == "ieee" else (bits & -0x2000).view(torch.float32)
    assert torch.equal(out, want)


@triton.jit
def _reduce_kernel(x, out, SIZE: tl.constexpr):
    b_x = tl.load(x + tl.arange(0, SIZE))
    tl.store(out, tl.sum(b_x, 0))
    tl.store(out + 1, tl.max(b_x, 0))
    tl.store(out + 2, tl.min(b_x, 0))


def test_reductions(device: torch.device) -> None:
    x = torch.randn(SIZE, device=device).bfloat16()
    out = torch.empty(3, dtype=torch.bfloat16, device=device)
    _reduce_kernel[(1,)](x, out, SIZE)
    want = torch.stack([x.float().sum(), x.float().max(), x.float().min()]).bfloat16()
    torch.testing.assert_close(out, want, rtol=2**-8, atol=0)


@triton.jit
def _integers_kernel(x, y, scalar, out, SIZE: tl.constexpr, THREE: tl.constexpr):
    """Of each two operands that the interpreter would promote, cast or broadcast: all operators."""
    o = tl.arange(0, SIZE)
    b_x, b_y, b = tl.load(x + o), tl.load(y + o), tl.load(scalar)
    p_out = out + o
    tl.store(p_out, b_x + b_y)
    tl.store(p_out + SIZE, b_x - b_y)
    tl.store(p_out + 2 * SIZE, b_x * b_y)
    tl.store(p_out + 3 * SIZE, 3 - b_x)
    tl.store(p_out + 4 * SIZE, b_x * THREE + 1)
    tl.store(p_out + 5 * SIZE, b * b_x - b)
    tl.store(p_out + 6 * SIZE, b_x < b_y)
    tl.store(p_out + 7 * SIZE, (b_x >= 3) & (b_y != b))
    tl.store(p_out + 8 * SIZE, (b_x & b_y) | (b_x ^ 5))
    tl.store(p_out + 9 * SIZE, (b_x >> 3) + (b_y << 2))
    # a pointer and an offset before it
    tl.store(p_out + 11 * SIZE - SIZE, b_x + o)


@pytest.mark.parametrize("kind", ["int32", "int64", "uint32"])
def test_integers_wrap_and_are_promoted(kind: str, device: torch.device) -> None:
    chooser = np.random.default_rng(3)
    info = np.iinfo(kind)
    x, y = chooser.integers(info.min, info.max, (2, SIZE), dtype=kind, endpoint=True)
    x[:6] = info.min, info.max, 0, 1, 2, 3
    y[:3] = x[:3]
    scalar = np.array([7], dtype=kind)
    o = np.arange(SIZE, dtype=kind)
    rows = [
        x + y, x - y, x * y, np.array(3, kind) - x, x * np.array(3, kind) + np.array(1, kind),
        scalar * x - scalar, x < y, (x >= 3) & (y != scalar), (x & y) | (x ^ np.array(5, kind)),
        (x >> np.array(3, kind)) + (y << np.array(2, kind)), x + o,
    ]  # fmt: skip
    wanted = np.stack([row.astype(kind) for row in rows])
    out = torch.zeros(len(rows), SIZE, dtype=getattr(torch, kind), device=device)
    inputs = [torch.from_numpy(value).to(device) for value in (x, y, scalar)]
    _integers_kernel[(1,)](*inputs, out, SIZE, 3)
    np.testing.assert_array_equal(out.cpu().numpy(), wanted)


@triton.jit
def _mixed_kernel(small, large, real, out, SIZE: tl.constexpr):
    """Integers of both sizes, and a table's offsets of two dimensions."""
    o = tl.arange(0, SIZE)
    o_out = o[:, None] * SIZE + o[None, :]  # [SIZE, SIZE]
    b_large = tl.load(large + o)
    b_sum = tl.load(small + o)[:, None] + b_large[None, :]
    tl.static_assert(b_sum.dtype == tl.int64)
    tl.store(out + o_out, b_sum)
    b_real = tl.load(real + o) * 2.0 - 1
    tl.store(out + o, b_large + (b_real > -0.0).to(tl.int32))


def test_integers_of_two_sizes_meet_in_the_larger(device: torch.device) -> None:
    small = torch.arange(SIZE, dtype=torch.int32, device=device) + 2**30
    large = torch.arange(SIZE, device=device) * 2**31
    real = torch.rand(SIZE, device=device)
    out = torch.zeros(SIZE, SIZE, dtype=torch.int64, device=device)
    _mixed_kernel[(1,)](small, large, real, out, SIZE)
    wanted = small[:, None].long() + large[None, :]
    wanted[0] = large + (real * 2 - 1 > 0)
    assert torch.equal(out, wanted)
