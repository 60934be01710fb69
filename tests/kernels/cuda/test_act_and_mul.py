"""`act_and_mul` equals its oracle, for every activation that passes put into a graph."""

from __future__ import annotations

import pytest
import torch

from specc.kernels.cuda.act_and_mul import act_and_mul, config, shipped
from specc.kernels.cuda.shipped import CAPABILITIES
from specc.kernels.reference.fused import ACTIVATIONS
from tests.kernels.cuda.cases_act_and_mul import (
    CASES,
    check_act_and_mul,
    check_extremes,
)

IDS = [f"{c[4]}-{c[1]}-{'x'.join(map(str, c[0]))}-I{c[2]}-{str(c[3])[6:]}" for c in CASES]
pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    # exp of a gate far out, which the reciprocal brings back to zero
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_act_and_mul(case, device):
    check_act_and_mul(*case, device)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_extremes(activation, device):
    check_extremes(activation, device)


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
        found = [s for s in items if s.constexprs["BLOCK_I"] == config(size).block_i]
        assert {s.constexprs["ACTIVATION"] for s in found} == set(ACTIVATIONS)
