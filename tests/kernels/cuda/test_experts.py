"""The chosen experts of tokens, in a few launches that follow from shapes alone."""

from __future__ import annotations

import pytest
import torch

from specc.kernels.cuda.experts import experts
from tests.kernels.cuda.cases_experts import (
    CASES,
    F16,
    Case,
    check_experts,
    check_strides,
    check_tiles,
    check_tokens_alone,
    make_operands,
    without_tokens,
)

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]


# the same in other types, and sizes that others have
SLOW = {
    "one-token-bf16", "all-to-one-bf16", "sorted-f16", "sorted-all-to-one", "sorted-unused",
    "most-of-few", "wide",
}  # fmt: skip


@pytest.mark.default(
    "one-token",
    "one-expert-a-token",
    "all-to-one",
    "unused-experts",
    "no-expert",
    "no-expert-at-all",
    "sorted-no-expert",
    "sorted-many-experts",
    "sorted-many-pairs",
)
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow) if x in SLOW else x for x in CASES]
)
def test_experts(name, device):
    check_experts(CASES[name], device)


def test_tokens_do_not_see_each_other(device):
    check_tokens_alone(device)


def test_strides(device):
    check_strides(device)


def test_every_tile_has_a_program():
    check_tiles()


def test_no_tokens(device):
    case = without_tokens(CASES["one-token"])
    assert experts(**make_operands(case, device)).shape == (0, case.hidden)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"x": torch.zeros(5, 40, dtype=torch.float64)}, "found x"),
        ({"x": torch.zeros(1, 5, 40)}, "found x"),
        ({"ids": torch.zeros(5, 2, dtype=torch.int32)}, "found ids"),
        ({"ids": torch.zeros(4, 2, dtype=torch.int64)}, "found ids"),
        ({"weights": torch.zeros(5, 3)}, "found weights"),
        ({"weights": torch.zeros(5, 2, dtype=F16)}, "found weights"),
        ({"gate_up": torch.zeros(4, 47, 40)}, "found gate_up"),
        ({"gate_up": torch.zeros(48, 40)}, "found gate_up"),
        ({"gate_up": torch.zeros(4, 40, 48).mT}, "found gate_up of strides"),
        ({"down": torch.zeros(3, 40, 24)}, "found down"),
        ({"down": torch.zeros(4, 40, 24, dtype=F16)}, "found down"),
        ({"down": torch.zeros(4, 24, 40).mT}, "found down of strides"),
        ({"activation": "swish"}, "found swish"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_input_is_refused(change, found, device):
    operands = make_operands(Case(5, 2, 4, 40, 24), device)
    change = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in change.items()}
    with pytest.raises(ValueError, match=found):
        experts(**(operands | change))
