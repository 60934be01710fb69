"""`act_and_mul` equals its oracle, for every activation that passes put into a graph."""

from __future__ import annotations

import itertools

import pytest
import torch

from specc.kernels.cuda import act_and_mul as kernel
from specc.kernels.cuda.act_and_mul import act_and_mul, config, shipped
from specc.kernels.cuda.shipped import CAPABILITIES
from specc.kernels.reference.fused import ACTIVATIONS, act_and_mul_reference
from tests.kernels.cuda.cases_rms_norm import DTYPES, MAX_TIES, TOLERANCE, fenced, make_rows

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    # exp of a gate far out, which the reciprocal brings back to zero
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]

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


IDS = [f"{c[4]}-{c[1]}-{'x'.join(map(str, c[0]))}-I{c[2]}-{str(c[3])[6:]}" for c in CASES]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_act_and_mul(case, device):
    check_act_and_mul(*case, device)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_extremes(activation, device):
    """Gates far out saturate, and NaN stays NaN."""
    gate = torch.tensor([-1e4, -100.0, -20.0, -0.0, 0.0, 20.0, 100.0, 1e4, float("nan")])
    gate_up = torch.stack([gate, torch.full_like(gate, 2.0)]).flatten()[None].to(device)
    got = kernel.act_and_mul(gate_up, activation)[0]
    want = act_and_mul_reference(gate_up, activation)[0]
    torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-6, atol=1e-6)


def test_no_rows(device):
    assert act_and_mul(torch.randn(0, 8, device=device), "silu").shape == (0, 4)


def test_bad_input_is_refused(device):
    x = torch.zeros(2, 8, device=device)
    with pytest.raises(ValueError, match=r"found gate_up \[2, 7\]; needed \[\.\.\., 2 I\]"):
        act_and_mul(x[:, :7], "silu")
    with pytest.raises(ValueError, match=r"found torch.float64"):
        act_and_mul(x.double(), "silu")
    with pytest.raises(ValueError, match=r"found swish; needed one of silu, gelu, gelu_tanh, relu"):
        act_and_mul(x, "swish")


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_what_ships_covers_every_size(capability):
    items = list(shipped(capability))
    assert len({item.name for item in items}) == len(items)
    for size in (1, 64, 96, 14336):
        found = [s for s in items if s.constexprs["BLOCK_I"] == config(size)["BLOCK_I"]]
        assert {s.constexprs["ACTIVATION"] for s in found} == set(ACTIVATIONS)
