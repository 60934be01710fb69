"""The GPU check's report: written after every check, whatever happens in the next one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.report import Part, Report

ROOT = Path(__file__).resolve().parents[2]
KERNELS = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.gpu import check
from tests.gpu.report import Report
check.PARTS  # the module is whole without torch or a GPU
report = Report(Path(sys.argv[2]), {"date": "now"})
report.run("kernels", lambda part: check.check_kernels(part, sys.argv[3:]))
sys.exit(int(report.has_failed))
"""


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def test_every_check_is_written_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.json"
    report = Report(path, {"device": "none"})
    assert read(path) == {"device": "none"}
    seen = []

    def part(found: Part) -> None:
        found.check("first", lambda: {"x": 1})
        seen.append(read(path)["numbers"])
        found.check("second", lambda: 1 // 0)
        seen.append(read(path)["numbers"])
        found.note("third", 3)

    report.run("numbers", part)
    assert [(set(s), s["state"]) for s in seen] == [
        ({"state", "seconds", "first"}, "running"),
        ({"state", "seconds", "first", "second"}, "running"),
    ]
    found = read(path)["numbers"]
    assert found["state"] == "failed"
    assert found["first"] == {"x": 1}
    assert "ZeroDivisionError" in found["second"]
    assert found["third"] == 3
    assert report.has_failed
    assert [item.name for item in path.parent.iterdir()] == ["report.json"]


def test_states_of_parts(tmp_path: Path) -> None:
    report = Report(tmp_path / "report.json", {})

    def fails(part: Part) -> None:
        part.note("before", 1)
        raise LookupError("gone")

    report.run("good", lambda part: part.note("x", 1))
    report.run("skipped", lambda part: part.skip("no tool"))
    assert not report.has_failed
    report.run("broken", fails)
    report.run("empty", lambda part: None)
    found = read(report.path)
    states = {name: found[name]["state"] for name in ("good", "skipped", "broken", "empty")}
    assert states == {"good": "passed", "skipped": "skipped", "broken": "failed", "empty": "failed"}
    assert found["skipped"]["reason"] == "no tool"
    assert found["broken"]["before"] == 1
    assert "LookupError: gone" in found["broken"]["error"]


def test_a_run_that_is_cut_off_leaves_what_it_has(tmp_path: Path) -> None:
    report = Report(tmp_path / "report.json", {})

    def part(found: Part) -> None:
        found.note("done", True)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        report.run("cut", part)
    assert read(report.path)["cut"] | {"seconds": 0} == {
        "state": "running",
        "seconds": 0,
        "done": True,
    }


def test_files_of_kernel_tests_are_chosen_and_noted(tmp_path: Path) -> None:
    """In the interpreter here, without pytest; each file has its own entry."""
    path = tmp_path / "report.json"
    command = [sys.executable, "-P", "-c", KERNELS, str(ROOT), str(path), "test_rows"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    found = read(path)["kernels"]
    assert found["state"] == "passed"
    assert [name for name in found if name.startswith("test_")] == ["test_rows"]
    assert found["num_passed"] == found["test_rows"]["passed"] > 5
    assert found["num_failed"] == 0


def test_unknown_files_are_refused_with_the_list() -> None:
    command = [sys.executable, "-P", str(ROOT / "tests/gpu/check.py"), "--files", "test_nothing"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert "test_attend" in result.stderr
    assert "test_interpreter" not in result.stderr
