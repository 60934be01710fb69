"""A mixture's router in one launch: the experts and weights of the oracle, ties and NaN too.

Where experts are compared, logits are sums of small integers over powers of two, which are exact
in any order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from specc.kernels.cuda import route as module
from specc.kernels.cuda.route import route
from specc.kernels.reference.routing import route_reference

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Case:
    """Sizes of a router, and the arguments of the operator.

    Args:
        num_rows: N.
        num_experts: E.
        hidden: H.
    """

    num_rows: int
    num_experts: int
    hidden: int
    dtype: torch.dtype = F32
    scores: str = "softmax"
    top_k: int = 2
    normalize: bool = False
    eps: float = 0.0
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    has_bias: bool = False
    has_correction: bool = False


CASES = {
    "one-row": Case(1, 4, 40, top_k=1),
    # Qwen3-MoE, gpt-oss, DeepSeek V2 and V3
    "normalized": Case(5, 20, 70, top_k=8, normalize=True),
    "bf16": Case(5, 128, 136, BF16, top_k=8, normalize=True),
    "chosen": Case(6, 18, 33, F16, "chosen", 4, has_bias=True),
    "groups-of-20": Case(7, 160, 40, top_k=6, scale=16.0, groups=8, top_groups=3),
    "groups-of-two": Case(
        18, 24, 40, F32, "sigmoid", 4, True, 1e-20, 2.5, 6, 3, 2, False, True
    ),  # two blocks of rows
    "groups-bf16": Case(3, 256, 136, BF16, "sigmoid", 8, True, 1e-20, 2.5, 8, 4, 2, False, True),
    "corrected": Case(4, 5, 30, F32, "sigmoid", 5, has_correction=True, has_bias=True),
    "most": Case(2, 512, 24, F32, "softmax", 16, normalize=True),
    # more than a program has
    "oracle": Case(2, 520, 24, F32, "sigmoid", 2),
    "oracle-of-many": Case(2, 40, 24, F32, "chosen", 17),
}


def make_operands(case: Case, device: torch.device, is_exact: bool = True) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(case.num_rows * 31 + case.num_experts)

    def numbers(*shape: int, step: float = 1.0) -> torch.Tensor:
        if not is_exact:
            return torch.randn(shape, generator=generator)
        return torch.randint(-2, 3, shape, generator=generator) * step

    operands: dict[str, Any] = {
        "x": numbers(case.num_rows, case.hidden).to(case.dtype).to(device),
        "weight": numbers(case.num_experts, case.hidden, step=1 / 16).to(case.dtype).to(device),
        "bias": None,
        "correction": None,
    }
    if case.has_bias:
        operands["bias"] = numbers(case.num_experts, step=1 / 8).to(case.dtype).to(device)
    if case.has_correction:
        operands["correction"] = numbers(case.num_experts, step=1 / 4).to(device)
    names = (
        "scores", "top_k", "normalize", "eps", "scale", "groups", "top_groups", "group_best",
    )  # fmt: skip
    return operands | {name: getattr(case, name) for name in names}


@pytest.mark.parametrize("name", CASES)
def test_route(name, device):
    operands = make_operands(CASES[name], device)
    want, got = route_reference(**operands), route(**operands)
    assert [(x.dtype, x.shape) for x in got] == [(x.dtype, x.shape) for x in want]
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=2e-6, atol=0)


def test_equal_scores_are_of_the_lower_expert(device):
    """Groups likewise, and -0 is 0."""
    case = CASES["groups-of-two"]
    operands = make_operands(case, device)
    operands["weight"].zero_()
    operands["correction"].zero_()
    operands["weight"][::2] = -0.0
    ids, weights = route(**operands)
    assert ids.tolist() == [[0, 1, 2, 3]] * case.num_rows
    torch.testing.assert_close(weights, torch.full_like(weights, case.scale / 4))


@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "chosen"])
def test_what_is_no_number_is_its_rows_alone(scores, device):
    """Ids are those of experts, and distinct; NaN comes first, as torch sorts."""
    case = replace(CASES["normalized"], scores=scores)
    operands = make_operands(case, device)
    want = route(**operands)
    operands["x"][1] = float("nan")
    operands["x"][3] = -float("inf")
    ids, weights = route(**operands)
    assert torch.equal(ids, route_reference(**operands)[0])
    assert all(len(set(row)) == case.top_k for row in ids.tolist())
    for row in (0, 2, 4):
        assert torch.equal(ids[row], want[0][row])
        assert torch.equal(weights[row], want[1][row])
    assert weights[1].isnan().all()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_rows_do_not_see_each_other(dtype, device):
    """The same bits whoever stands beside it, and at every run."""
    case = Case(19, 40, 300, dtype, top_k=4, normalize=True)
    operands = make_operands(case, device, is_exact=False)
    together = route(**operands)
    for row in (0, 8, 18):
        alone = route(**operands | {"x": operands["x"][row : row + 1]})
        for one, all_rows in zip(alone, together, strict=True):
            assert torch.equal(one[0], all_rows[row])
    assert all(map(torch.equal, route(**operands), together))
    torch.testing.assert_close(together[1], route_reference(**operands)[1], rtol=1e-4, atol=1e-5)


def test_no_rows(device):
    ids, weights = route(**make_operands(replace(CASES["one-row"], num_rows=0), device))
    assert (ids.shape, weights.shape) == ((0, 1), (0, 1))


def test_rows_of_a_wider_tensor(device):
    operands = make_operands(CASES["normalized"], device)
    want = route(**operands)
    operands["x"] = torch.stack([operands["x"], operands["x"] * 3], -1)[..., 0]
    assert all(map(torch.equal, route(**operands), want))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"x": torch.zeros(5, 70, dtype=torch.float64)}, "found x"),
        ({"x": torch.zeros(1, 5, 70)}, "found x"),
        ({"weight": torch.zeros(20, 71)}, "found weight"),
        ({"weight": torch.zeros(20, 70, dtype=F16)}, "found weight"),
        ({"weight": torch.zeros(70, 20).mT}, "found weight of strides"),
        ({"bias": torch.zeros(21)}, "found bias"),
        ({"correction": torch.zeros(20, dtype=F16)}, "found correction"),
        ({"scores": "tanh"}, "found tanh"),
        ({"top_k": 21}, "found top_k 21"),
        ({"groups": 3}, "found 3 groups"),
        ({"groups": 4, "top_groups": 1}, "found top_groups 1"),
        ({"groups": 2, "top_groups": 1, "group_best": 3}, "found group_best 3"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_input_is_refused(change, found, device):
    operands = make_operands(CASES["normalized"], device)
    change = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in change.items()}
    with pytest.raises(ValueError, match=found):
        route(**(operands | change))


def test_most_experts_are_compared_by_the_oracle(monkeypatch, device):
    """What a program has no room for launches nothing."""
    monkeypatch.setattr(module, "_route_kernel", None)
    for name in ("oracle", "oracle-of-many"):
        route(**make_operands(CASES[name], device))
