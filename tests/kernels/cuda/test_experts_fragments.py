"""Experts by matrices in fragments equal their oracle; on a CPU the Gluon kernels are emulated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specc.artifact.quantized_layout import QuantizedLayout
from specc.kernels.cuda import experts_fragments
from specc.kernels.cuda import experts_fragments_kernels as kernels
from specc.kernels.cuda.experts import experts, invariant_experts
from specc.kernels.cuda.few_rows_tiles import FRAGMENT_LAYOUTS
from specc.kernels.reference.fused import ACTIVATIONS, CLAMPED
from specc.kernels.reference.products import gate_distance
from tests.kernels.cuda.emulated_fragments import launcher
from tests.kernels.cuda.test_experts import BF16, Case, check_experts, make_operands

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]

PRODUCTS = ("experts_fragments_gate_up_kernel", "experts_fragments_down_kernel")


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> list[tuple[str, int]]:
    """Kernels of fragments that were launched, and columns of their instructions."""
    found: list[tuple[str, int]] = []

    class Counted:
        def __init__(self, name: str) -> None:
            self.name, self.kernel = name, getattr(experts_fragments, name)
            if device.type == "cpu":
                self.kernel = launcher(kernels, name)

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*args: Any, **options: Any) -> None:
                found.append((self.name, options["BM"]))
                self.kernel[grid](*args, **options)

            return launch

    for name in PRODUCTS:
        monkeypatch.setattr(experts_fragments, name, Counted(name))
    return found


def in_fragments(name: str, case: Case) -> Case:
    distance = gate_distance(case.activation, case.size)
    layout = QuantizedLayout.named(f"{name}-fragments")
    return replace(case, layouts=(layout.paired(distance).name, layout.name))


# ids that name no expert, one expert of all, tiles that other warps have, several steps of a ring
CASES = {
    "gpt-oss": in_fragments(
        "mxfp4", Case(5, 2, 3, 320, 256, BF16, "bad", CLAMPED, has_biases=True)
    ),
    "one-token": in_fragments("mxfp4", Case(1, 1, 2, 1088, 256, BF16)),
    "nine-tokens": in_fragments("int4-g64-zeros", Case(9, 1, 2, 320, 256, BF16, "one", "gelu")),
    "int8": in_fragments("int8", Case(8, 2, 3, 160, 128, BF16, "half", "relu")),
    "fp8": in_fragments("fp8-g128", Case(3, 2, 3, 128, 640, BF16, has_biases=True)),
    "none": in_fragments("mxfp4", Case(3, 2, 4, 256, 256, BF16, "none")),
}


@pytest.mark.parametrize("name", CASES)
def test_experts(name: str, launched: list[Any], device: torch.device) -> None:
    case = CASES[name]
    check_experts(case, device)
    rows = 8 if case.num_tokens <= 8 else 16
    assert launched == [(product, rows) for product in PRODUCTS]


@pytest.mark.default("int4-g32-fragments", "int4-g128-zeros-fragments", "fp8-fragments")
@pytest.mark.parametrize("name", FRAGMENT_LAYOUTS)
def test_layouts(name: str, launched: list[Any], device: torch.device) -> None:
    case = in_fragments(name.removesuffix("-fragments"), Case(1, 1, 2, 256, 256, BF16))
    check_experts(case, device)
    assert len(launched) == 2


@pytest.mark.parametrize(
    ("name", "activation"),
    [("mxfp4", CLAMPED), ("int4-g64-zeros", "silu"), ("int8", CLAMPED), ("fp8-g128", "silu")],
)
def test_more_tokens(name: str, activation: str, launched: list[Any], device: Any) -> None:
    """They are multiplied by what levels stand for, from the same blocks."""
    case = Case(18, 1, 2, 256, 256, BF16, "bad", activation, has_biases=True)
    check_experts(in_fragments(name, case), device)
    assert launched == []


@pytest.mark.parametrize("fragments", [0, 1])
def test_one_product_by_fragments(fragments: int, launched: list[Any], device: Any) -> None:
    """The other is of blocks, or of floats."""
    for other in ("int8", ""):
        case = in_fragments("int8", Case(2, 1, 2, 128, 128, BF16))
        layouts = [other, other]
        layouts[fragments] = case.layouts[fragments]
        check_experts(replace(case, layouts=tuple(layouts)), device)
    assert [name for name, _ in launched] == [PRODUCTS[fragments]] * 2


def test_tokens_do_not_see_each_other(device: torch.device) -> None:
    """A token's result is the same bits whoever stands beside it, numbers or not."""
    case = in_fragments("int8", Case(6, 2, 3, 160, 128, BF16))
    operands = make_operands(case, device)
    together = experts(**operands)
    names = ("x", "ids", "weights")
    for row in (0, 5):
        alone = experts(**operands | {key: operands[key][row : row + 1] for key in names})
        assert torch.equal(alone[0], together[row])
    # nine to sixteen have other columns of an instruction
    more = {key: operands[key].repeat(4, 1)[:21] for key in names}
    assert torch.equal(invariant_experts(**operands | more), together.repeat(4, 1)[:21])
    operands["x"][2], operands["weights"][4] = torch.nan, torch.inf
    got = experts(**operands)
    assert not got[[2, 4]].isfinite().any()
    others = [0, 1, 3, 5]
    assert torch.equal(got[others], together[others])


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"gate_up_layout": "mxfp4-fragments"}, "found gate_up mxfp4-fragments"),
        ({"gate_up_layout": "mxfp4-fragments-256"}, "needed mxfp4-fragments-1, "),
        ({"activation": "silu"}, "needed mxfp4-fragments-256, "),
        ({"down_layout": "mxfp4-fragments-64"}, "needed mxfp4-fragments, "),
        ({"x": torch.zeros(5, 320)}, "needed .* rows of torch.bfloat16"),
    ],
)
def test_bad_input_is_refused(change: Any, found: str, device: torch.device) -> None:
    operands = make_operands(CASES["gpt-oss"], device)
    with pytest.raises(ValueError, match=found):
        experts(**operands | change)


def test_every_activation_has_its_number() -> None:
    assert len(ACTIVATIONS) == kernels.CLAMPED
    assert [*ACTIVATIONS] == ["silu", "gelu", "gelu_tanh", "relu"]
