"""Cases of the norm kernels; a GPU script calls these without pytest."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from specc.kernels.cuda import rms_norm as kernel
from specc.kernels.reference.fused import add_rms_norm_reference, rms_norm_reference

EPS = 1e-3
# at least a program's worth of elements, so that no missing mask writes to foreign memory
MARGIN = 2048
# one unit in the last place; where the rounded results differ at all, they straddle a tie
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
MAX_TIES = 0.02
# (rows as dimensions, layout, size): odd sizes, one row, rows of several programs, heads of a
# wider projection, and what no pair of strides can address
SHAPES = (
    ((1, 7), "dense", 63),
    ((1,), "dense", 1),
    ((3, 5, 2), "dense", 100),
    ((1, 9, 5), "heads", 128),
    ((1, 5, 9), "transposed", 64),
    ((2, 3, 5), "holes", 40),
    ((1, 6), "columns", 24),
    ((1, 3), "dense", 1000),
    ((2, 2), "heads", 4096),
    ((1, 2), "dense", 16384),
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# every shape with every dtype over all; weights of another dtype and Gemma's 1 + weight in turn
CASES = tuple(
    (*shape, DTYPES[(i + j) % 3], (torch.float32 if i % 3 == 1 else None), bool((i + j) % 2))
    for j, (i, shape) in itertools.product(range(2), enumerate(SHAPES))
)


def check_rms_norm(
    rows: tuple[int, ...],
    layout: str,
    size: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    unit_offset: bool,
    device: torch.device,
) -> None:
    x = make_rows(rows, layout, size, dtype, device)
    weight = _guarded(torch.randn(size), weight_dtype or dtype, device)
    want = rms_norm_reference(x, weight, EPS, unit_offset)
    out, intact = fenced(x)
    kernel._launch(x, None, weight, out, None, EPS, unit_offset)
    assert intact()
    assert_rounded_alike(out, want)
    assert torch.equal(kernel.rms_norm(x, weight, EPS, unit_offset), out)


def check_add_rms_norm(
    rows: tuple[int, ...],
    layout: str,
    size: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    unit_offset: bool,
    device: torch.device,
) -> None:
    x = make_rows(rows, layout, size, dtype, device)
    # the residual stream is dense whatever a block returns
    residual = make_rows(rows, "dense", size, dtype, device)
    weight = _guarded(torch.randn(size), weight_dtype or dtype, device)
    want, want_total = add_rms_norm_reference(x, residual, weight, EPS, unit_offset)
    (out, intact), (total, total_intact) = fenced(x), fenced(x)
    kernel._launch(x, residual, weight, out, total, EPS, unit_offset)
    assert intact()
    assert total_intact()
    assert_rounded_alike(out, want)
    assert torch.equal(total, want_total)
    results = kernel.add_rms_norm(x, residual, weight, EPS, unit_offset)
    assert all(torch.equal(a, b) for a, b in zip(results, (out, total), strict=True))


def check_extremes(dtype: torch.dtype, device: torch.device) -> None:
    """Squares beyond float16, rows that eps decides, and a row of zeros."""
    x = torch.randn(4, 96).to(device)
    x[0] *= 400.0
    x[1] *= 1e-3
    x[2] = 0.0
    x, weight = x.to(dtype), torch.ones(96, dtype=dtype, device=device)
    got = kernel.rms_norm(x, weight, EPS)
    assert_rounded_alike(got, rms_norm_reference(x, weight, EPS))
    assert got[2].abs().max() == 0
    assert got[0].float().pow(2).mean().sub(1).abs() < 0.02


def make_rows(
    rows: tuple[int, ...], layout: str, size: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Random [*rows, size] in a layout, with NaN wherever it has room beside its elements."""
    *outer, last = rows
    values = torch.randn(*rows, size)
    if layout == "dense":
        return _guarded(values, dtype, device)
    nan = float("nan")
    if layout == "heads":  # the first heads of a projection of q, k and v
        buffer = torch.full((*outer, last + 2, size), nan)
        x = buffer[..., :last, :]
    elif layout == "transposed":  # heads first, as attention reads them
        *outer, heads, last = rows
        buffer = torch.full((*outer, last, heads + 2, size), nan)
        x = buffer[..., :heads, :].transpose(-2, -3)
    elif layout == "holes":
        buffer = torch.full((2 * rows[0], rows[1] + 1, rows[2] + 2, size), nan)
        x = buffer[::2, : rows[1], : rows[2]]
    else:  # columns: every other column, which the kernel takes as a copy
        buffer = torch.full((*rows, 2 * size), nan)
        x = buffer[..., ::2]
    x.copy_(values)
    stored = buffer.to(dtype).to(device)
    return stored.as_strided(x.shape, x.stride(), x.storage_offset())


def assert_rounded_alike(got: Tensor, want: Tensor) -> None:
    """Equal but for the order of a sum: at most a unit in the last place, and rarely."""
    assert got.dtype == want.dtype
    assert got.is_contiguous()
    tolerance = TOLERANCE[want.dtype]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * 1e-2)
    if want.dtype != torch.float32:
        num_ties = int((got != want).sum())
        assert num_ties <= max(1, MAX_TIES * want.numel()), f"{num_ties} of {want.numel()} differ"


def _guarded(values: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same values between NaN."""
    buffer = torch.full((values.numel() + 2 * MARGIN,), float("nan"), dtype=dtype, device=device)
    inside = buffer[MARGIN : MARGIN + values.numel()].view(values.shape)
    return inside.copy_(values)


def fenced(like: Tensor):
    """A result to write, and whether what is around it is untouched."""
    buffer = torch.full((like.numel() + 2 * MARGIN,), 7.0, dtype=like.dtype, device=like.device)
    inside = buffer[MARGIN : MARGIN + like.numel()].view(like.shape).fill_(float("nan"))

    def intact() -> bool:
        return bool((buffer[:MARGIN] == 7).all() and (buffer[-MARGIN:] == 7).all())

    return inside, intact
