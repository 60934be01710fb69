"""The JSON of a whole run, of a suite with one test of every outcome."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from tests.full_results import (
    ROOT,
    commit,
    earlier_parts,
    failed_files,
    summary,
    united,
    with_earlier,
)

SUITE = """
import time
import pytest

@pytest.fixture
def broken():
    raise OSError("no such disk")

@pytest.fixture
def left_open():
    yield
    raise OSError("still open")

# more than a tenth of a second, of which the seconds are told
def test_fine(): time.sleep(0.2)
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


def _write(report: Path, output: Path, *args: str, **environ: str) -> CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "tests.full_results", str(report), str(output), *args]
    # what chooses tests of this run says nothing of the report
    inherited = {key: value for key, value in os.environ.items() if key != "PYTEST_ARGS"}
    env = {**inherited, "PYTHONPATH": str(ROOT), **environ}
    return subprocess.run(command, env=env, cwd=output.parent, capture_output=True, text=True)


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
    assert 0.2 <= found["seconds"] < 60
    assert found["started"][:2] == "20"


def test_the_command_writes_it_with_machine_and_versions(report: Path, tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    done = _write(report, output, "--workers", "2", PYTEST_ARGS="-k 'not slow'")
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
    done = _write(empty, output)
    assert done.returncode == 1
    assert not output.exists()


def _part(passed: int, seconds: float, *failed: str) -> dict[str, Any]:
    counts = {"passed": passed, "xfailed": 0, "skipped": 1, "errors": 0, "failed": len(failed)}
    return {
        "started": f"2026-11-27T0{int(seconds)}:00:00",
        "seconds": seconds,
        "counts": counts,
        "failures": [{"test": test, "outcome": "failed", "message": ""} for test in failed],
        "skips": {"no GPU": 1},
        "longest_files": {f"tests/test_{passed}.py": seconds},
    }


def test_parts_become_one_result() -> None:
    found = united({"3/3": _part(5, 2.0, "z"), "1/3": _part(7, 3.5, "a")}, 3)
    assert found["counts"] == {"passed": 12, "xfailed": 0, "skipped": 2, "errors": 0, "failed": 2}
    assert [failure["test"] for failure in found["failures"]] == ["a", "z"]
    assert (found["started"], found["seconds"]) == ("2026-11-27T02:00:00", 5.5)
    assert found["longest_files"] == {"tests/test_7.py": 3.5, "tests/test_5.py": 2.0}
    assert (found["skips"], found["missing_parts"]) == ({"no GPU": 2}, [2])
    assert list(found["parts"]) == ["1/3", "3/3"]


def test_a_part_is_added_to_those_of_the_same_run_alone(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    head = {"command": "make test-full", "commit": "c0ffee", "is_changed": False, "workers": 2}
    head["versions"] = {"torch": "2.13.0"}
    assert earlier_parts(path, head, 3) == {}
    parts = {"1/3": _part(7, 3.5)}
    path.write_text(json.dumps(head | united(parts, 3)))
    assert earlier_parts(path, head | {"workers": 4}, 3) == parts
    assert earlier_parts(path, head, 4) == {}
    for other in (
        {"commit": "beef"}, {"is_changed": True}, {"command": "make test-full -k x"},
        {"versions": {"torch": "2.12.0"}},
    ):  # fmt: skip
        assert earlier_parts(path, head | other, 3) == {}
    # nor to results of changed files, to which other changes may have come since
    changed = head | {"is_changed": True}
    path.write_text(json.dumps(changed | united(parts, 3)))
    assert earlier_parts(path, changed, 3) == {}
    # a run in one piece has no parts, and neither have other files
    for text in (json.dumps(head | _part(7, 3.5)), "", "{", "[]", '{"parts": {"x": 1}}'):
        path.write_text(text)
        assert earlier_parts(path, head, 3) == {}


def test_the_command_adds_a_part(report: Path, tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    done = _write(report, output, "--part", "2/2")
    assert done.returncode == 0, done.stderr
    assert "3 failed, parts to run: 1 in" in done.stdout
    assert json.loads(output.read_text())["missing_parts"] == [1]
    assert [x.name for x in tmp_path.glob("results*")] == ["results.json"]
    # results of another run are not lost, and an empty file is none
    output.write_text("whole")
    done = _write(report, output, "--part", "1/2")
    assert "begins anew: results of another run are in " in done.stdout
    assert (tmp_path / "results-1.json").read_text() == "whole"
    output.write_text("")
    assert "anew" not in _write(report, output, "--part", "1/2").stdout
    done = _write(report, output, "--part", "3/2")
    assert "'3/2' is no part" in done.stderr


def test_a_file_of_results_in_the_checkout_is_no_change(tmp_path: Path) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    for name in ("code.py", "results.json"):
        (tmp_path / name).write_text("1")
    for args in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "all"]):
        subprocess.run([*git, *args], check=True)
    output = tmp_path / "results.json"
    output.write_text("2")
    assert commit(output, tmp_path)["is_changed"] is False
    assert commit(tmp_path / "other.json", tmp_path)["is_changed"] is True
    (tmp_path / "code.py").write_text("2")
    assert commit(output, tmp_path)["is_changed"] is True


@pytest.mark.slow
def test_files_that_failed_run_again(report: Path, tmp_path: Path) -> None:
    """A later run of them stands beside the failures; what other files did stays."""
    output = tmp_path / "results.json"
    again = tmp_path / "again.xml"
    case = '<testcase classname="{}" name="test_a" time="1">{}</testcase>'

    def write(path: Path, **outcomes: bool) -> None:
        """Outcomes of tests/test_KEY.py."""
        cases = (
            case.format(f"tests.test_{key}", "" if is_fine else '<failure message="no"/>')
            for key, is_fine in outcomes.items()
        )
        text = "".join(cases)
        path.write_text(f'<testsuites><testsuite time="1">{text}</testsuite></testsuites>')

    write(again, parts=False, kept=False, full_results=True)
    assert _write(again, output, "--part", "1/2").returncode == 0
    first = json.loads(output.read_text())
    assert failed_files(first) == ["tests/test_kept.py", "tests/test_parts.py"]
    # a run of some of them only says nothing of the others
    write(again, parts=True)
    done = _write(again, output, "--again")
    assert done.returncode == 1
    assert "no test of tests/test_kept.py" in done.stderr
    assert json.loads(output.read_text()) == first
    write(again, parts=True, kept=False)
    done = _write(again, output, "--again")
    assert done.stdout.startswith("specc: files in which a test fails: tests/test_kept.py;")
    write(again, kept=True)
    assert "fails: none;" in _write(again, output, "--again").stdout
    result = json.loads(output.read_text())
    assert {key: result[key] for key in first} == first
    assert [run["counts"]["failed"] for run in result["again"]] == [1, 0]
    assert failed_files(result) == []
    # what failed has to run: it is not skipped, nor left out
    write(again, kept=False)
    _write(again, output, "--again")
    again.write_text(
        '<testsuites><testsuite time="1"><testcase classname="tests.test_kept" name="test_a"'
        ' time="0"><skipped message="no GPU"/></testcase></testsuite></testsuites>'
    )
    done = _write(again, output, "--again")
    assert "failed before: tests.test_kept::test_a" in done.stderr
    write(again, kept=True)
    assert "PYTEST_ARGS may choose" in _write(again, output, "--again", PYTEST_ARGS="-x").stderr
    assert json.loads(output.read_text())["again"][:2] == result["again"]
    # and stays when another part of the same run comes
    output.write_text(json.dumps(result | {"commit": "c0ffee", "is_changed": False}))
    head = json.loads(output.read_text())
    whole = with_earlier(output, head, "2/2", _part(5, 2.0))
    assert (whole["missing_parts"], whole["again"]) == ([], result["again"])
    assert "again" not in with_earlier(output, head | {"commit": "beef"}, "2/2", _part(5, 2.0))
    # a part that runs anew has results of its own
    assert "again" not in with_earlier(output, head, "1/2", _part(5, 2.0))


def test_what_could_not_be_collected_has_a_file() -> None:
    def result(test: str) -> dict[str, Any]:
        return {"failures": [{"test": test, "outcome": "errors", "message": ""}]}

    assert failed_files(result("::tests.test_kept")) == ["tests/test_kept.py"]
    with pytest.raises(ValueError, match="there are no such files"):
        failed_files(result("tests.test_gone::test_a"))


def test_files_that_failed_of_no_result(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    for text in (None, "[]", "{}"):
        if text is not None:
            path.write_text(text)
        command = [sys.executable, "-P", "-m", "tests.full_results", "--failed", str(path)]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 1
        assert f"no result of `make test-full` in {path}" in done.stderr
