"""Cases of the gate kernel; a GPU script calls these without pytest."""

from __future__ import annotations

import itertools

import torch

from specc.kernels.cuda import act_and_mul as kernel
from specc.kernels.reference.fused import ACTIVATIONS, act_and_mul_reference
from tests.kernels.cuda.cases_rms_norm import (
    DTYPES,
    MAX_TIES,
    TOLERANCE,
    fenced,
    make_rows,
)

# (rows, layout, columns of the result): odd, several rows a program, several programs a row
SHAPES = (
    ((1, 5), "dense", 63),
    ((1,), "dense", 1),
    ((3, 7), "dense", 100),
    ((1, 3), "dense", 1000),
    ((2, 2), "heads", 1100),
    ((2, 3, 5), "holes", 20),
    ((1, 40), "dense", 64),
)
CASES = tuple(
    (*SHAPES[i % len(SHAPES)], dtype, activation)
    for i, (dtype, activation) in enumerate(itertools.product(DTYPES, ACTIVATIONS))
)


def check_act_and_mul(
    rows: tuple[int, ...],
    layout: str,
    size: int,
    dtype: torch.dtype,
    activation: str,
    device: torch.device,
) -> None:
    gate_up = make_rows(rows, layout, 2 * size, dtype, device)
    gate_up.mul_(4)  # the tails of activations too
    want = act_and_mul_reference(gate_up, activation)
    out, intact = fenced(want)
    kernel._launch(gate_up, out, activation)
    assert intact()
    got = kernel.act_and_mul(gate_up, activation)
    assert torch.equal(got, out)
    assert (got.dtype, got.shape) == (dtype, want.shape)
    assert got.is_contiguous()
    # 1 + erf(x) and 1 + tanh(x) cancel where a gate is negative: small results differ more
    torch.testing.assert_close(got, want, rtol=2 * TOLERANCE[dtype], atol=1e-5)
    if dtype != torch.float32:
        num_ties = int(((got != want) & (want.abs() > 0.1)).sum())
        assert num_ties <= max(1, MAX_TIES * want.numel()), f"{num_ties} of {want.numel()}"


def check_extremes(activation: str, device: torch.device) -> None:
    """Gates far out saturate, and NaN stays NaN."""
    gate = torch.tensor([-1e4, -100.0, -20.0, -0.0, 0.0, 20.0, 100.0, 1e4, float("nan")])
    gate_up = torch.stack([gate, torch.full_like(gate, 2.0)]).flatten()[None].to(device)
    got = kernel.act_and_mul(gate_up, activation)[0]
    want = act_and_mul_reference(gate_up, activation)[0]
    torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-6, atol=1e-6)
