import pytest

from tests.tiers import every


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
