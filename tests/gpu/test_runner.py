"""The runner that stands in for pytest finds the same tests and tells passed from failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = """
import pytest

pytestmark = pytest.mark.usefixtures("common")
seen = []

@pytest.fixture
def common():
    seen.append("begin")
    yield
    seen.append("end")

@pytest.fixture(scope="session")
def number():
    seen.append("number")
    return 4

@pytest.mark.parametrize("x", [1, pytest.param(2, id="two")])
@pytest.mark.parametrize(("y", "z"), [(3, 7)])
def test_passes(x, y, z, number):
    assert x + y + z > number

def test_fails(number):
    assert number == 5

def test_raises():
    with pytest.raises(ValueError, match="b.d") as caught:
        raise ValueError("bad")
    assert str(caught.value) == "bad"

def test_raises_nothing():
    with pytest.raises(ValueError):
        pass

def test_raises_another_text():
    with pytest.raises(ValueError, match="good"):
        raise ValueError("bad")

@pytest.mark.skipif(True, reason="not here")
def test_is_skipped():
    assert False

def test_skips():
    pytest.skip("nor here")

def test_needs_what_there_is_not(absent):
    pass

def test_fixtures_are_torn_down():
    assert seen.count("begin") == seen.count("end") + 1
    assert seen.count("number") == 1
"""
RUN = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.gpu import runner
runner.install()
found = runner.run_file(Path(sys.argv[2]), Path(sys.argv[3]))
print(json.dumps([[o.name, o.state] for o in found]))
"""


def run(path: Path, root: Path) -> list[list[str]]:
    """Run a file in a process without pytest."""
    command = [sys.executable, "-P", "-c", RUN, str(ROOT), str(path), str(root)]
    result = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(root)}
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_states(tmp_path: Path) -> None:
    file = tmp_path / "checks" / "test_sample.py"
    file.parent.mkdir()
    file.write_text(SAMPLE)
    states = {name.partition("::")[2]: state for name, state in run(file, tmp_path)}
    assert states == {
        "test_passes[0-0]": "passed",
        "test_passes[0-two]": "passed",
        "test_fails": "failed",
        "test_raises": "passed",
        "test_raises_nothing": "failed",
        "test_raises_another_text": "failed",
        "test_is_skipped": "skipped",
        "test_skips": "skipped",
        "test_needs_what_there_is_not": "failed",
        "test_fixtures_are_torn_down": "passed",
    }


@pytest.mark.parametrize("name", ["test_rows", "test_write_kv"])
def test_kernel_tests_are_found_and_pass(name: str) -> None:
    """As many as pytest finds; they run in the interpreter here, on a GPU there."""
    file = ROOT / "tests/kernels/cuda" / f"{name}.py"
    found = run(file, ROOT)
    assert {state for _, state in found} == {"passed"}
    listed = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", str(file)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONSAFEPATH": "1"},
    )
    assert len(found) == int(listed.stdout.rpartition(":")[2]) > 5
