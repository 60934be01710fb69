"""The chosen experts of tokens, in a few launches that follow from shapes alone.

Sizes are no multiples of tiles. Of up to 16 tokens every program finds its tile by itself; pairs of
more tokens, and of tokens with more than 16 experts, are sorted first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specc.artifact.quantized_layout import QuantizedLayout, dequantize
from specc.artifact.rounding import quantize
from specc.kernels.cuda import experts as module
from specc.kernels.cuda.experts import experts, invariant_experts
from specc.kernels.reference.fused import CLAMPED
from specc.kernels.reference.products import experts_reference
from tests.kernels.cuda.cases_linear_q import ALL, on_host

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# relative to the largest result of a row: what the second product reads is rounded, and the result
TOLERANCE = {F32: 1e-5, F16: 2e-3, BF16: 1.2e-2}


@dataclass(frozen=True)
class Case:
    """Sizes of a mixture, and how tokens choose.

    Args:
        num_tokens: N.
        top_k: K.
        num_experts: E.
        hidden: H.
        size: I.
        choice: `any` (distinct experts at random), `one` (all take the last expert, then others),
            `half` (nobody takes an odd expert), `bad` (some ids name no expert), `none`.
        weights: dtype of the weights, None for that of tokens.
        layouts: of gate and up, and of down; empty of floats.
    """

    num_tokens: int
    top_k: int
    num_experts: int
    hidden: int
    size: int
    dtype: torch.dtype = F32
    choice: str = "any"
    activation: str = "silu"
    weights: torch.dtype | None = F32
    has_biases: bool = False
    layouts: tuple[str, str] = ("", "")


CASES = {
    "one-token": Case(1, 2, 4, 48, 40),
    "one-token-bf16": Case(1, 8, 16, 264, 70, BF16, weights=None),
    "one-expert-a-token": Case(5, 1, 3, 33, 17, F16),
    "all-to-one": Case(16, 2, 4, 40, 24, F32, "one", "gelu"),
    "all-to-one-bf16": Case(13, 2, 5, 130, 34, BF16, "one"),
    "unused-experts": Case(7, 2, 8, 56, 20, F16, "half", "gelu_tanh", None),
    "no-expert": Case(6, 3, 4, 40, 24, F32, "bad"),
    "no-expert-at-all": Case(3, 2, 4, 40, 24, BF16, "none"),
    "many-a-token": Case(3, 11, 12, 24, 16, F32, weights=None),
    "wide": Case(2, 2, 3, 300, 270, BF16, activation="relu"),
    "most-of-few": Case(16, 16, 17, 24, 16, F32),
    "sorted-many-a-token": Case(3, 17, 18, 24, 16, F32),
    "sorted-fewest": Case(17, 2, 4, 40, 24, F16),
    "sorted": Case(65, 4, 6, 72, 40, F32),
    "sorted-bf16": Case(150, 2, 3, 136, 72, BF16, weights=None),
    "sorted-f16": Case(90, 3, 4, 40, 24, F16, activation="gelu"),
    "sorted-all-to-one": Case(140, 2, 4, 40, 136, BF16, "one"),
    "sorted-unused": Case(140, 2, 8, 40, 24, F32, "half", "gelu_tanh"),
    "sorted-no-expert": Case(90, 3, 4, 40, 24, F32, "bad", "relu"),
    "biases": Case(6, 3, 4, 40, 24, F32, "bad", has_biases=True),
    "clamped": Case(5, 2, 4, 48, 40, F32, activation=CLAMPED, has_biases=True),
    "clamped-bf16": Case(7, 2, 4, 130, 34, BF16, "one", CLAMPED, has_biases=True),
    "sorted-clamped": Case(65, 4, 6, 72, 40, F16, "any", CLAMPED, has_biases=True),
    "clamped-without-biases": Case(5, 2, 4, 40, 24, F32, activation=CLAMPED),
    # rows of a block that another has begun, and short groups
    "mxfp4": Case(5, 2, 4, 200, 40, BF16, "bad", CLAMPED, has_biases=True, layouts=("mxfp4",) * 2),
    "int4": Case(3, 2, 4, 72, 100, F32, "one", layouts=("int4-g32-zeros",) * 2),
    "fp8-float": Case(2, 1, 3, 130, 33, F16, layouts=("fp8-g128", "")),
    "float-int8": Case(2, 2, 3, 130, 33, BF16, layouts=("", "int8")),
    "sorted-mxfp4": Case(19, 2, 4, 136, 40, F16, "bad", layouts=("mxfp4",) * 2),
    "sorted-int8": Case(66, 1, 2, 40, 33, BF16, "one", layouts=("int8-zeros",) * 2),
    # more experts than a program counts at a time
    "sorted-many-experts": Case(26, 10, 132, 24, 16, F32),
    # more pairs than a program of the sort reads at a time
    "sorted-many-pairs": Case(260, 4, 4, 24, 16, F32),
}


def make_ids(case: Case) -> Tensor:
    """[N, K] int64."""
    shape = (case.num_tokens, case.top_k)
    scores = torch.rand(case.num_tokens, case.num_experts)
    if case.choice == "one":
        scores[:, -1] = 2.0
    if case.choice == "half":
        scores[:, 1::2] -= 2.0
    ids = scores.topk(case.top_k).indices
    if case.choice in ("bad", "none"):
        wrong = torch.tensor([-1, case.num_experts, 1 << 40, -(1 << 40)])
        places = torch.arange(ids.numel()).view(shape)
        is_wrong = places % 3 == 1 if case.choice == "bad" else places >= 0
        ids = torch.where(is_wrong, wrong[places % 4], ids)
    return ids


def make_operands(case: Case, device: torch.device) -> dict[str, Any]:
    torch.manual_seed(case.num_tokens * 31 + case.hidden)
    scales = torch.logspace(-1, 1, case.num_tokens)[:, None]
    shapes = {"gate_up": (2 * case.size, case.hidden), "down": (case.hidden, case.size)}
    stacks = {}
    for (name, shape), layout in zip(shapes.items(), case.layouts, strict=True):
        stack = torch.randn(case.num_experts, *shape) * shape[1] ** -0.5
        if layout:
            known = QuantizedLayout.named(layout)
            stacks[name] = torch.cat([quantize(matrix, known) for matrix in stack])
        else:
            stacks[name] = stack.to(case.dtype)
    ids, weights = make_ids(case), torch.rand(case.num_tokens, case.top_k) + 0.1
    weights[(ids < 0) | (ids >= case.num_experts)] = torch.nan
    operands = {
        "x": (torch.randn(case.num_tokens, case.hidden) * scales).to(case.dtype),
        "ids": ids,
        "weights": weights.to(case.weights or case.dtype),
        **stacks,
    }
    if case.has_biases:
        operands["gate_up_bias"] = 3 * torch.randn(case.num_experts, 2 * case.size)
        operands["down_bias"] = torch.randn(case.num_experts, case.hidden)
        operands |= {x: operands[x].to(case.dtype) for x in ("gate_up_bias", "down_bias")}
    named = {name: value.to(device) for name, value in operands.items()}
    named["activation"] = case.activation
    if any(case.layouts):
        named["size"] = case.size
        named["gate_up_layout"], named["down_layout"] = case.layouts
    return named


def check_experts(case: Case, device: torch.device) -> None:
    operands = make_operands(case, device)
    want, got = experts_reference(**on_host(operands)).to(device), experts(**operands)
    assert (got.dtype, got.shape) == (case.dtype, want.shape)
    assert got.is_contiguous()
    assert_close(got, want, case.dtype)
    if case.choice == "none":
        assert not got.any()


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    largest = want.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-3)
    error = ((got.float() - want.float()).abs() / largest).max()
    assert error <= TOLERANCE[dtype], f"{error} of the largest in a row"


def without_tokens(case: Case) -> Case:
    return replace(case, num_tokens=0)


# the same in other types, and sizes that others have
SLOW = {
    "one-token-bf16",
    "all-to-one-bf16",
    "sorted-f16",
    "sorted-all-to-one",
    "sorted-unused",
    "wide",
}


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
    "biases",
    "clamped",
    "sorted-clamped",
    "mxfp4",
    "int4",
    "fp8-float",
    "float-int8",
    "sorted-mxfp4",
    "sorted-int8",
)
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow) if x in SLOW else x for x in CASES]
)
def test_experts(name, device):
    check_experts(CASES[name], device)


def test_tokens_do_not_see_each_other(device):
    """A token's result is the same bits whoever stands beside it, and at every run."""
    case = Case(13, 3, 4, 72, 40, BF16)
    operands = make_operands(case, device)
    together = experts(**operands)
    assert torch.equal(experts(**operands), together)
    for row in range(0, case.num_tokens, 4):
        names = ("x", "ids", "weights")
        alone = experts(**operands | {name: operands[name][row : row + 1] for name in names})
        assert torch.equal(alone[0], together[row])


@pytest.mark.usefixtures("products_in_order")
@pytest.mark.parametrize(("dtype", "layout"), [(BF16, ""), (F16, "int4-g32-zeros"), (F32, "")])
def test_bits_do_not_go_by_the_number_of_tokens(dtype, layout, device, monkeypatch):
    """Those of a token alone, where others are sorted by their experts."""
    monkeypatch.setattr(module, "experts_order_kernel", None)
    case = Case(37, 3, 4, 72, 40, dtype, "bad", layouts=(layout, layout))
    operands = make_operands(case, device)
    names = ("x", "ids", "weights")
    together = invariant_experts(**operands)
    for row in (0, 15, 16, 36):
        alone = {name: operands[name][row : row + 1] for name in names}
        assert torch.equal(experts(**operands | alone)[0], together[row])
    assert_close(together, experts_reference(**on_host(operands)).to(device), dtype)
    none = {name: operands[name][:0] for name in names}
    assert invariant_experts(**operands | none).shape == (0, 72)


def test_invariant_experts_are_few_of_a_token(device):
    operands = make_operands(CASES["sorted-many-a-token"], device)
    with pytest.raises(ValueError, match="needed at most 16 experts of a token"):
        invariant_experts(**operands)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [x for x in ALL if x not in ("mxfp4", "int8")])
def test_experts_of_every_layout(layout, device):
    check_experts(Case(4, 2, 3, 136, 40, BF16, "bad", layouts=(layout, layout)), device)


def test_what_rows_multiply_is_what_a_matrix_stands_for(device):
    """Values of mxfp4 are exact in bfloat16, so experts as floats give nearly the same."""
    case = CASES["mxfp4"]
    operands = make_operands(case, device)
    got = experts(**operands)
    for name, shape in (("gate_up", (80, 200)), ("down", (200, 40))):
        wide = dequantize(operands[name].cpu(), (4, *shape), QuantizedLayout.named("mxfp4"))
        operands[name] = wide.to(BF16).to(device)
        assert torch.equal(operands[name].float().cpu(), wide)
    for name in ("gate_up_layout", "down_layout"):
        del operands[name]
    assert_close(got, experts(**operands), BF16)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_is_its_tokens_alone(bad, device):
    """Beside it, experts that others did not choose add nothing."""
    case = Case(6, 2, 4, 72, 40, BF16)
    operands = make_operands(case, device)
    want = experts(**operands)
    operands["x"][2] = bad
    operands["weights"][4] = bad
    got = experts(**operands)
    assert not got[[2, 4]].isfinite().any()
    others = [0, 1, 3, 5]
    assert torch.equal(got[others], want[others])


def test_few_tokens_add_up_as_many_do(monkeypatch, device):
    """With the same tiles both ways give the same bits, so that one may stand for the other."""
    operands = make_operands(Case(11, 5, 6, 72, 40, BF16), device)
    want = experts(**operands)
    monkeypatch.setattr(module, "FEW_TOKENS", 0)
    for name in ("GATE_UP", "DOWN"):
        tile, _ = getattr(module, name)[BF16]
        monkeypatch.setitem(getattr(module, name), BF16, (tile, tile))
    assert torch.equal(experts(**operands), want)


def test_strides(device):
    """Rows of a wider tensor, of which every second column counts."""
    operands = make_operands(Case(5, 2, 4, 40, 24), device)
    want = experts(**operands)
    for name in ("x", "ids", "weights"):
        value = operands[name]
        wide = value.new_full((value.shape[0], 2 * value.shape[1]), 3)
        wide[:, ::2] = value
        operands[name] = wide[:, ::2]
    assert torch.equal(experts(**operands), want)


def test_every_tile_has_a_program():
    """There is a program for every tile of sorted pairs, whatever is chosen."""
    generator = torch.Generator().manual_seed(5)
    for num_pairs in (*range(1, 40), 256, 1000, 4096):
        for num_experts in (1, 2, 7, 128):
            for tile in (t for pair in module.GATE_UP.values() for t in pair):
                most = tile.num_tiles(num_pairs, num_experts)
                spread = torch.arange(num_pairs).clamp(max=num_experts - 1)
                drawn = torch.randint(0, num_experts, (num_pairs,), generator=generator)
                for ids in (spread, drawn, spread * 0):
                    counts = torch.bincount(ids)
                    assert int(((counts + tile.block_m - 1) // tile.block_m).sum()) <= most


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
        ({"gate_up_bias": torch.zeros(4, 24)}, "found gate_up_bias"),
        ({"down_bias": torch.zeros(4, 40, dtype=F16)}, "found down_bias"),
        ({"gate_up_layout": "int8", "size": 24}, "found gate_up"),
        ({"down_layout": "mxfp4", "size": 24}, "found down"),
        ({"size": 23}, "found gate_up"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_input_is_refused(change, found, device):
    operands = make_operands(Case(5, 2, 4, 40, 24), device)
    change = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in change.items()}
    with pytest.raises(ValueError, match=found):
        experts(**(operands | change))
