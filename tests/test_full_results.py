"""The JSON of a whole run, of a suite with one test of every outcome."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.full_results import ROOT, summary

SUITE = """
import pytest

@pytest.fixture
def broken():
    raise OSError("no such disk")

@pytest.fixture
def left_open():
    yield
    raise OSError("still open")

def test_fine(): pass
class TestMore:
    @pytest.mark.parametrize("x", [1, 2, 3])
    def test_some(self, x): assert x != 2, "two is wrong"
def test_error(broken): pass
def test_error_after(left_open): pass
def test_failure_and_error(left_open): assert False, "first"
def test_skipped(): pytest.skip("no GPU")
@pytest.mark.skip(reason="no GPU")
def test_skipped_too(): pass
@pytest.mark.xfail(reason="known")
def test_expected(): assert False
@pytest.mark.xfail(strict=True)
def test_unexpected(): pass
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("suite")
    (directory / "test_suite.py").write_text(SUITE)
    command = [str(Path(sys.executable).with_name("pytest")), "-q", "-p", "no:cacheprovider"]
    command += ["--rootdir", str(directory), "--junitxml=report.xml", "test_suite.py"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    return directory / "report.xml"


def test_every_test_has_one_outcome(report: Path) -> None:
    found = summary(report)
    assert found["counts"] == {
        "passed": 3, "xfailed": 1, "skipped": 2, "errors": 2, "failed": 3,
    }  # fmt: skip
    # one that fails, and whose end fails, too, is named twice and counted once
    assert [(x["test"].split("::")[1], x["outcome"]) for x in found["failures"]] == [
        ("test_some[2]", "failed"),
        ("test_error", "errors"),
        ("test_error_after", "errors"),
        ("test_failure_and_error", "failed"),
        ("test_failure_and_error", "errors"),
        ("test_unexpected", "failed"),
    ]
    messages = [x["message"] for x in found["failures"]]
    assert "two is wrong" in messages[0]
    assert "no such disk" in messages[1]
    assert found["skips"] == {"no GPU": 2}
    assert 0 < found["seconds"] < 60
    assert found["started"][:2] == "20"


def test_the_command_writes_it_with_machine_and_versions(report: Path, tmp_path: Path) -> None:
    output = tmp_path / "new" / "results.json"
    command = [sys.executable, "-P", str(ROOT / "tests/full_results.py"), str(report), str(output)]
    command += ["--workers", "2"]
    environ = {**os.environ, "PYTEST_ARGS": "-k 'not slow'"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "3 passed, 1 xfailed, 2 skipped, 2 errors, 3 failed" in done.stdout
    written = json.loads(output.read_text())
    assert written["counts"] == summary(report)["counts"]
    assert written["command"].startswith("make test-full PYTEST_ARGS='-k ")
    assert written["workers"] == 2
    assert written["machine"]["cores"] >= 1
    assert written["versions"]["pytest"] == pytest.__version__


def test_a_run_that_came_to_no_test_has_no_result(tmp_path: Path) -> None:
    empty = tmp_path / "report.xml"
    for text in (None, "<testsuites", "<testsuites><testsuite/></testsuites>"):
        if text is not None:
            empty.write_text(text)
        with pytest.raises(ValueError, match=r"no (report|test)"):
            summary(empty)
    output = tmp_path / "results.json"
    command = [sys.executable, "-P", str(ROOT / "tests/full_results.py"), str(empty), str(output)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert not output.exists()
