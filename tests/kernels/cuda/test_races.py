"""Races between programs, planted in kernels, are found; what only looks like one is not."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder

from tests.kernels.cuda.byte_ranges import Ranges, first_conflict, merged
from tests.kernels.cuda.races import RaceError

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="compute-sanitizer looks at real devices"
)

I32 = torch.int32
BLOCK = 16


@triton.jit
def _total_kernel(values, total, IS_ATOMIC: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.sum(tl.load(values + o), 0)
    if IS_ATOMIC:
        tl.atomic_add(total, part, sem="relaxed")
    else:
        tl.store(total, tl.load(total) + part)


@pytest.mark.parametrize("is_atomic", [False, True], ids=["missing-atomic", "atomic"])
def test_a_missing_atomic(is_atomic):
    values, total = torch.arange(4 * BLOCK, dtype=I32), torch.zeros(1, dtype=I32)

    def run():
        _total_kernel[(4,)](values, total, is_atomic, BLOCK)

    if is_atomic:
        run()
        assert total == values.sum()
        return
    with pytest.raises(RaceError, match=r"_total_kernel, grid \(4, 1, 1\).* element 0 of total"):
        run()


def test_one_program_races_with_nobody():
    values, total = torch.ones(BLOCK, dtype=I32), torch.zeros(1, dtype=I32)
    _total_kernel[(1,)](values, total, False, BLOCK)
    assert total == BLOCK


@triton.jit
def _rows_kernel(out, row_stride, last, value, BLOCK: tl.constexpr):
    i = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    o = tl.arange(0, BLOCK)
    tl.store(out + i * row_stride + o, value + i * 0, mask=o < last)


@pytest.mark.parametrize(
    ("row_stride", "last", "is_race"),
    [
        (BLOCK, BLOCK, False),
        (BLOCK - 1, BLOCK, True),
        (BLOCK - 1, BLOCK - 1, False),
        (BLOCK // 2, BLOCK // 2 + 1, True),
        (0, 1, True),
    ],
    ids=["rows", "overlap-by-1", "masked", "masked-but-1", "same-place"],
)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grid", [(6,), (2, 3)], ids=["grid6", "grid2x3"])
def test_overlapping_rows(row_stride, last, is_race, dtype, grid):
    """All programs write one value: equal in this test, and still two writes of a byte."""
    out = torch.zeros(8 * BLOCK, dtype=dtype)
    if is_race:
        with pytest.raises(RaceError, match=r"writes and program \(\d, \d, 0\) writes element"):
            _rows_kernel[grid](out, row_stride, last, 3, BLOCK)
    else:
        _rows_kernel[grid](out, row_stride, last, 3, BLOCK)
        assert int((out == 3).sum()) == 6 * last


@triton.jit
def _neighbor_kernel(data, out, distance, count):
    i = tl.program_id(0)
    tl.store(out + i, tl.load(data + (i + distance) % count) + 1)


@pytest.mark.parametrize("distance", [0, 1, 5], ids="distance{}".format)
def test_a_read_of_what_another_program_writes(distance):
    data, out = torch.arange(7, dtype=I32), torch.zeros(7, dtype=I32)
    _neighbor_kernel[(7,)](data, out, distance, 7)
    assert out.tolist() == (data.roll(-distance) + 1).tolist()
    if distance == 0:
        _neighbor_kernel[(7,)](out, out, distance, 7)
        return
    with pytest.raises(RaceError, match=r"writes and program .* reads element"):
        _neighbor_kernel[(7,)](out, out, distance, 7)


@triton.jit
def _bytes_kernel(words, bytes_, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    if tl.program_id(0) == 0:
        tl.store(words + o, 1)
    else:
        tl.store(bytes_ + tl.program_id(0), tl.cast(1, tl.int8))


@pytest.mark.parametrize(("at", "is_race"), [(4 * BLOCK, False), (4 * BLOCK - 1, True)])
def test_bytes_of_wider_elements(at, is_race):
    """One program writes words, another a byte: the last one of the words, or the next."""
    memory = torch.zeros(8 * BLOCK, dtype=torch.int8)
    arguments = (memory.view(I32), memory[at - 1 :], BLOCK)
    if is_race:
        with pytest.raises(RaceError, match="writes element"):
            _bytes_kernel[(2,)](*arguments)
    else:
        _bytes_kernel[(2,)](*arguments)


def test_the_order_of_programs_is_shuffled_and_complete(monkeypatch):
    ran = []
    place = InterpreterBuilder.set_grid_idx

    def note(self, x, y, z):
        place(self, x, y, z)
        ran.append(self.grid_idx)

    monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", note)
    orders = []
    for _ in range(2):
        _rows_kernel[(4, 3)](torch.zeros(12, dtype=I32), 1, 1, 3, BLOCK)
        orders.append(ran.copy())
        ran.clear()
    everything = [(x, y, 0) for x in range(4) for y in range(3)]
    assert [sorted(order) for order in orders] == [everything] * 2
    assert everything != orders[0] != orders[1]


@triton.jit
def _last_arrival_kernel(
    values, partial, arrived, out, SEM: tl.constexpr, SCOPE: tl.constexpr, IS_SURE: tl.constexpr,
    NUM: tl.constexpr,
):  # fmt: skip
    """Sum by the last program to arrive; unless IS_SURE, by the one with the highest number."""
    i = tl.program_id(0)
    tl.store(partial + i, tl.load(values + i) * 2)
    num_before = tl.atomic_add(arrived, 1, sem=SEM, scope=SCOPE)
    is_last = i == NUM - 1
    if IS_SURE:
        is_last = num_before == NUM - 1
    if is_last:
        tl.store(out, tl.sum(tl.load(partial + tl.arange(0, NUM)), 0))


@pytest.mark.parametrize(
    ("semantic", "scope", "is_sure", "found"),
    [
        ("acq_rel", "gpu", True, None),
        ("acq_rel", "sys", True, None),
        ("relaxed", "gpu", True, "partial"),
        ("acquire", "gpu", True, "partial"),
        ("release", "gpu", True, "partial"),
        ("acq_rel", "cta", True, "arrived"),
        ("acq_rel", "gpu", False, "partial"),
    ],
)
def test_the_last_to_arrive_reads_what_others_released(semantic, scope, is_sure, found):
    """Both orders run: in one of them the program that only happens to be last is not."""
    values = torch.arange(8, dtype=I32)
    partial, out = torch.zeros(8, dtype=I32), torch.zeros(1, dtype=I32)
    arguments = (values, partial, torch.zeros(1, dtype=I32), out, semantic, scope, is_sure, 8)
    if found is None:
        _last_arrival_kernel[(8,)](*arguments)
        assert out == 56
        return
    with pytest.raises(RaceError, match=rf"element \d of {found}"):
        _last_arrival_kernel[(8,)](*arguments)


@triton.jit
def _chain_kernel(flags, data, out, SEM: tl.constexpr):
    """Program 2 reads what 0 wrote, and knows of it by way of 1."""
    i = tl.program_id(0)
    tl.store(data + i, i + 1)
    is_known = i == 0
    if i > 0:
        is_known = tl.atomic_add(flags + i - 1, 0, sem="acquire") > 0
    tl.atomic_add(flags + i, is_known.to(tl.int32), sem=SEM)
    if is_known & (i == 2):
        tl.store(out, tl.load(data))


@pytest.mark.parametrize(
    ("semantic", "found"), [("release", "the opposite order"), ("relaxed", "element 0 of data")]
)
def test_what_is_known_is_passed_on(semantic, found, monkeypatch):
    """With releases, all that can be said against it is that it depends on the order."""
    monkeypatch.setattr(random.Random, "shuffle", lambda self, order: None)
    flags, data, out = (torch.zeros(3, dtype=I32) for _ in range(3))
    with pytest.raises(RaceError, match=found):
        _chain_kernel[(3,)](flags, data, out, semantic)


@triton.jit
def _late_kernel(flag, data, out, IS_EARLY: tl.constexpr):
    """Program 0 says that its data is there: before it is, or after."""
    if tl.program_id(0) == 0:
        if IS_EARLY:
            tl.atomic_add(flag, 1)
        tl.store(data, 5)
        if not IS_EARLY:
            tl.atomic_add(flag, 1)
    else:
        if tl.atomic_add(flag, 0) > 0:
            tl.store(out, tl.load(data))


@pytest.mark.parametrize(
    ("is_early", "found"), [(True, "element 0 of data"), (False, "the opposite order")]
)
def test_what_follows_a_release_is_not_released(is_early, found, monkeypatch):
    monkeypatch.setattr(random.Random, "shuffle", lambda self, order: None)
    flag, data, out = (torch.zeros(1, dtype=I32) for _ in range(3))
    with pytest.raises(RaceError, match=found):
        _late_kernel[(2,)](flag, data, out, is_early)


@triton.jit
def _count_kernel(count, out):
    tl.atomic_add(count, 1)
    tl.store(out + tl.program_id(0), tl.load(count) * 0)


def test_a_plain_read_of_what_others_update():
    with pytest.raises(RaceError, match=r"updates atomically and program .* reads element 0"):
        _count_kernel[(4,)](torch.zeros(1, dtype=I32), torch.zeros(4, dtype=I32))


@triton.jit
def _queue_kernel(next_place, out):
    place = tl.atomic_add(next_place, 1)
    tl.store(out + place, tl.program_id(0))


def test_a_result_that_depends_on_which_comes_first():
    with pytest.raises(RaceError, match="other results where its programs run in the opposite"):
        _queue_kernel[(5,)](torch.zeros(1, dtype=I32), torch.zeros(5, dtype=I32))


@triton.jit
def _copy_kernel(x, out, first, count, BLOCK: tl.constexpr):
    o = first + tl.arange(0, BLOCK)
    tl.store(out + tl.arange(0, BLOCK), tl.load(x + o, mask=o < count, other=0))


@pytest.mark.parametrize(("first", "count"), [(0, BLOCK + 1), (-1, BLOCK), (BLOCK, BLOCK + 1)])
def test_reads_outside_of_the_tensors(first, count):
    x, out = torch.ones(BLOCK, dtype=I32), torch.zeros(2 * BLOCK, dtype=I32)
    _copy_kernel[(1,)](x, out, 0, BLOCK, 2 * BLOCK)
    with pytest.raises(RaceError, match=r"reads 0x[0-9a-f]+, beside element -?\d+ of x"):
        _copy_kernel[(1,)](x, out, first, count, 2 * BLOCK)


@triton.jit
def _integer_mask_kernel(x, out, count, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    m_o = (o < count) & (count >= 0)
    tl.store(out + o, tl.load(x + o, mask=m_o, other=7), mask=o < 2 * count)


def test_masks_that_the_interpreter_holds_as_integers():
    """A comparison of scalars and one of blocks: as an index, its 0 and 1 would be places."""
    x, out = torch.ones(1, dtype=I32), torch.zeros(2, dtype=I32)
    _integer_mask_kernel[(1,)](x, out, 1, BLOCK)
    assert out.tolist() == [1, 7]


def bounds_of(*pairs: tuple[int, int]) -> np.ndarray:
    return np.array(pairs, dtype=np.uint64).reshape(-1, 2)


@pytest.mark.parametrize("seed", range(40))
def test_conflicts_are_those_of_sets_of_bytes(seed):
    chooser = random.Random(seed)
    groups = np.array([chooser.randrange(3) for _ in range(5)])
    excused = {(chooser.randrange(5), chooser.randrange(5)) for _ in range(chooser.randrange(12))}
    sets, ranges = [], []
    for _ in range(2):
        owners = [
            merged(bounds_of(*((at, at + chooser.randrange(1, 6)) for at in places)))
            for places in (chooser.sample(range(60), chooser.randrange(3)) for _ in range(5))
        ]
        sets.append([{byte for a, b in one.tolist() for byte in range(a, b)} for one in owners])
        numbers = [np.full(len(one), i) for i, one in enumerate(owners)]
        ranges.append(Ranges(np.concatenate(owners), np.concatenate(numbers)))
    wanted = {
        (i, j, byte)
        for i, mine in enumerate(sets[0])
        for j, theirs in enumerate(sets[1])
        for byte in mine & theirs
        if groups[i] != groups[j] and (i, j) not in excused
    }
    found = first_conflict(*ranges, groups, lambda i, j: (i, j) not in excused)
    assert (found is None) == (not wanted)
    assert found is None or (found in wanted and found[2] == min(byte for *_, byte in wanted))


def test_ranges_are_merged_and_compared_with_spans():
    assert merged(bounds_of((5, 9), (0, 2), (2, 3), (6, 7), (9, 9))).tolist() == [[0, 3], [5, 9]]
    spans = bounds_of((0, 3), (5, 9))
    owners = np.zeros(1, dtype=np.int64)
    for pair, is_inside in (((0, 3), True), ((2, 4), False), ((3, 5), False), ((8, 9), True)):
        found = Ranges(bounds_of(pair), owners).outside_of(spans)
        assert (found is None) == is_inside
    assert Ranges(bounds_of((1, 2)), owners).outside_of(bounds_of()) == 0
