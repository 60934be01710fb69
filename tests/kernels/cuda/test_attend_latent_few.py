"""Attention over latents for few tokens of a sequence: its own kernel against the oracle."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from specc.kernels.cuda import arrivals, attend_latent_few, attend_latent_few_kernels
from specc.kernels.cuda import attend as module
from specc.kernels.cuda.attend_call import AttendCall
from specc.kernels.cuda.launch import even_tokens
from specc.kernels.cuda.shipped import CAPABILITIES
from tests.kernels.cuda.cases_attend import BF16, Case, check_call, run, run_broken
from tests.kernels.cuda.test_attend_latent import make_latent_call

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# four quarters of 16 columns
NARROW = (72, 64)
CASES = {
    "one": Case(((1, 200),), False, BF16, (16, 1), NARROW, splits=4),
    "one-split": Case(((1, 200),), False, BF16, (16, 1), NARROW),
    "tree": Case(((6, 150),), True, BF16, (5, 1), NARROW, splits=3),
    "tree-of-16": Case(((16, 70),), True, BF16, (2, 1), NARROW, splits=2),
    # more than one key block that is loaded ahead, and some after them
    "ahead": Case(((2, 700),), True, BF16, (8, 1), NARROW, splits=2),
    "two-tiles": Case(((2, 130),), True, BF16, (12, 1), NARROW, splits=2),
    "many-heads": Case(((1, 300),), False, BF16, (128, 1), NARROW, splits=3),
    "many-tiles": Case(((3, 260),), True, BF16, (20, 1), NARROW, splits=2),
    # more parts than are merged at a time
    "rounds-of-parts": Case(((1, 1100),), False, BF16, (4, 1), NARROW, splits=20),
    "more-splits-than-blocks": Case(((2, 70),), True, BF16, (4, 1), NARROW, splits=9),
    "dead-tokens": Case(((5, 140),), True, BF16, (4, 1), NARROW, splits=2, dead=(0, 3), tail=2),
    "dead-sequence": Case(((3, 70),), True, BF16, (4, 1), NARROW, splits=2, dead=(0, 1, 2)),
    "causal": Case(((7, 60),), False, BF16, (4, 1), NARROW, splits=2, dead=(6,)),
    "dense": Case(((6, 90),), True, BF16, (4, 1), NARROW, block_size=0, splits=2),
    "pages-of-128": Case(((6, 290),), True, BF16, (4, 1), NARROW, block_size=128, splits=2),
    "draft-level": Case(((4, 70),), True, BF16, (4, 1), NARROW, first_node=9, splits=2),
    "region-of-blocks": Case(((4, 5),), True, BF16, (4, 1), NARROW, first_node=150, splits=2),
    "empty": Case(((5, 0),), True, BF16, (4, 1), NARROW, splits=2),
    "sinks": Case(((5, 150),), True, BF16, (6, 1), NARROW, splits=2, sinks=4.0),
    "softcap": Case(((5, 150),), True, BF16, (4, 1), NARROW, splits=3, softcap=0.7, sinks=3.0),
    "batch": Case(((2, 130), (2, 9), (2, 140)), True, BF16, (6, 1), NARROW, splits=2),
    "batch-of-tiles": Case(((1, 150), (1, 40), (1, 0)), False, BF16, (20, 1), NARROW, splits=2),
    "batch-with-padding": Case(
        ((2, 150), (2, 40)), True, BF16, (4, 1), NARROW, splits=2, dead=(2, 3)
    ),
    "minicpm": Case(((3, 70),), True, BF16, (5, 1), (288, 256), splits=2),
    "deepseek": Case(((2, 130),), True, BF16, (8, 1), (576, 512), splits=3),
    "deepseek-tiles": Case(((3, 70),), True, BF16, (16, 1), (576, 512), splits=2),
}


def is_even(case: Case) -> bool:
    return len({tokens for tokens, _ in case.seqs}) == 1 and not case.tail


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Launch parameters of calls that this kernel was launched for."""
    found: list[Any] = []
    launch = attend_latent_few.launch

    def counted(*args: Any, **options: Any) -> None:
        found.append(args[0])
        launch(*args, **options)

    monkeypatch.setattr(attend_latent_few, "launch", counted)
    return found


@pytest.mark.default(
    "one",
    "one-split",
    "tree",
    "ahead",
    "two-tiles",
    "many-heads",
    "rounds-of-parts",
    "dead-tokens",
    "causal",
    "dense",
    "empty",
    "softcap",
    "batch",
    "batch-with-padding",
    "deepseek",
)
@pytest.mark.parametrize("name", CASES)
def test_attend(name: str, launches: list[Any], device: torch.device) -> None:
    case = CASES[name]
    with even_tokens() if is_even(case) else contextlib.nullcontext():
        check_call(case, make_latent_call(case, device), run)
    assert len(launches) == 1


def test_values_of_a_program_go_by_the_number_of_tiles(launches: list[Any]) -> None:
    device = torch.device("meta")
    for heads, tokens, quarters in ((16, 1, 1), (16, 2, 1), (16, 3, 4), (128, 1, 4), (16, 16, 4)):
        q = torch.empty(heads, tokens, 576, dtype=BF16, device=device)
        cache = torch.empty(64, 16, 1, 576, dtype=BF16, device=device)
        i32 = torch.empty(tokens, dtype=torch.int32, device=device)
        table = torch.empty(1, 64, dtype=torch.int32, device=device)
        call = AttendCall(
            q, cache, None, 512, i32[:2], i32.long(), i32, i32[:1], None, table, scale=1.0
        )
        found = attend_latent_few.find(call, 90)
        assert found is not None
        assert found.num_values == quarters, (heads, tokens)


OTHERS = {
    "window": Case(((3, 40),), True, BF16, (4, 1), NARROW, window=9),
    "tokens": Case(((17, 40),), True, BF16, (1, 1), NARROW),
    "tiles": Case(((16, 20),), True, BF16, (33, 1), NARROW),
    "uneven-sequences": Case(((2, 40), (1, 9)), True, BF16, (4, 1), NARROW),
    "odd-pages": Case(((3, 20),), True, BF16, (4, 1), NARROW, block_size=24),
    "odd-rank": Case(((3, 20),), True, BF16, (4, 1), (88, 80)),
    "float32": Case(((3, 20),), True, torch.float32, (4, 1), NARROW),
    "float16": Case(((3, 20),), True, torch.float16, (4, 1), NARROW),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_calls_have_the_kernel_of_all_batches(
    name: str, launches: list[Any], device: torch.device
) -> None:
    run(make_latent_call(OTHERS[name], device), 1)
    assert launches == []


@pytest.mark.parametrize("name", ["one", "many-heads"])
def test_a_replay_gives_the_same_bits(name: str, device: torch.device) -> None:
    case = CASES[name]
    call = make_latent_call(case, device)
    assert torch.equal(*(run(call, case.splits) for _ in range(2)))
    assert not arrivals.counters(call.args[1], 1).any()


def test_splits_are_as_many_as_programs_that_run_at_a_time(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(module, "machine", lambda _: (90, 12))
    case = replace(CASES["one"], splits=None)
    grids: list[tuple[int, ...]] = []
    kernel = attend_latent_few.attend_latent_few_kernel

    class Launcher:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return kernel[grid]

    monkeypatch.setattr(attend_latent_few, "attend_latent_few_kernel", Launcher())
    check_call(case, make_latent_call(case, device), run)
    # a program for each quarter of the values, and three splits of four key blocks
    assert grids == [(4, 3, 1)]


def test_even_sequences_need_no_starts(device: torch.device) -> None:
    case = CASES["batch"]
    call = make_latent_call(case, device)
    with even_tokens():
        want = run(call, case.splits)
        call.args = (*call.args[:3], torch.full_like(call.args[3], 1 << 30), *call.args[4:])
        found = run(call, case.splits)
    assert torch.equal(found, want)


@pytest.mark.parametrize("is_tree", [True, False])
def test_bad_data_stays_inside(is_tree: bool, device: torch.device) -> None:
    case = Case(((4, 90),), True, BF16, (4, 1), NARROW)
    run_broken(make_latent_call(case, device), is_tree, run)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the wait is made in the interpreter")
@pytest.mark.parametrize(
    ("is_tree", "seqs"), [(True, ((4, 127),)), (False, ((4, 127),)), (True, ((4, 127), (4, 100)))]
)
def test_what_the_kernel_before_writes_is_read_after_the_wait(
    is_tree: bool,
    seqs: tuple[tuple[int, int], ...],
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
) -> None:
    """A draft's first pass is causal, and writes committed rows again.

    Of several sequences, blocks that one has committed may be another's, which writes them.
    """
    tokens, length = seqs[0]
    call = make_latent_call(Case(seqs, is_tree, BF16, (4, 1), NARROW), device)
    args = list(call.args)
    want = call.reference()
    if not is_tree:
        args[6] = args[6] + tokens - 1
    first = 0 if len(seqs) > 1 else length
    places = [(int(args[8][0, i // 16]), i % 16) for i in range(first, length + tokens)]
    written = [args[1][place].clone() for place in places]
    waits = []

    def fill(_: Any) -> None:
        waits.append(1)
        for place, row in zip(places, written, strict=True):
            args[1][place] = row

    def spoil(_: Any) -> None:
        for place in places:
            args[1][place] = float("nan")

    monkeypatch.setattr(attend_latent_few_kernels, "wait_alone", fill)
    # all keys are read by then
    monkeypatch.setattr(attend_latent_few_kernels, "let_next_start", spoil)
    spoil(None)
    with even_tokens():
        found = run(replace(call, args=tuple(args)), 3)
    assert len(waits) >= 3
    assert float((found.float() - want).norm() / want.norm()) < 3e-3


def test_first_keys_are_asked_for_before_the_wait(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Of one sequence: what is spoiled at the wait is no longer read."""
    case = CASES["one"]
    call = make_latent_call(case, device)
    want = call.reference()
    pages = [int(page) for page in call.args[8][0, : 128 // 16]]

    def spoil(_: Any) -> None:
        call.args[1][pages] = float("nan")

    kept = call.args[1][pages].clone()
    monkeypatch.setattr(attend_latent_few_kernels, "wait_alone", spoil)
    monkeypatch.setattr(
        attend_latent_few_kernels,
        "let_next_start",
        lambda _: call.args[1].__setitem__(pages, kept),
    )
    found = run(call, case.splits)
    assert float((found.float() - want).norm() / want.norm()) < 3e-3


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_shipped_names_are_their_own(capability: int) -> None:
    names = [item.name for item in attend_latent_few.shipped(capability)]
    assert len(names) == len(set(names)) >= 8
    assert any(name.endswith("-dependent") for name in names) == (capability >= 90)
