"""A run of all tests in parts: `make test-full PART=K/N`, for K of 1 to N in any order.

A part holds whole files, whose fixtures are made once. Files that take long by
`tests/file_seconds.json` are dealt first, so that parts take about as long as each other as far as
that table, which is of the default tier, can say.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any


def parse_part(text: str) -> tuple[int, int]:
    """(K, N) of "K/N", 1 ≤ K ≤ N.

    Raises:
        ValueError: it is something else.
    """
    found = re.fullmatch(r"([1-9][0-9]*)/([1-9][0-9]*)", text, re.ASCII)
    if found is None or int(found[1]) > int(found[2]):
        raise ValueError(f"{text!r} is no part: K/N with K of 1 to N, as 2/8")
    return int(found[1]), int(found[2])


def part_of_files(
    files: Iterable[str], seconds: dict[str, float], num_parts: int
) -> dict[str, int]:
    """File → its part, 1 to `num_parts`; every file of the suite has to be among them."""
    ordered = sorted(set(files), key=lambda file: (-seconds.get(file, 0.0), file))
    return {file: 1 + i % num_parts for i, file in enumerate(ordered)}


def divide(
    tests: Sequence[Any], part: str, seconds: dict[str, float]
) -> tuple[list[Any], list[Any]]:
    """Tests of the part, and the others, each in their order.

    Args:
        tests: all that pytest has collected, with a `nodeid` each.
        seconds: file → seconds of its tests, of those that take long.
    """
    k, num_parts = parse_part(part)
    parts = part_of_files((_file(test) for test in tests), seconds, num_parts)
    mine = [test for test in tests if parts[_file(test)] == k]
    return mine, [test for test in tests if parts[_file(test)] != k]


def _file(test: Any) -> str:
    nodeid: str = test.nodeid
    return nodeid.partition("::")[0]
