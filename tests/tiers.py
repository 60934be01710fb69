"""Which cases of a product run every time, and which in the slow tier alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def every(step: int, cases: Iterable[Any], first: int = 0) -> list[ParameterSet]:
    """All cases; of those that are in the default tier, every `step`-th stays there.

    Args:
        step: 2 or more.
        cases: parameters, or what `pytest.param` makes; their ids and marks stay.
        first: number of the first that stays, below `step`.
    """
    if not (step >= 2 and 0 <= first < step):
        raise ValueError(f"every {step} from {first}: needed 2 or more, from a number below it")
    thinned, number = [], 0
    for case in cases:
        if not isinstance(case, ParameterSet):
            case = pytest.param(*case) if isinstance(case, tuple) else pytest.param(case)
        if not any(mark.name == "slow" for mark in case.marks):
            if number % step != first:
                case = case._replace(marks=(*case.marks, pytest.mark.slow))
            number += 1
        thinned.append(case)
    return thinned
