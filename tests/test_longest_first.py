"""The order of files in `make test`, and the number of its workers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.longest_first import ROOT, longest_first, measured, read_table
from tests.workers import num_workers

GB = 10**9


def test_long_files_come_first_and_tests_keep_their_order() -> None:
    ids = ["a::1", "b::1", "a::2", "c::X::1", "d::1", "c::2"]
    tests = [SimpleNamespace(nodeid=name) for name in ids]
    found = [test.nodeid for test in longest_first(tests, {"c": 9.0, "b": 3.5, "gone": 99.0})]
    assert found == ["c::X::1", "c::2", "b::1", "a::1", "a::2", "d::1"]


def test_a_report_becomes_a_table(tmp_path: Path) -> None:
    cases = [
        ("tests.test_kept", 2.5), ("tests.test_kept", 3.0), ("tests.test_cycles", 1.9),
        ("tests.specc.compiler.test_backend.TestOpen", 7.0), ("tests.gone", 50.0),
    ]  # fmt: skip
    lines = [f'<testcase classname="{name}" name="x" time="{s}"/>' for name, s in cases]
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites><testsuite>{''.join(lines)}</testsuite></testsuites>")
    assert measured([report]) == {
        "tests/specc/compiler/test_backend.py": 7.0,
        "tests/test_kept.py": 5.5,
    }


def test_the_table_is_of_files_that_are_there() -> None:
    table = read_table()
    assert [file for file in table if not (ROOT / file).is_file()] == []
    assert list(table.values()) == sorted(table.values(), reverse=True)


@pytest.mark.parametrize(
    ("cores", "memory", "workers"),
    [
        (1, 64 * GB, 2), (2, 64 * GB, 2), (4, 25 * GB, 4), (8, 25 * GB, 7), (64, 256 * GB, 8),
        (8, 4 * GB, 2), (6, None, 6),
    ],
)  # fmt: skip
def test_workers_are_as_many_as_cores_and_memory_hold(
    cores: int, memory: int | None, workers: int
) -> None:
    assert num_workers(cores, memory) == workers
