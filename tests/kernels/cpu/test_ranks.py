"""Collectives of processes, over shared memory and over TCP, against the lockstep group."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specc.kernels.reference.ranks import LockstepGroup
from specc.runtime.ranks.group import SharedGroup
from tests.rank_processes import rank_processes, run_ranks
from tests.tiers import only

pytestmark = pytest.mark.usefixtures("native_operators")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# elements: around a cache line, a block of a sum, 64 KB of each dtype, and several slots
SIZES = (0, 1, 2, 3, 15, 17, 31, 1023, 1025, 16384, 16385, 32768, 32771, 70001)
TRANSPORTS = ("shared", "sockets")


def values_of(rank: int, size: int, dtype: torch.dtype, salt: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    return torch.randn(size, generator=generator).to(dtype)


def specc_cpu() -> Any:
    return torch.ops.specc_cpu


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def sums(group: SharedGroup) -> list[str]:
    """Sizes and dtypes whose sum has other bits than the oracle's."""
    wrong = []
    for salt, size in enumerate(SIZES):
        for dtype in DTYPES:
            xs = [values_of(rank, size, dtype, salt) for rank in range(group.size)]
            before = xs[group.rank].clone()
            got = specc_cpu().all_reduce(xs[group.rank])
            expected = LockstepGroup(group.size).all_reduce(xs)[group.rank]
            assert got.dtype == dtype
            assert torch.equal(xs[group.rank], before)
            if not torch.equal(bits(got), bits(expected)):
                wrong.append(f"{dtype} [{size}]")
    return wrong


@pytest.mark.parametrize("slot_bytes", [4096, 96 << 10], ids=["small-slots", "large-slots"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_sums_are_the_oracles(num_ranks, slot_bytes):
    assert run_ranks(num_ranks, sums, slot_bytes=slot_bytes) == [[]] * num_ranks


@pytest.mark.parametrize(
    "num_ranks",
    [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)],
)
def test_sums_over_sockets_are_the_oracles(num_ranks):
    assert run_ranks(num_ranks, sums, transport="sockets") == [[]] * num_ranks


def cancel(group: SharedGroup) -> list[float]:
    # only in the order of ranks is the sum 3: elsewhere a 1 or a 2 is lost beside 1e8
    value = (1e8, -1e8, 1.0, 2.0)[group.rank]
    sizes = (1, 100, 40000)
    return [float(x) for n in sizes for x in specc_cpu().all_reduce(torch.full((n,), value))[:1]]


def mix(group: SharedGroup) -> tuple[bool, float]:
    """Whether the sums of random floats are those of the order; the share that others change."""
    xs = [values_of(rank, 40000, torch.float32) for rank in range(group.size)]
    right = xs[0] + xs[1] + xs[2] + xs[3]
    rotated = xs[1] + xs[2] + xs[3] + xs[0]
    is_right = all(
        torch.equal(specc_cpu().all_reduce(xs[group.rank][:n]), right[:n]) for n in (9000, 40000)
    )
    return is_right, float((right != rotated).float().mean())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_sums_are_in_the_order_of_ranks(transport):
    assert run_ranks(4, cancel, transport=transport) == [[3.0] * 3] * 4
    for is_right, share in run_ranks(4, mix, transport=transport):
        assert is_right
        assert share > 0.2  # or the order would not matter


def shapes(group: SharedGroup) -> None:
    """Results have the shape and the dtype of arguments, whatever their strides."""
    lockstep = LockstepGroup(group.size)
    xs = [values_of(rank, 2 * 3 * 4, torch.float32).view(2, 3, 4) for rank in range(group.size)]
    views = (
        lambda x: x, lambda x: x.permute(2, 0, 1), lambda x: x[:, :, 1], lambda x: x[0, 0, 0],
        lambda x: x[:, :0], lambda x: x[:1].expand(5, 3, 4),
    )  # fmt: skip
    for view in views:
        mine = [view(x) for x in xs]
        for name in ("all_reduce", "from_first"):
            got = getattr(specc_cpu(), name)(mine[group.rank])
            expected = getattr(lockstep, name)(mine)[group.rank]
            torch.testing.assert_close(got, expected, rtol=0, atol=0)
            assert got.is_contiguous()


def test_any_shape():
    run_ranks(2, shapes)


def gathers(group: SharedGroup) -> list[str]:
    wrong = []
    lockstep = LockstepGroup(group.size)
    for rows, columns in ((1, 1), (3, 5), (0, 4), (4, 0), (7, 1001), (33, 777)):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
            xs = [
                (values_of(rank, rows * columns, torch.float32) * 3).to(dtype).view(rows, columns)
                for rank in range(group.size)
            ]
            got = specc_cpu().gather_rows(xs[group.rank])
            if not torch.equal(got, lockstep.gather_rows(xs)[group.rank]):
                wrong.append(f"gather_rows {dtype} [{rows}, {columns}]")
            got = specc_cpu().from_first(xs[group.rank])
            if not torch.equal(got, xs[0]):
                wrong.append(f"from_first {dtype} [{rows}, {columns}]")
    return wrong


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_rows_and_what_rank_0_has(num_ranks, transport):
    options = {"slot_bytes": 4096} if transport == "shared" else {}
    assert run_ranks(num_ranks, gathers, transport=transport, **options) == [[]] * num_ranks


def best_tokens(group: SharedGroup) -> list[tuple[list[int], list[int]]]:
    """Tokens of scores with ties, infinities and NaN, and the oracle's."""
    nan, inf = float("nan"), float("inf")
    few = (nan, inf, -inf, 0.0, -0.0, 1.0, 1.5)
    answers = []
    for count in (0, 1, 9, 3000):
        scores, tokens = [], []
        for rank in range(group.size):
            generator = torch.Generator().manual_seed(count + rank)
            choice = torch.randint(len(few), (count,), generator=generator)
            scores.append(torch.tensor(few)[choice])
            tokens.append(torch.randint(100, (count,), generator=generator))
        got = specc_cpu().best_of_ranks(scores[group.rank], tokens[group.rank])
        expected = LockstepGroup(group.size).best_of_ranks(scores, tokens)[group.rank]
        answers.append((got.tolist(), expected.tolist()))
    return answers


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_the_best_of_ranks(num_ranks, transport):
    options = {"slot_bytes": 4096} if transport == "shared" else {}
    for answers in run_ranks(num_ranks, best_tokens, transport=transport, **options):
        for got, expected in answers:
            assert got == expected


def test_the_oracle_takes_the_smaller_token_of_equal_scores():
    nan = float("nan")
    scores = [torch.tensor([1.0, 1.0, 2.0, nan, 1.0, nan]), torch.tensor([1, 1, 1, 1, nan, nan])]
    tokens = [torch.tensor([7, 3, 9, 9, 1, 8]), torch.tensor([4, 5, 1, 1, 9, 6])]
    for best in LockstepGroup(2).best_of_ranks(scores, tokens):
        assert best.tolist() == [4, 3, 9, 9, 9, 6]


def wait_with_a_thread(group: SharedGroup) -> tuple[float, int, list[float]]:
    """Seconds in a collective that others come to late, and how far another thread got meanwhile.

    One of Python's threads can do nothing while another one holds the interpreter.
    """
    count = 0
    is_over = threading.Event()

    def work() -> None:
        nonlocal count
        while not is_over.is_set():
            count += 1
            time.sleep(0.001)

    thread = threading.Thread(target=work)
    if group.rank == 0:
        thread.start()
    else:
        time.sleep(0.7 * group.rank)
    begin = time.monotonic()
    total = specc_cpu().all_reduce(torch.full((3,), float(group.rank)))
    seconds = time.monotonic() - begin
    is_over.set()
    if group.rank == 0:
        thread.join()
    return seconds, count, total.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("transport", only(("shared",), TRANSPORTS))
def test_ranks_that_come_late(transport):
    answers = run_ranks(3, wait_with_a_thread, transport=transport)
    assert all(total == [3.0] * 3 for _, _, total in answers)
    seconds, count, _ = answers[0]
    assert seconds > 0.5
    assert count > 20


def resident_bytes() -> int:
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(text.split("VmRSS:")[1].split()[0])


def call_often(group: SharedGroup, num_calls: int) -> tuple[int, int, int, int]:
    """Calls with a wrong sum, growth of memory in bytes, descriptors, and the group's count.

    The sizes change, and so does what is added, so that what is left of a turn before shows.
    """
    wrong = 0
    before = descriptors = 0
    for i in range(num_calls):
        if i == num_calls // 5:
            before, descriptors = resident_bytes(), len(list(Path("/proc/self/fd").iterdir()))
        size = (1, 700, 5000, 12000)[i % 4]
        value = float(i % 1000 + group.rank)
        total = specc_cpu().all_reduce(torch.full((size,), value))
        expected = sum(i % 1000 + rank for rank in range(group.size))
        wrong += not bool((total == expected).all())
    growth = resident_bytes() - before
    descriptors = len(list(Path("/proc/self/fd").iterdir())) - descriptors
    return wrong, growth, descriptors, group.position


@pytest.mark.parametrize(
    ("transport", "num_ranks", "num_calls"),
    [("shared", 3, 5_000), pytest.param("sockets", 2, 1_000, marks=pytest.mark.slow)],
    ids=TRANSPORTS,
)
def test_many_calls(transport, num_ranks, num_calls):
    options = {"slot_bytes": 64 << 10} if transport == "shared" else {}
    answers = run_ranks(num_ranks, call_often, num_calls, transport=transport, **options)
    for wrong, growth, descriptors, position in answers:
        assert wrong == 0
        assert growth < 2 << 20
        assert descriptors == 0
        assert position == num_calls


def add_constants(group: SharedGroup, value: float) -> float:
    for _ in range(2000):
        total = specc_cpu().all_reduce(torch.full((64,), value))
    return float(total[0])


def test_two_groups_at_a_time():
    with rank_processes(2, add_constants, 1.0) as one, rank_processes(2, add_constants, 5.0) as two:
        assert one.results() == [2.0, 2.0]
        assert two.results() == [10.0, 10.0]


def test_a_process_that_is_no_rank(native_operators):
    x = torch.zeros(2, 3)
    calls = {
        "all_reduce": (x,), "gather_rows": (x,), "from_first": (x,),
        "best_of_ranks": (x, x.long()),
    }  # fmt: skip
    for namespace in (native_operators, torch.ops.specc):
        for name, arguments in calls.items():
            with pytest.raises(Exception, match="found:  a collective in a process that is no"):
                getattr(namespace, name)(*arguments)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("all_reduce", (torch.zeros(2, dtype=torch.float64),), "float32, bfloat16 and float16"),
        ("all_reduce", (torch.zeros(2, dtype=torch.int64),), "float32, bfloat16 and float16"),
        ("gather_rows", (torch.zeros(2),), r"x is \[R, C\]"),
        ("best_of_ranks", (torch.zeros(2), torch.zeros(2)), "token is int64"),
        ("best_of_ranks", (torch.zeros(2).half(), torch.zeros(2).long()), "score is float32"),
        ("best_of_ranks", (torch.zeros(2), torch.zeros(3).long()), "one shape"),
    ],
)
def test_what_is_refused(native_operators, name, arguments, message):
    group = SharedGroup.create(1)
    try:
        with pytest.raises(RuntimeError, match=message):
            getattr(native_operators, name)(*arguments)
        # before anything is said to other ranks
        assert group.position == 0
    finally:
        group.close()


def test_fakes_ask_for_no_group():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with FakeTensorMode(shape_env=ShapeEnv()):
        x = torch.zeros(5, 3, dtype=torch.bfloat16)
        for namespace in (torch.ops.specc, torch.ops.specc_cpu):
            for name in ("all_reduce", "from_first"):
                y = getattr(namespace, name)(x)
                assert (y.shape, y.dtype) == (x.shape, x.dtype)
            gathered = namespace.gather_rows(x)
            assert gathered.shape[0] == 5
            assert gathered.dtype == x.dtype
            best = namespace.best_of_ranks(x.float(), x.long())
            assert (best.shape, best.dtype) == (x.shape, torch.int64)
