"""`specc::attend` of a single sequence of few rows: its own kernel against the oracle."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from specc.kernels.cuda import arrivals, attend_few, attend_few_kernels
from specc.kernels.cuda import attend as module
from specc.kernels.cuda.launch import even_tokens
from tests.kernels.cuda.cases_attend import BF16, F16, Case, check_attend, make_call, run_broken

pytestmark = pytest.mark.usefixtures("poisoned_memory")

HEADS = (8, 2)
CASES = {
    "one": Case(((1, 200),), False, BF16, HEADS, splits=4),
    "one-split": Case(((1, 200),), False, BF16, HEADS),
    "draft-step": Case(((1, 126),), True, BF16, HEADS, first_node=4, splits=3),
    "chain": Case(((6, 250),), True, BF16, HEADS, splits=40),
    "chain-splits-of-2": Case(((6, 250),), True, BF16, HEADS, splits=2),
    # full blocks enough to load ahead, and some after them
    "ahead": Case(((6, 900),), True, BF16, HEADS, splits=3),
    "one-ahead": Case(((1, 700),), False, BF16, (4, 1), splits=2),
    "ahead-of-one": Case(((2, 260),), True, F16, (4, 1), splits=1),
    "heads-of-3": Case(((5, 150),), True, F16, (6, 2), splits=2),
    "heads-of-1": Case(((30, 70),), True, BF16, (2, 2), splits=3),
    "heads-of-8": Case(((3, 70),), True, BF16, (8, 1), splits=3, tail=1),
    "heads-of-9": Case(((2, 70),), True, BF16, (9, 1), splits=2),
    "dead-tokens": Case(((5, 70),), True, BF16, HEADS, splits=2, dead=(0, 3), tail=1),
    "dead-sequence": Case(((5, 70),), True, BF16, HEADS, splits=2, dead=(0, 1, 2, 3, 4)),
    "causal": Case(((7, 60),), False, BF16, (4, 1), splits=2, dead=(6,)),
    "dense": Case(((6, 90),), True, BF16, HEADS, block_size=0, splits=2),
    "pages-of-128": Case(((6, 290),), True, BF16, HEADS, block_size=128, splits=2),
    "region-of-blocks": Case(((4, 5),), True, BF16, (4, 2), first_node=150, splits=2),
    "empty": Case(((5, 0),), True, BF16, HEADS, splits=2),
    "sinks": Case(((5, 150),), True, BF16, (6, 2), splits=2, sinks=4.0),
    "sinks-of-few-keys": Case(((3, 0),), True, BF16, HEADS, splits=3, dead=(1,), sinks=2.0),
    "sinks-ahead": Case(((1, 700),), False, F16, (4, 1), splits=2, sinks=5.0),
    "softcap": Case(((5, 150),), True, BF16, HEADS, splits=3, softcap=0.7),
    "softcap-ahead": Case(((6, 900),), True, F16, HEADS, splits=3, softcap=0.7, sinks=3.0),
    "softcap-causal": Case(((7, 60),), False, BF16, (4, 1), splits=2, softcap=1.0),
    "head-128": Case(((4, 130),), True, F16, HEADS, (128, 128), splits=3),
    "int8": Case(((5, 150),), True, BF16, HEADS, splits=2, rows="int8"),
    "int8-ahead": Case(((6, 900),), True, F16, HEADS, splits=3, rows="int8", softcap=0.7),
    "int8-causal": Case(((7, 60),), False, BF16, (4, 1), splits=2, dead=(6,), rows="int8"),
    "fp8": Case(((6, 250),), True, F16, HEADS, splits=40, rows="fp8"),
    "fp8-dense": Case(((6, 90),), True, BF16, HEADS, block_size=0, splits=2, rows="fp8"),
    "fp8-128": Case(
        ((5, 130),), True, BF16, (6, 2), (128, 128), splits=3, dead=(1,), rows="fp8", sinks=3.0
    ),
    "head-128-of-3": Case(((5, 130),), True, F16, (6, 2), (128, 128), splits=3),
}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls that were launched by this kernel."""
    found: list[Any] = []
    launch = attend_few.launch

    def counted(*args: Any, **options: Any) -> None:
        found.append(args[0])
        launch(*args, **options)

    monkeypatch.setattr(attend_few, "launch", counted)
    return found


@pytest.mark.default(
    "one",
    "one-split",
    "chain",
    "chain-splits-of-2",
    "ahead",
    "ahead-of-one",
    "heads-of-3",
    "heads-of-8",
    "dead-tokens",
    "causal",
    "region-of-blocks",
    "empty",
    "int8",
    "int8-causal",
    "fp8",
)
@pytest.mark.parametrize("name", CASES)
def test_attend(name: str, launches: list[Any], device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("not the kernel of this device")
    check_attend(CASES[name], device)
    assert len(launches) == 1


OTHERS = {
    "sequences": Case(((1, 20), (1, 9)), True, BF16, HEADS),
    "window": Case(((3, 40),), True, BF16, HEADS, window=9),
    "rows": Case(((9, 20),), True, BF16, HEADS),
    "odd-pages": Case(((3, 20),), True, BF16, HEADS, block_size=24),
    "odd-heads": Case(((3, 20),), True, BF16, HEADS, (80, 80)),
    "value-size": Case(((3, 20),), True, BF16, HEADS, (64, 32)),
    "float32": Case(((3, 20),), True, torch.float32, HEADS),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_calls_have_the_kernel_of_all_batches(
    name: str, launches: list[Any], device: torch.device
) -> None:
    call = make_call(OTHERS[name], device)
    module.attend(*call.args, **call.options, num_splits=1)
    assert launches == []


@pytest.mark.parametrize(
    "name", [pytest.param("chain", marks=pytest.mark.slow), "ahead", "heads-of-8"]
)
def test_a_replay_gives_the_same_bits_whichever_is_last(name: str, device: torch.device) -> None:
    case = CASES[name]
    call = make_call(case, device)
    outputs = [module.attend(*call.args, **call.options, num_splits=case.splits) for _ in range(2)]
    assert torch.equal(*outputs)
    assert not arrivals.counters(call.args[1], 1).any()


def test_splits_are_as_many_as_programs_that_run_at_a_time(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(module, "machine", lambda _: (90, 8))
    check_attend(dataclasses.replace(CASES["chain"], splits=None), device)


def test_even_tokens_need_no_starts(device: torch.device) -> None:
    call = make_call(CASES["chain"], device)
    want = module.attend(*call.args, **call.options, num_splits=3)
    args = [*call.args]
    args[3] = torch.full_like(args[3], 1 << 30)
    with even_tokens():
        found = module.attend(*args, **call.options, num_splits=3)
    assert torch.equal(found, want)


@pytest.mark.parametrize("is_tree", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_bad_data_stays_inside(is_tree: bool, device: torch.device) -> None:
    run_broken(make_call(Case(((4, 90),), True, BF16, HEADS), device), is_tree)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the wait is made in the interpreter")
@pytest.mark.parametrize(
    ("is_tree", "rows"), [(True, "auto"), (False, "auto"), (True, "int8"), (False, "fp8")]
)
def test_what_the_kernel_before_writes_is_read_after_the_wait(
    is_tree: bool, rows: str, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """A draft's first pass is causal, and writes committed rows again."""
    # the first row that it writes is the last of a key block, which all its tokens see
    tokens, length = 4, 127
    call = make_call(Case(((tokens, length),), is_tree, BF16, HEADS, rows=rows), device)
    args = list(call.args)
    want = call.reference()
    if not is_tree:
        args[6] = args[6] + tokens - 1
    places = [(int(args[8][0, i // 16]), i % 16) for i in range(length, length + tokens)]
    written = [[cache[place].clone() for place in places] for cache in args[1:3]]
    waits = []

    def fill(_: Any) -> None:
        waits.append(1)
        for cache, rows in zip(args[1:3], written, strict=True):
            for place, row in zip(places, rows, strict=True):
                cache[place] = row

    def spoil(_: Any) -> None:
        for cache in args[1:3]:
            for place in places:
                # of quantized rows, all bits of their scale, too
                cache[place] = float("nan") if rows == "auto" else -1

    monkeypatch.setattr(attend_few_kernels, "wait_alone", fill)
    # all keys are read by then
    monkeypatch.setattr(attend_few_kernels, "let_next_start", spoil)
    spoil(None)
    found = module.attend(*args, **call.options, num_splits=3)
    assert len(waits) >= 3
    assert float((found.float() - want).norm() / want.norm()) < 3e-3
