"""Which tests a part of `make test-full` has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.parts import divide, parse_part

ROOT = Path(__file__).resolve().parents[1]


def test_every_test_is_in_one_part_and_files_stay_whole() -> None:
    ids = ["a::1", "b::1", "a::2", "c::X::1", "d::1", "c::2", "e::1"]
    tests = [SimpleNamespace(nodeid=name) for name in ids]
    seconds = {"d": 9.0, "b": 3.5, "gone": 99.0}
    found = []
    for part in ("1/3", "2/3", "3/3"):
        mine, others = divide(tests, part, seconds)
        found.append([test.nodeid for test in mine])
        assert sorted([test.nodeid for test in mine + others]) == sorted(ids)
    # the two that take long are in parts of their own; the order in a part is pytest's
    assert found == [["c::X::1", "d::1", "c::2"], ["b::1", "e::1"], ["a::1", "a::2"]]
    assert [test.nodeid for test in divide(tests, "1/1", seconds)[0]] == ids


@pytest.mark.parametrize("text", ["", "2", "0/3", "4/3", "1/0", "1/3 ", "-1/3", "1/3/3", "a/b"])
def test_what_is_no_part(text: str) -> None:
    with pytest.raises(ValueError, match="is no part: K/N"):
        parse_part(text)


# it collects all tests twice
@pytest.mark.slow
def test_pytest_takes_a_part() -> None:
    files = ["tests/test_parts.py", "tests/test_longest_first.py"]
    lists = []
    for part in ("1/2", "2/2"):
        done = _collect(part, files)
        assert done.returncode == 0, done.stderr
        lists.append([file for file in files if file + ":" in done.stdout])
    assert sorted(lists[0] + lists[1]) == sorted(files)
    assert len(lists[0]) == 1
    done = _collect("3/2", files)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--part '3/2' is no part" in done.stderr


def _collect(part: str, files: list[str]) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("pytest")), "--collect-only", "--part", part]
    return subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True)
