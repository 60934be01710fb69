"""The runner, on a repository of two files: what is caught, what survives, what does not count."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.__main__ import main
from tests.mutants.mutant import Mutant, MutantError, check_mutant, file_of, read_mutants
from tests.mutants.tree_copy import TreeCopy

CODE = """
def double(x):
    return 2 * x

def count_down(x):
    while x > 0:
        x -= 1
    return x

NAME = "toy"
"""
TESTS = """
import os
import time

import pytest
from toy import code

def test_double():
    assert code.double(3) == 6

@pytest.mark.parametrize("x", [0, 1])
def test_cases(x):
    assert code.double(x) == 2 * x

def test_zero():
    assert code.double(0) == 0

def test_count_down():
    assert code.count_down(3) == 0

def test_death():
    if code.double(1) != 2:
        os.abort()

@pytest.fixture
def doubled():
    assert code.double(1) == 2

def test_fixture(doubled):
    pass

def test_where():
    assert code.NAME == "toy" and os.getcwd() in code.__file__

def test_wrong():
    assert code.double(1) == 3

@pytest.mark.slow
def test_slow():
    assert code.double(1) == 2

@pytest.mark.parametrize("x", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_tiers(x):
    assert code.double(x) == 2 * x
"""
# name → what it replaces, by what, its test, and what else it says
MUTANTS: dict[str, tuple[str, str, str, str]] = {
    "caught": ("2 * x", "3 * x", "test_double", ""),
    "cases": ("2 * x", "3 * x", "test_cases", ""),
    "survivor": ("2 * x", "3 * x", "test_zero", ""),
    "hang": ("x -= 1", "x -= 0", "test_count_down", "limit_s = 0.9"),
    "said-hang": ("x -= 1", "x -= 0", "test_count_down", 'limit_s = 0.9, ends = "hang"'),
    "death": ("2 * x", "3 * x", "test_death", ""),
    "said-death": ("2 * x", "3 * x", "test_death", 'ends = "crash"'),
    "fixture": ("2 * x", "3 * x", "test_fixture", ""),
    "no-name": ("2 * x", "2 * y", "test_double", ""),
    "no-import": ('NAME = "toy"', 'raise ValueError("toy")', "test_double", ""),
    "where": ('NAME = "toy"', 'NAME = "boy"', "test_where", ""),
    "unsound": ("2 * x", "3 * x", "test_wrong", ""),
    "no-case": ("2 * x", "3 * x", "test_tiers[7]", ""),
    "slow": ("2 * x", "3 * x", "test_slow", ""),
    "slow-case": ("2 * x", "3 * x", "test_tiers[1]", ""),
    "slow-and-not": ("2 * x", "3 * x", "test_tiers", ""),
}
OUTCOMES = {
    "caught": "caught",
    "cases": "caught",
    "survivor": "survived",
    "hang": "hung",
    "said-hang": "caught",
    "death": "crashed",
    "said-death": "caught",
    "fixture": "broken elsewhere",
    "no-name": "broken elsewhere",
    "no-import": "broken elsewhere",
    "where": "caught",
    "unsound": "test fails without it",
    "no-case": "test fails without it",
    "slow": "caught",
    "slow-case": "caught",
    # the slow one of its cases is not named
    "slow-and-not": "survived",
}


def _entry(name: str, find: str, replace: str, test: str, more: str = "") -> str:
    more = more and f", {more}"
    return (
        f"{name} = {{breaks = 'it', find = '{find}', replace = '{replace}',"
        f" tests = ['tests/test_code.py::{test}']{more}}}\n"
    )


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes a repository whose package lies in a folder of another name, with these mutants."""
    # its tests need none, and every run would import them
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def make(mutants: str) -> Path:
        files = {
            "source/__init__.py": "",
            "source/code.py": CODE,
            "tests/test_code.py": TESTS,
            "tests/mutants/toy.toml": f"['source/code.py']\n{mutants}",
            "pyproject.toml": '[tool.scikit-build.wheel.packages]\ntoy = "source"\n'
            '[tool.pytest.ini_options]\nmarkers = ["slow"]\n',
            ".gitignore": "build/\n",
        }
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        if not (tmp_path / ".git").exists():
            subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
        return tmp_path

    return make


def _run(root: Path, *arguments: str) -> int:
    return main(["--json", "build/results.json", *arguments], root, preloaded=())


def _results(root: Path) -> dict[str, Any]:
    found = json.loads((root / "build" / "results.json").read_text(encoding="utf-8"))
    return {entry["name"].partition("/")[2]: entry for entry in found["mutants"]}


@pytest.mark.slow
def test_what_becomes_of_mutants(toy, capfd):
    root = toy("".join(_entry(name, *rest) for name, rest in MUTANTS.items()))
    assert _run(root, "--limit-s", "30") == 1
    found = _results(root)
    assert {name: entry["outcome"] for name, entry in found.items()} == OUTCOMES
    assert found["cases"]["by"] == ["tests/test_code.py::test_cases[1]"]
    # whatever went wrong, nothing is left of it, neither here nor in the copy
    for path in (root, root / "build" / "mutants" / "copy-0"):
        assert (path / "source" / "code.py").read_text(encoding="utf-8") == CODE
    assert "survived: toy/survivor (it)" in capfd.readouterr().out


@pytest.mark.slow
def test_known_results_are_taken_over(toy, capfd):
    entries = [_entry(name, *MUTANTS[name]) for name in ("caught", "survivor")]
    root = toy("".join(entries))
    assert _run(root, "--jobs", "2") == 1
    # what survived runs again, since its test may be another by now; what was caught does not
    assert _run(root, "--resume") == 1
    assert "2 mutants, 1 to run" in capfd.readouterr().out
    changed = _entry("caught", "2 * x", "4 * x", "test_double")
    toy("".join([changed, entries[1]]))
    assert _run(root, "--resume", "--only", "toy/c*") == 0
    assert "1 mutants, 1 to run" in capfd.readouterr().out
    before = (root / "build" / "results.json").read_bytes()
    assert json.loads(before)["not_run"] == 0
    (root / "source" / "code.py").write_text(CODE + "\nOTHER = 1\n", encoding="utf-8")
    assert _run(root, "--resume", "--seconds", "0") == 2
    said = capfd.readouterr().out
    assert "2 mutants, 2 to run" in said
    assert json.loads((root / "build" / "results.json").read_bytes())["not_run"] == 2
    # what was found of the other sources is not lost
    (aside,) = (root / "build").glob("results-*.json")
    assert f"begins anew: results of other sources are in {aside}" in said
    assert aside.read_bytes() == before


@pytest.mark.parametrize(
    ("mutant", "message"),
    [
        (_entry("a", "4 * x", "5 * x", "test_double"), "occurs 0 times"),
        (_entry("a", "x", "y", "test_double"), "not once"),
        (_entry("a", "2 * x", "2 * x  # twice", "test_double"), "nothing changes"),
        (_entry("a", "2 * x", "2 *", "test_double"), "would not parse"),
        (_entry("a", "2 * x", "3 * x", "test_double", "speed = 1"), "unknown: speed"),
        (_entry("a", "2 * x", "3 * x", "test_double", "ends = 'well'"), "ends is one of"),
        (_entry("a", "2 * x", "3 * x", "test_double") * 2, "Cannot overwrite a value"),
        (
            "\n['b']\n".join([_entry("a", "2 * x", "3 * x", "test_double")] * 2),
            "names that are there twice: toy/a",
        ),
        ("a = {}", "missing or unknown: breaks"),
        ("[[b]]\na = {}", "toy.toml: b: not a table of mutants"),
    ],
    ids=[
        "gone",
        "often",
        "comment",
        "syntax",
        "key",
        "end",
        "name",
        "two",
        "empty",
        "list",
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_runs(toy, capfd, mutant, message):
    root = toy(mutant)
    assert _run(root) == 1
    assert message in capfd.readouterr().err
    assert not (root / "build").exists()


def test_cpp_is_compared_without_comments(toy):
    root = toy("")
    (root / "code.cpp").write_text("int f() { return 1; /* one */ }  // f\n", encoding="utf-8")
    values = {"name": "a", "file": "code.cpp", "breaks": "it", "find": "// f"}
    test = ("tests/test_code.py::test_double",)
    with pytest.raises(MutantError, match="nothing changes"):
        check_mutant(Mutant(**values, replace="// g\n", tests=test), root)
    check_mutant(Mutant(**values, replace="\nint g();", tests=test), root)


def test_a_copy_has_what_git_does_not_ignore(toy):
    root = toy("")
    (root / "build").mkdir()
    (root / "build" / "made").touch()
    copy = TreeCopy(root, root / "build" / "mutants" / "copy-0").path
    assert not (copy / "build").exists()
    assert (copy / "toy").resolve() == copy / "source"


def test_all_mutants_of_specc_apply():
    """Each one replaces text that occurs once, and changes what the file says.

    That it would parse, the next test sees.
    """
    directory = Path(__file__).parent
    problems = []
    for mutant in read_mutants(directory):
        try:
            check_mutant(mutant, directory.parents[1], parses=False)
        except MutantError as error:
            problems.append(str(error))
    assert not problems, "\n".join(problems)


def test_pytest_knows_all_tests_that_mutants_of_specc_name():
    """With their parameters: one that is none of its file is never run."""
    directory = Path(__file__).parent
    named = {test for mutant in read_mutants(directory) for test in mutant.tests}
    known = _node_ids(directory.parents[1], sorted({file_of(test) for test in named}))
    missing = named - known - {test.partition("[")[0] for test in known}
    assert not missing, "\n".join(sorted(missing))


def _node_ids(root: Path, files: list[str]) -> set[str]:
    """All tests of these files, slow ones too."""
    command = [sys.executable, "-P", "-m", "pytest", "--collect-only", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, *files], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return {line for line in done.stdout.splitlines() if "::" in line}


def test_no_mutant_of_specc_names_what_is_not_there(tmp_path):
    """Such a test fails, but by a NameError, which does not count; nor does a file that is none."""
    root = Path(__file__).parents[2]
    mutants = [x for x in read_mutants(Path(__file__).parent) if x.file.endswith(".py")]
    for number, mutant in enumerate(mutants):
        text = mutant.apply((root / mutant.file).read_text(encoding="utf-8"))
        (tmp_path / f"{number}.py").write_text(text, encoding="utf-8")
    found = _undefined(tmp_path)
    assert not found, "\n".join(f"{mutants[number].name}: {what}" for number, what in found)
    (tmp_path / "0.py").write_text(CODE.replace("2 * x", "2 * y"), encoding="utf-8")
    (tmp_path / "1.py").write_text(CODE.replace("2 * x", "2 *"), encoding="utf-8")
    found = _undefined(tmp_path)
    assert (0, "Undefined name `y`") in found
    assert {number for number, _ in found} == {0, 1}


def _undefined(directory: Path) -> list[tuple[int, str]]:
    """Number of a file, and what ruff says of a name in it."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select"]
    command += ["F821,F823", "--output-format", "json", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    return [(int(Path(x["filename"]).stem), x["message"]) for x in json.loads(done.stdout)]
