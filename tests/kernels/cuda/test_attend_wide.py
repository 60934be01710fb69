"""`specc::attend` with wide tiles, against the oracle; on a CPU its first kernel is emulated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specc.artifact.kv_rows import SCALE_BYTES
from specc.kernels.cuda import attend as module
from specc.kernels.cuda import (
    attend_rows,
    attend_softmax,
    attend_visible,
    attend_visits,
    attend_wide,
    attend_wide_copies,
    attend_wide_kernels,
)
from specc.kernels.cuda.attend_call import AttendCall
from specc.kernels.cuda.launch import even_tokens
from specc.kernels.operators.attention import SPLIT_ROWS
from tests.kernels.cuda.cases_attend import (
    BF16,
    F16,
    NAN,
    Case,
    check_attend,
    make_call,
    run_broken,
)
from tests.kernels.cuda.gluon_emulator import Launcher, emulated

pytestmark = pytest.mark.usefixtures("poisoned_memory")

HEADS, SIZES = (8, 2), (128, 128)
LEAST_ROWS, SHORT_ROWS = attend_wide.LEAST_ROWS, attend_wide.SHORT_ROWS
CASES = {
    "tree-of-32": Case(((32, 130),), True, BF16, HEADS, SIZES, splits=2),
    "ring-goes-round": Case(((20, 700),), True, BF16, (4, 1), SIZES, splits=1),
    "one-block-a-split": Case(((9, 250),), True, F16, HEADS, SIZES, splits=40),
    "nodes-in-two-blocks": Case(((17, 100),), True, BF16, HEADS, SIZES, splits=3),
    "heads-of-3": Case(((11, 150),), True, F16, (6, 2), SIZES, splits=2),
    "dead-tokens": Case(((15, 70),), True, BF16, HEADS, SIZES, splits=2, dead=(0, 3), tail=1),
    "dead-sequence": Case(((2, 70),), True, BF16, HEADS, SIZES, splits=2, dead=(0, 1)),
    "causal": Case(((17, 60),), False, BF16, (4, 1), SIZES, splits=2, dead=(6,)),
    "dense": Case(((16, 90),), True, BF16, HEADS, SIZES, 0, splits=2),
    "pages-of-128": Case(((12, 290),), True, BF16, HEADS, SIZES, 128, splits=2),
    "region-of-blocks": Case(((4, 5),), True, BF16, (4, 2), SIZES, first_node=150, splits=2),
    "empty": Case(((5, 0),), True, BF16, HEADS, SIZES, splits=2),
    "sinks": Case(((11, 150),), True, F16, (6, 2), SIZES, splits=2, sinks=4.0),
    "sinks-of-two-groups": Case(((20, 130),), True, BF16, HEADS, SIZES, splits=3, sinks=4.0),
    "softcap": Case(((15, 70),), True, BF16, HEADS, SIZES, splits=2, dead=(0, 3), softcap=0.7),
    "softcap-causal": Case(((17, 60),), False, BF16, (4, 1), SIZES, softcap=1.0, sinks=2.0),
}
EVEN = {
    "batch": Case(((5, 130), (5, 0), (5, 70)), True, BF16, HEADS, SIZES, splits=2),
    "batch-sinks": Case(((5, 130), (5, 0)), True, BF16, HEADS, SIZES, splits=2, sinks=3.0),
    "batch-causal": Case(((2, 127), (2, 62)), False, BF16, (8, 1), SIZES, splits=2),
    "batch-dead": Case(((3, 70), (3, 9)), True, F16, HEADS, SIZES, splits=3, dead=(1, 3, 4, 5)),
}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> list[Any]:
    """Calls that were launched by these kernels; on a CPU the first one is emulated."""
    found: list[Any] = []
    launch = attend_wide.launch

    def counted(*args: Any, **options: Any) -> None:
        found.append(args[0])
        launch(*args, **options)

    monkeypatch.setattr(attend_wide, "launch", counted)
    # small cases
    monkeypatch.setattr(attend_wide, "LEAST_ROWS", 1)
    monkeypatch.setattr(attend_wide, "SHORT_ROWS", 64)
    monkeypatch.setattr(attend_wide, "FEW_KEYS", 0)
    if device.type == "cpu":
        monkeypatch.setattr(attend_wide, "_is_able", lambda: True)
        parts = attend_rows, attend_softmax, attend_visible, attend_visits, attend_wide_copies
        kernel = emulated(attend_wide_kernels, *parts).attend_wide_kernel
        monkeypatch.setattr(attend_wide, "attend_wide_kernel", Launcher(kernel))
    elif torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("not the kernel of this device")
    return found


@pytest.mark.parametrize("name", CASES)
def test_attend(name: str, launches: list[Any], device: torch.device) -> None:
    check_attend(CASES[name], device)
    assert len(launches) == 1


@pytest.mark.parametrize("name", EVEN)
def test_sequences_of_equally_many_tokens(
    name: str, launches: list[Any], device: torch.device
) -> None:
    with even_tokens():
        check_attend(EVEN[name], device)
    assert len(launches) == 1


# sequences, and splits of each where six programs run at a time
UNEVEN = {
    "lengths": (
        Case(((5, 600), (5, 0), (5, 70)), True, BF16, HEADS, SIZES, splits=None),
        [5, 1, 1],
    ),
    "dead": (
        Case(((2, 250), (2, 400), (2, 0)), True, F16, HEADS, SIZES, dead=(0, 2, 3, 5), splits=None),
        [2, 0, 1],
    ),
    "causal": (Case(((2, 700), (2, 62)), False, BF16, (8, 1), SIZES, splits=None), [6, 1]),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_long_sequences_have_more_splits(
    name: str, launches: list[Any], monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    case, splits = UNEVEN[name]
    sums: list[torch.Tensor] = []
    kernel = attend_wide.attend_wide_kernel

    class Spied:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*args: Any, **options: Any) -> None:
                sums.append(args[4])
                kernel[grid](*args, **options)

            return launch

    monkeypatch.setattr(attend_wide, "attend_wide_kernel", Spied())
    monkeypatch.setattr(module, "machine", lambda _: (90, 6))
    with even_tokens():
        check_attend(case, device)
    assert len(launches) == 1
    num_kv_heads = case.heads[1]
    rows = case.seqs[0][0] * case.heads[0] // num_kv_heads
    has_part = (sums[0][:, :rows] != float("-inf")).any(1).sum(1)
    assert has_part.tolist() == [n for n in splits for _ in range(num_kv_heads)]


def test_nan_that_a_row_sees_reaches_it(launches: list[Any], device: torch.device) -> None:
    """And no other row, and whichever split it is in."""
    call = make_call(Case(((3, 200),), True, BF16, HEADS, SIZES), device)
    for place in (202, 201, 130):
        keys = call.args[1]
        block = int(call.args[8][0, place // 16])
        keys[block, place % 16] = NAN
        found = module.attend(*call.args, **call.options, num_splits=4)
        is_nan = call.reference().isnan()
        assert is_nan.any()
        assert bool(is_nan.all()) == (place < 200)
        assert torch.equal(found.isnan(), is_nan)
    assert len(launches) == 3


@pytest.mark.parametrize(("tokens", "is_wide"), [(4, False), (5, True)])
def test_a_sequence_of_17_rows_is_wide(
    tokens: int,
    is_wide: bool,
    launches: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
) -> None:
    monkeypatch.setattr(attend_wide, "LEAST_ROWS", LEAST_ROWS)
    check_attend(Case(((tokens, 70),), True, BF16, (4, 1), SIZES), device)
    assert len(launches) == is_wide


def find(q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor) -> Any:
    places = (None,) * 5
    return attend_wide.find(AttendCall.of(q, cache, cache, *places, table, scale=1.0), 90)


def test_parts_are_no_more_than_plans_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend_wide, "_is_able", lambda: True)
    assert attend_wide.MOST_PART_ROWS == SPLIT_ROWS
    cache = torch.empty(1, 16, 8, 128, dtype=BF16, device="meta")
    taken = []
    for batch in (1, 2, 16, 24, 40, 64, 100, 160, 161, 256, 320, 321):
        for tokens in (5, 32):
            table = torch.empty(batch, 1, dtype=torch.int32, device="meta")
            q = cache.new_empty(32, batch * tokens, 128)
            with even_tokens():
                c = find(q, cache, table)
            if c is None:
                continue
            taken.append((batch, tokens))
            for capacity in (1024, 1 << 17):
                for num_splits in (None, 1, 99):
                    sizes = c, 8 * batch, batch, 132, capacity, num_splits
                    most, _ = attend_wide.plan_splits(*sizes)
                    assert most * 8 * batch * c.block_m <= SPLIT_ROWS
    assert {(160, 32), (320, 5)} < set(taken)
    assert not {(161, 32), (256, 32), (321, 5)} & set(taken)


OTHERS = {
    "sequences-that-may-be-uneven": Case(((2, 20), (2, 9)), True, BF16, HEADS, SIZES),
    "window": Case(((3, 40),), True, BF16, HEADS, SIZES, window=9),
    "rows": Case(((33, 20),), True, BF16, HEADS, SIZES),
    "odd-pages": Case(((3, 20),), True, BF16, HEADS, SIZES, block_size=24),
    "head-size": Case(((3, 20),), True, BF16, HEADS, (64, 64)),
    "float32": Case(((3, 20),), True, torch.float32, HEADS, SIZES),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_calls_have_another_kernel(
    name: str, launches: list[Any], device: torch.device
) -> None:
    call = make_call(OTHERS[name], device)
    module.attend(*call.args, **call.options, num_splits=1)
    assert launches == []


def test_few_rows_of_a_batch_have_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend_wide, "_is_able", lambda: True)
    cache = torch.empty(40, 16, 2, 128, dtype=BF16)
    table = torch.zeros(2, 20, dtype=torch.int32)
    with even_tokens():
        for tokens, rows in ((4, None), (5, 64), (16, 64), (17, 128), (32, 128), (33, None)):
            found = find(cache.new_empty(8, 2 * tokens, 128), cache, table)
            assert (None if found is None else found.block_m) == rows


def test_few_rows_over_few_keys_have_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend_wide, "_is_able", lambda: True)
    cache = torch.empty(100, 16, 2, 128, dtype=BF16)
    # heads of a KV head, tokens, pages; five heads are padded to eight by the kernel of few rows
    for group, tokens, pages, rows in (
        (4, 8, 96, None), (4, 8, 97, 64), (4, 9, 96, 64), (4, 5, 97, 64), (4, 5, 3, None),
        (5, 4, 96, None), (5, 5, 96, 64), (5, 6, 97, 64),
    ):  # fmt: skip
        table = torch.zeros(1, pages, dtype=torch.int32)
        found = find(cache.new_empty(2 * group, tokens, 128), cache, table)
        assert (None if found is None else found.block_m) == rows


def test_splits() -> None:
    """One wave of one sequence and of short caches, two of long ones."""

    def splits(batch: int, capacity: int) -> int:
        return attend_wide.splits_of(8 * batch, batch, 132, capacity)

    assert [splits(1, capacity) for capacity in (1 << 10, 1 << 15)] == [16, 16]
    assert [splits(batch, 2048) for batch in (2, 8, 16, 24)] == [8, 2, 1, 1]
    assert [splits(batch, 2049) for batch in (2, 8, 16, 24, 32, 33)] == [16, 4, 2, 2, 2, 1]

    def plan(batch: int, capacity: int, num_splits: int | None = None) -> tuple[int, int]:
        c = attend_wide.WideConfig(128)
        return attend_wide.plan_splits(c, 8 * batch, batch, 132, capacity, num_splits)

    # what sequences share, and what one may have
    assert [plan(batch, SHORT_ROWS) for batch in (1, 8)] == [(16, 0), (2, 0)]
    assert [plan(batch, 1 << 15) for batch in (1, 8, 16, 33)] == [
        (16, 0), (16, 32), (8, 32), (4, 33),
    ]  # fmt: skip
    assert plan(8, 1 << 15, 3) == (3, 0)


@pytest.mark.parametrize("is_tree", [True, False])
def test_bad_data_stays_inside(is_tree: bool, launches: list[Any], device: torch.device) -> None:
    run_broken(make_call(Case(((4, 90),), True, BF16, HEADS, SIZES), device), is_tree)
    assert len(launches) == 5


def test_codes_are_not_taken() -> None:
    q = torch.empty(8, 24, 128, dtype=torch.bfloat16)
    table = torch.zeros(1, 200, dtype=torch.int32)
    cache = torch.empty(200, 16, 2, 128, dtype=torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attend_wide, "_is_able", lambda: True)
        assert find(q, cache, table) is not None
        assert find(q, cache.view(torch.int8)[..., : 128 + SCALE_BYTES], table) is None
