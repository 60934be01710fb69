from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.tiers import checkered, every, keep_default, only

ROOT = Path(__file__).parents[1]


def is_slow(case):
    return any(mark.name == "slow" for mark in case.marks)


def test_each_step_th_stays_and_none_is_lost():
    cases = every(3, [1, (2, "b"), pytest.param(3, id="three"), 4, 5], first=1)
    assert [case.values for case in cases] == [(1,), (2, "b"), (3,), (4,), (5,)]
    assert [is_slow(case) for case in cases] == [True, False, True, True, False]
    assert cases[2].id == "three"


def test_slow_cases_are_not_counted():
    slow = pytest.param(0, marks=pytest.mark.slow)
    cases = every(2, [slow, 1, slow, 2, 3])
    assert [case.values[0] for case in cases if not is_slow(case)] == [1, 3]


def test_marks_stay():
    (case,) = every(2, [pytest.param(1, marks=[pytest.mark.slow, pytest.mark.skip])])
    assert [mark.name for mark in case.marks] == ["slow", "skip"]


@pytest.mark.parametrize(("step", "first"), [(1, 0), (2, 2), (2, -1)])
def test_a_step_that_keeps_all_or_none_is_refused(step, first):
    with pytest.raises(ValueError, match="needed 2 or more"):
        every(step, [1], first)


def test_those_that_are_named_stay_and_none_is_lost():
    slow = pytest.param("d", 4, marks=pytest.mark.slow)
    cases = only(("a", "third", 2), [("a", 1), ("b", 2), pytest.param("c", 3, id="third"), slow, 2])
    assert [case.values for case in cases] == [("a", 1), ("b", 2), ("c", 3), ("d", 4), (2,)]
    assert [is_slow(case) for case in cases] == [False, True, False, True, False]
    assert [mark.name for mark in cases[3].marks] == ["slow"]


def test_a_case_that_is_slow_stays_slow():
    (case,) = only((1,), [pytest.param(1, marks=pytest.mark.slow)])
    assert is_slow(case)


@pytest.mark.parametrize("name", ["c", 1, True])
def test_a_name_of_no_case_is_refused(name):
    with pytest.raises(ValueError, match="needed cases of that name or value"):
        only((name,), [("a", 1), 2])


def test_of_a_board_every_other_case_stays_and_none_is_lost():
    cases = checkered([pytest.param(1, 2, id="a"), 3], ["x", None, "z"])
    assert [case.values for case in cases] == [
        (1, 2, "x"), (1, 2, None), (1, 2, "z"), (3, "x"), (3, None), (3, "z"),
    ]  # fmt: skip
    assert [case.id for case in cases] == ["a-x", "a-None", "a-z", "3-x", "3-None", "3-z"]
    assert [is_slow(case) for case in cases] == [False, True, False, True, False, True]
    others = checkered([1, 2], [3, 4], first=1)
    assert [is_slow(case) for case in others] == [True, False, False, True]


def test_marks_of_both_sides_stay():
    row, column = pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.skip)
    case, *_ = checkered([row, 3], [column, 4])
    assert [mark.name for mark in case.marks] == ["slow", "skip"]


def test_boards_that_are_too_small():
    for given in (([1], [2, 3]), ([1, 2], [3]), ([1, 2], [3, 4], 2)):
        with pytest.raises(ValueError, match="needed two or more"):
            checkered(*given)


@pytest.mark.parametrize("row", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("column", ["a", "b"])
@pytest.mark.default("a-1", "a-2")
def test_cases_that_are_not_named_are_slow(request, row, column):
    marks = [mark.name for mark in request.node.iter_markers()]
    assert ("slow" in marks) == (column == "b" or row == 2)


def test_a_case_that_is_not_there_cannot_be_default():
    marks = [pytest.mark.default("a", "c").mark]
    case = SimpleNamespace(callspec=SimpleNamespace(id="a"), iter_markers=lambda name: marks)
    with pytest.raises(ValueError, match=r"default \['c'\]: needed cases of \['a'\]"):
        keep_default([case])
