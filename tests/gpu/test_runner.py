"""The runner that stands in for pytest finds the same tests and tells passed from failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.tasks import kernel_files

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

@pytest.mark.parametrize("z", [3, (4,)], ids="z{}".format)
@pytest.mark.parametrize(
    "y", [5, pytest.param(6, marks=pytest.mark.skip(reason="no"))], ids=["a", None]
)
@pytest.mark.parametrize("x", [1.5, None, "t\\\\[x", True, int, (1, 2), "t\\\\[x", pytest])
def test_labels(x, y, z):
    assert y == 5

def test_patches(monkeypatch, tmp_path):
    import json, os, pathlib
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(json, "dumps", len)
    monkeypatch.setattr("json.loads", len)
    monkeypatch.setattr(json, "new", 1, raising=False)
    monkeypatch.setattr(pathlib.PosixPath, "exists", lambda self: 7)
    monkeypatch.setitem(names, "a", 2)
    monkeypatch.delitem(names, "b")
    monkeypatch.setenv("SPECC_A", "1")
    monkeypatch.chdir(tmp_path)
    assert (json.dumps("ab"), json.loads("ab"), names) == (2, 2, {"a": 2})
    assert pathlib.Path("x").exists() == 7
    with pytest.raises(AttributeError):
        monkeypatch.setattr(json, "absent", 1)

names = {"a": 1, "b": 2}

def test_patches_are_taken_back(tmp_path_factory):
    import json, os, pathlib
    assert (json.dumps([]), json.loads("1"), names) == ("[]", 1, {"a": 1, "b": 2})
    assert not hasattr(json, "new")
    assert pathlib.Path("/").exists() is True
    assert "exists" not in vars(pathlib.PosixPath)
    assert "SPECC_A" not in os.environ
    assert tmp_path_factory.mktemp("x") != tmp_path_factory.mktemp("x")

def test_approx():
    assert 1.0000001 == pytest.approx(1.0)
    assert [1.0, 2.0] == pytest.approx([1.0, 2.0000001])
    assert 1.1 != pytest.approx(1.0)
    assert 1.1 == pytest.approx(1.0, abs=0.2)
    assert 1.1 == pytest.approx(1.0, rel=0.2)
    assert [1.0] != pytest.approx([1.0, 2.0])

def test_is_left_out():
    assert False

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
found = []
tests = runner.load(Path(sys.argv[2]), Path(sys.argv[3]))
waits = []
runner.run(tests, found.append, lambda name: name != "test_is_left_out", lambda: waits.append(1))
assert len(waits) == sum(o.state == "passed" for o in found)
print(json.dumps([[o.name, o.state] for o in found]))
"""
LIST = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.gpu import runner
runner.install()
found = {}
for path in map(Path, sys.argv[2:]):
    found[path.stem] = [test.name for test in runner.load(path, Path(sys.argv[1])).tests]
print(json.dumps(found))
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
    states = dict(run(file, tmp_path))
    labels = {name: state for name, state in states.items() if name.startswith("test_labels")}
    assert len(labels) == 32
    assert labels["test_labels[1.5-a-z3]"] == "passed"
    assert labels["test_labels[x5-6-z(4,)]"] == "skipped"
    assert {name: state for name, state in states.items() if name not in labels} == {
        "test_passes[3-7-1]": "passed",
        "test_passes[3-7-two]": "passed",
        "test_fails": "failed",
        "test_raises": "passed",
        "test_raises_nothing": "failed",
        "test_raises_another_text": "failed",
        "test_is_skipped": "skipped",
        "test_skips": "skipped",
        "test_needs_what_there_is_not": "failed",
        "test_patches": "passed",
        "test_patches_are_taken_back": "passed",
        "test_approx": "passed",
        "test_fixtures_are_torn_down": "passed",
    }


@pytest.mark.slow
def test_the_sample_says_the_same_in_pytest(tmp_path: Path) -> None:
    """Names, and what passes: the stub's are pytest's."""
    file = tmp_path / "checks" / "test_sample.py"
    file.parent.mkdir()
    file.write_text(SAMPLE)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "-q", str(file)]
    listed = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    found = dict(
        (line.partition("::")[2].partition(" ")[0], line.partition(" ")[0])
        for line in listed.stdout.splitlines()
        if line.startswith(("PASSED", "FAILED", "ERROR"))
    )
    wanted = {
        name: "PASSED" if state == "passed" else "ERROR" if "needs" in name else "FAILED"
        for name, state in run(file, tmp_path)
        if state != "skipped"
    }
    # pytest runs what the other was told to leave out
    assert found.pop("test_is_left_out") == "FAILED"
    assert found == wanted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["test_rows", pytest.param("test_lookup", marks=pytest.mark.slow)])
def test_kernel_tests_pass(name: str) -> None:
    """In the interpreter here, on a GPU there."""
    file = ROOT / "tests/kernels/cuda" / f"{name}.py"
    assert {state for _, state in run(file, ROOT)} == {"passed"}


@pytest.mark.slow
def test_names_of_kernel_tests_are_those_of_pytest() -> None:
    """Of every file: a result that one of the two has found holds for the other."""
    paths = [str(path) for path in kernel_files()]
    done = subprocess.run(
        [sys.executable, "-P", "-c", LIST, str(ROOT), *paths], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    listed = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "--collect-only",
            "-o",
            "addopts=--import-mode=importlib",
            "-q",
            *paths,
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONSAFEPATH": "1"},
    )
    wanted: dict[str, list[str]] = {}
    for line in listed.stdout.splitlines():
        file, _, name = line.partition("::")
        if name:
            wanted.setdefault(Path(file).stem, []).append(name)
    found = json.loads(done.stdout.splitlines()[-1])
    assert sum(map(len, wanted.values())) > 600
    assert found == wanted
