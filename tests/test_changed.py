"""Which files of tests a change reaches, on a checkout of a few modules."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.changed import changed, read_notes
from tests.closure import Closures
from tests.kept import ROOT

FILES = {
    "specc/__init__.py": '_EXPORTS = {"run": "specc.api"}\n',
    "specc/api.py": "from specc.compiler.backends import registry\n",
    "specc/compiler/backends/registry.py": "import importlib\n",
    "specc/compiler/backends/cpu.py": "",
    "specc/compiler/backends/cuda.py": "import specc.late\n",
    "specc/late.py": "",
    "specc/typed.py": "",
    "specc/named.py": "",
    "specc/words.txt": "one",
    "runtime/step.py": "if TYPE_CHECKING:\n    import specc.typed\n"
    "def f():\n    import specc.late\n",
    "tests/conftest.py": "import pytest\nfrom specc import late\n\n@pytest.fixture\ndef engine():\n"
    "    return late\n\n@pytest.fixture\ndef tree(engine):\n    return 1\n",
    "tests/test_step.py": "from specc.runtime import step\n\ndef test_it():\n    assert step\n",
    "tests/test_alone.py": "def test_it():\n    pass\n",
    "tests/test_api.py": "import specc\n\ndef test_it():\n    assert specc.run\n",
    "tests/test_cuda.py": "from specc import run\n\ndef test_it():\n    assert 'cuda'\n",
    "tests/test_child.py": "import sys\n\ndef test_it():\n    sys.executable\n",
    "tests/test_tree.py": "def test_it(tree):\n    assert tree\n",
    "tests/test_name.py": 'def test_it():\n    assert "specc.named:f"\n',
    "tests/test_docs.py": 'from pathlib import Path\nD = Path(__file__).parents[1] / "docs"\n'
    "\ndef test_it():\n    pass\n",
    "docs/README.md": "",
    "pyproject.toml": "",
}
# every file but these depends on no other
REACHED = {
    "runtime/step.py": {"step", "child"},
    "specc/late.py": {"step", "cuda", "child", "tree"},
    "specc/typed.py": {"child"},
    "specc/api.py": {"api", "cuda", "child"},
    "specc/compiler/backends/cpu.py": {"api", "cuda", "child"},
    "specc/compiler/backends/cuda.py": {"cuda", "child"},
    "specc/named.py": {"name", "child"},
    # of the package's folder each module may read it
    "specc/words.txt": {"step", "api", "cuda", "child", "tree", "name"},
    "docs/README.md": {"docs"},
    "pyproject.toml": {"step", "alone", "api", "cuda", "child", "tree", "name", "docs"},
    "tests/test_alone.py": {"alone"},
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("name", REACHED)
def test_a_change_reaches_what_imports_it(checkout, name):
    def hashes() -> dict[str, str]:
        closures = Closures(checkout, checkout / "build" / "cache.json")
        return {file: closures.hash(file) for file in closures.tests()}

    before = hashes()
    assert hashes() == before
    with (checkout / name).open("a", encoding="utf-8") as file:
        file.write("\n#" + "x" * 100)
    after = hashes()
    reached = {file for file in before if before[file] != after[file]}
    assert reached == {f"tests/test_{word}.py" for word in REACHED[name]}


def test_what_chooses_files_says_the_same_as_what_notes_them(checkout, monkeypatch):
    """One is outside of pytest, where nobody has set what conftest.py sets."""
    command = [sys.executable, "-c", "import sys, pathlib, tests.closure as c\n"]
    command[-1] += "print(c.Closures(pathlib.Path(sys.argv[1])).hash('tests/test_api.py'))"
    for name in ("SPECC_BACKEND", "TRITON_INTERPRET", "AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    outside = subprocess.run([*command, checkout], capture_output=True, text=True, check=True)
    assert outside.stdout.strip() == Closures(checkout).hash("tests/test_api.py")


def test_what_was_seen_counts_too(checkout):
    closures = Closures(checkout)
    assert "specc/named.py" not in closures.files("tests/test_alone.py")
    assert "specc/named.py" in closures.files("tests/test_alone.py", ["specc.named", "specc.gone"])


def test_engines_depend_on_the_compiler_and_the_runtime():
    """Of specc itself: what its words and fixtures stand for."""
    closures = Closures(cache=ROOT / "build" / "closures.json")
    files = closures.files("tests/runtime/test_lossless.py")
    assert {"passes/pipeline.py", "kernels/cpu/accept.cpp", "specc/compiler/build.py"} <= files
    assert "passes/pipeline.py" not in closures.files("tests/runtime/scheduling/test_scheduler.py")


@pytest.fixture
def run(checkout, monkeypatch) -> Callable[..., int]:
    """Runs tests of the checkout with these words; what passes is noted."""
    (checkout / "conftest.py").write_text(
        "from pathlib import Path\nfrom tests.changed import Imports, Recorder\n\n"
        "def pytest_configure(config):\n    root = Path(__file__).parent\n"
        "    config.pluginmanager.register(Imports())\n"
        "    config.pluginmanager.register(Recorder(root, root / 'notes.json', None))\n"
    )
    (checkout / "tests" / "conftest.py").unlink()
    monkeypatch.chdir(checkout)

    def start(*words: str) -> int:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull]
        command += ["--rootdir", str(checkout), "--import-mode=importlib", "-p", "xdist", *words]
        more = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        environment = dict(os.environ) | more | {"PYTHONSAFEPATH": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        print(done.stdout, done.stderr)
        return done.returncode

    return start


TESTS = ("test_alone", "test_docs", "test_child")


def _left(checkout: Path) -> set[str]:
    """Of the three files of tests that import nothing, those that are not known to pass."""
    found = changed(Closures(checkout), read_notes(checkout / "notes.json"))
    return {Path(file).stem for file in found} & {*TESTS}


def test_files_are_noted_when_all_their_tests_pass(checkout, run):
    files = [f"tests/{name}.py" for name in TESTS]
    assert _left(checkout) == {*TESTS}
    # tests that were chosen from a file say nothing of the others
    assert run("-k", "it", *files) == 0
    assert run(f"{files[0]}::test_it") == 0
    assert _left(checkout) == {*TESTS}
    (checkout / "tests/test_docs.py").write_text("def test_it(): assert 0\ndef test_b(): pass\n")
    # what changes while tests run is not what they saw
    late = checkout / "docs" / "page.md"
    (checkout / "tests/test_child.py").write_text(
        f"ROOT = 'docs'\ndef test_it():\n    open({str(late)!r}, 'a').write('x')\n"
    )
    assert run(*files, "--numprocesses=0") == 1
    assert _left(checkout) == {"test_docs", "test_child"}
    (checkout / "tests/test_docs.py").write_text("def test_it(): pass\n")
    (checkout / "tests/test_child.py").write_text(
        "import sys\ndef test_it(): sys.modules['specc.' + 'named'] = sys\n"
    )
    assert run("tests/test_child.py", "tests/test_docs.py", "-n1") == 0
    assert _left(checkout) == set()
    # a module that no reading of sources finds, but that a run imports
    (checkout / "specc/named.py").write_text("a = 1")
    assert _left(checkout) == {"test_child"}
    assert run("tests/test_child.py") == 0
    # what fails is known no more, and what is repaired has to pass
    (checkout / "tests/test_docs.py").write_text("def test_it(): raise SystemError\n")
    assert _left(checkout) == {"test_docs"}
    assert run("tests/test_docs.py") == 1
    (checkout / "tests/test_docs.py").write_text("def test_it(): pass\n")
    assert _left(checkout) == {"test_docs"}
