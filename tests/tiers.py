"""Which cases of a product run every time, and which in the slow tier alone.

The functions below make parameters. `@pytest.mark.default("id", …)` names cases by their whole ids,
of all parameters of a test together: the other ones are slow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def keep_default(tests: Sequence[Any]) -> None:
    """Mark cases of one test function as slow that its mark `default` does not name.

    Raises:
        ValueError: the mark names a case that there is not.
    """
    mark = next((mark for test in tests for mark in test.iter_markers("default")), None)
    if mark is None:
        return
    cases = {test.callspec.id: test for test in tests if hasattr(test, "callspec")}
    if absent := set(mark.args) - cases.keys():
        raise ValueError(f"default {sorted(absent)}: needed cases of {sorted(cases)}")
    for name, test in cases.items():
        if name not in mark.args:
            test.add_marker(pytest.mark.slow)


def every(step: int, cases: Iterable[Any], first: int = 0) -> list[Any]:
    """All cases; of those that are in the default tier, every `step`-th stays there.

    Args:
        step: 2 or more.
        cases: parameters, or what `pytest.param` makes; their ids and marks stay.
        first: number of the first that stays, below `step`.
    """
    if not (step >= 2 and 0 <= first < step):
        raise ValueError(f"every {step} from {first}: needed 2 or more, from a number below it")
    thinned, number = [], 0
    for case in map(_as_set, cases):
        if not any(mark.name == "slow" for mark in case.marks):
            if number % step != first:
                case = _slow(case)
            number += 1
        thinned.append(case)
    return thinned


def only(kept: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """All cases; in the default tier are those alone that `kept` names, and the others are slow.

    Args:
        kept: ids of cases, or what cases begin with (their only value, or their first one).
        cases: parameters, or what `pytest.param` makes; their ids and marks stay.
    """
    kept, found, sets = list(kept), [], []
    for case in map(_as_set, cases):
        names = [
            name for name in kept if _is_equal(name, case.id) or _is_equal(name, case.values[0])
        ]
        found += names
        if not names and not any(mark.name == "slow" for mark in case.marks):
            case = _slow(case)
        sets.append(case)
    if absent := [name for name in kept if not any(name is x for x in found)]:
        raise ValueError(f"only {absent}: needed cases of that name or value")
    return sets


def checkered(rows: Iterable[Any], columns: Iterable[Any], first: int = 0) -> list[Any]:
    """The product of two sets of cases: in the default tier is every other one, as on a board.

    Every case of either set stays with about half of the other's.

    Args:
        rows: parameters, or what `pytest.param` makes; their marks stay.
        columns: likewise; ids are those of both with a dash between them.
        first: 0 or 1: which of the first row's cases is the first that stays.
    """
    rows, columns, made = [*map(_as_set, rows)], [*map(_as_set, columns)], []
    if min(len(rows), len(columns)) < 2 or first not in (0, 1):
        raise ValueError(f"{len(rows)} by {len(columns)} from {first}: needed two or more of each")
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            case = pytest.param(
                *row.values, *column.values,
                id=f"{_name(row)}-{_name(column)}",
                marks=(*row.marks, *column.marks),
            )  # fmt: skip
            is_slow = any(mark.name == "slow" for mark in case.marks)
            if (i + j) % 2 != first and not is_slow:
                case = _slow(case)
            made.append(case)
    return made


def _name(case: Any) -> str:
    if case.id is not None:
        return str(case.id)
    return "-".join(str(getattr(value, "name", value)) for value in case.values)


def _slow(case: Any) -> Any:
    return pytest.param(*case.values, id=case.id, marks=(*case.marks, pytest.mark.slow))


def _as_set(case: Any) -> Any:
    if hasattr(case, "values") and hasattr(case, "marks"):
        return case
    return pytest.param(*case) if isinstance(case, tuple) else pytest.param(case)


def _is_equal(name: Any, value: Any) -> bool:
    return type(name) is type(value) and bool(name == value)
