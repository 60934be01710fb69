"""Experts that every token takes, routed and multiplied in the launches of the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from specc.kernels.cuda.experts import experts
from specc.kernels.cuda.route import route
from specc.kernels.reference.fused import CLAMPED
from specc.kernels.reference.products import experts_reference
from specc.kernels.reference.routing import route_reference
from tests.kernels.cuda.test_experts import BF16, F16, F32, Case, assert_close, make_operands

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]

# a mixture, and how many experts every token takes
CASES = {
    "one": (Case(1, 2, 4, 48, 32), 1),
    "two-of-three-tokens": (Case(3, 2, 4, 40, 24), 2),
    "bf16": (Case(5, 3, 5, 136, 48, BF16), 2),
    "no-expert": (Case(6, 3, 4, 40, 24, F16, "bad"), 1),
    "most": (Case(16, 12, 13, 24, 16), 4),
    "sorted": (Case(40, 2, 4, 72, 40), 2),
    "sorted-bf16": (Case(70, 2, 3, 136, 72, BF16, "one", "gelu"), 1),
}


def with_shared(case: Case, count: int, device: torch.device) -> tuple[dict[str, Any], Tensor]:
    """Operands with experts that every token takes, and the sum that they should make."""
    operands = make_operands(case, device)
    size, hidden = case.size, case.hidden
    gate, up = torch.randn(2, count * size, hidden, device=device) * hidden**-0.5
    down = torch.randn(hidden, count * size, device=device) * size**-0.5
    weights = torch.rand(case.num_tokens, 1, device=device) + 0.5
    gate, up, down = (x.to(case.dtype) for x in (gate, up, down))
    chosen = experts_reference(**operands)
    x = operands["x"].float()
    inner = getattr(functional, case.activation)(x @ gate.float().mT) * (x @ up.float().mT)
    of_shared = weights * (inner.to(case.dtype).float() @ down.float().mT)
    every = (torch.arange(count, device=device) + case.num_experts).expand(case.num_tokens, count)
    operands["ids"] = torch.cat([operands["ids"], every], 1)
    operands["weights"] = torch.cat([operands["weights"], weights.expand(-1, count)], 1)
    operands |= {"shared_gate_up": torch.cat([gate, up]), "shared_down": down}
    return operands, chosen.float() + of_shared


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("run", [experts, experts_reference], ids=["kernel", "oracle"])
def test_shared_experts(run: Callable[..., Tensor], name: str, device: torch.device) -> None:
    case, count = CASES[name]
    if name == "no-expert":
        # an id after those of all experts names none
        case = Case(6, 3, 4, 40, 24, F16)
    operands, want = with_shared(case, count, device)
    if name == "no-expert":
        operands["ids"][2, -1] = case.num_experts + count
        lone = {key: x for key, x in operands.items() if not key.startswith("shared")}
        row = experts_reference(**lone)[2]
        want[2] = row.float()
    assert_close(run(**operands), want.to(case.dtype), case.dtype)


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(("num_rows", "num_experts"), [(1, 4), (5, 16), (18, 20)])
@pytest.mark.parametrize("run", [route, route_reference], ids=["kernel", "oracle"])
def test_every_row_takes_them(
    run: Callable[..., tuple[Tensor, Tensor]],
    num_rows: int,
    num_experts: int,
    dtype: torch.dtype,
    is_gated: bool,
    device: torch.device,
) -> None:
    """After the others, with the weight 1, or with that of their gate."""
    torch.manual_seed(num_rows)
    x = torch.randn(num_rows, 72, device=device).to(dtype)
    weight, gate = (torch.randn(n, 72, device=device).to(dtype) / 4 for n in (num_experts, 1))
    how = None, None, "softmax", 3, True, 0.0, 2.5, 1, 1, 1
    chosen = route_reference(x, weight, *how)
    ids, weights = run(x, weight, *how, 2, gate if is_gated else None)
    assert torch.equal(ids[:, :3], chosen[0])
    torch.testing.assert_close(weights[:, :3], chosen[1], rtol=1e-5, atol=1e-6)
    assert ids[:, 3:].tolist() == [[num_experts, num_experts + 1]] * num_rows
    own = torch.ones(num_rows, 1, device=device)
    if is_gated:
        own = torch.sigmoid(x.float() @ gate.float().mT)
    torch.testing.assert_close(weights[:, 3:], own.expand(-1, 2), rtol=1e-5, atol=1e-6)


def test_more_than_a_program_has_are_of_the_oracle(device: torch.device) -> None:
    x, weight = torch.randn(2, 24, device=device), torch.randn(20, 24, device=device)
    how = None, None, "softmax", 12, False, 0.0, 1.0, 1, 1, 1, 5
    assert all(map(torch.equal, route(x, weight, *how), route_reference(x, weight, *how)))


BROKEN: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "found shared_gate_up .*S · 24, 40": lambda x: {"shared_down": None},
    "found shared_gate_up": lambda x: {"shared_gate_up": x["shared_gate_up"][:-1]},
    "found shared_gate_up torch.float16": lambda x: {"shared_gate_up": x["shared_gate_up"].half()},
    "found shared experts": lambda x: {"activation": CLAMPED},
    "found shared experts;.* without biases": lambda x: {"gate_up_bias": x["x"].new_ones(4, 48)},
}


@pytest.mark.parametrize("found", BROKEN)
def test_refuses(found: str, device: torch.device) -> None:
    operands, _ = with_shared(*CASES["two-of-three-tokens"], device)
    operands |= BROKEN[found](operands)
    with pytest.raises(ValueError, match=found.replace(" torch", ".*torch")):
        experts(**operands)


def test_a_size_of_their_own_is_refused(device: torch.device) -> None:
    operands, _ = with_shared(*CASES["one"], device)
    cut = {"shared_gate_up": operands["shared_gate_up"][:40], "shared_down": torch.ones(48, 20)}
    with pytest.raises(ValueError, match=r"shared_gate_up.*S · 32"):
        experts(**operands | {key: x.to(device) for key, x in cut.items()})


def test_a_gate_without_them_is_refused(device: torch.device) -> None:
    x = torch.zeros(2, 24, device=device)
    how = None, None, "softmax", 2, False, 0.0, 1.0, 1, 1, 1
    for count, gate in ((0, x[:1]), (1, x), (1, x[:1].half())):
        with pytest.raises(ValueError, match="found shared_gate"):
            route(x, torch.zeros(4, 24, device=device), *how, count, gate)
