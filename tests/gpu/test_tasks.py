"""The time plan of the GPU check, its command line, and what its processes import."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import check, facts, importable, tasks
from tests.gpu.kernel_tests import Choice
from tests.gpu.results import Results
from tests.gpu.schedule import GRACE_S, STACK_S

ROOT = Path(__file__).resolve().parents[2]
PLAN = tasks.commands("/usr/bin/compute-sanitizer")


@pytest.mark.parametrize("name", PLAN)
def test_every_command_ends_in_time(name):
    """Stages end when they and those before have had their seconds, whatever their tasks do."""
    stages = PLAN[name]
    assert tasks.LIMIT_S <= 8 * 60
    planned = sum(stage.seconds for stage in stages)
    assert planned + tasks.OVERHEAD_S <= tasks.LIMIT_S
    # a process that has to be killed twice at the very end, and a look at the machine
    assert STACK_S + GRACE_S <= tasks.OVERHEAD_S
    assert tasks.LIMIT_S + facts.LIMIT_S + STACK_S + GRACE_S < 600
    for stage in stages:
        for task in stage.tasks:
            # a hang leaves the stage time for what comes after it
            assert task.least_s < stage.seconds
    titles = [(task.part, task.name) for stage in stages for task in stage.tasks]
    assert len(titles) == len(set(titles)) > 0


def test_what_the_commands_are_for():
    parts = {
        name: {t.part for stage in stages for t in stage.tasks} for name, stages in PLAN.items()
    }
    assert parts == {
        "A": {"steps", "replay", "output", "kinds"},
        "B": {"kernels"},
        "C": {
            "attention",
            "sampling",
            "collectives",
            "sanitizer",
            "transformers",
        },
        "D": {"sweep", "shapes"},
        "E": {"shapes", "kernels", "sweep", "sanitizer"},
        "R": {"tensorrt"},
        "S": {"shapes"},
        "T": {"sweep"},
    }
    # nothing runs beside what is measured, and steps come first
    for stages in PLAN.values():
        for stage in stages:
            measures = {
                "steps",
                "attention",
                "sampling",
                "collectives",
                "transformers",
                "sweep",
                "tensorrt",
            }
            if measures & {task.part for task in stage.tasks}:
                assert len(stage.tasks) == 1
    assert [task.part for task in PLAN["A"][0].tasks] == ["steps"]
    assert [task.name for task in PLAN["C"][-2].tasks] == ["flex"]
    assert [task.part for task in PLAN["C"][-1].tasks] == ["transformers"]


def test_every_kernel_file_is_run_whole():
    names = {path.stem for path in tasks.kernel_files()}
    assert {"test_attend", "test_accept", "test_rows", "test_lookup"} <= names
    assert names.isdisjoint({"test_interpreter", "test_budgets"})
    shards: dict[str, list[list[int]]] = {}
    for task in PLAN["B"][0].tasks:
        shards.setdefault(Path(task.arguments["path"]).stem, []).append(task.arguments["shard"])
    assert set(shards) == names
    for found in shards.values():
        assert found == [[i, len(found)] for i in range(len(found))]


def test_shards_are_every_test_once(tmp_path):
    """Whatever is known already: what is left does not move between them."""
    names = [f"test_a[{i}]" for i in range(11)] + ["test_b"]
    names += ["test_a[batch-16]", "test_c[1]", "test_c"]
    for known in ([], names[3:8]):
        taken = []
        for index in range(3):
            left_out = ["batch-16", "test_c"]
            choice = Choice(Results(tmp_path / "events", known), (index, 3), left_out)
            taken.append([name for name in names if choice.takes(name)])
            assert choice.num_tests == 12
        assert sorted(name for part in taken for name in part) == sorted(set(names[:-3]) - {*known})
        assert taken[0][0] == "test_a[0]"
        assert "test_a[9]" in taken[0]


def test_what_the_sanitizer_runs():
    """A probe first, and the files of kernels that index memory by what they read."""
    probe, *found = [t for stage in PLAN["C"] for t in stage.tasks if t.part == "sanitizer"]
    wanted = {"commit_kv", "write_kv", "attend", "rope_write", "accept", "node_winners"}
    assert {task.name for task in found} == wanted | {"add_norm", "skinny_linear"}
    for task in found:
        assert "batch-16" in task.arguments["left_out"]
        assert Path(task.arguments["path"]).is_file()
        assert task.needs == probe.name
    for task in (probe, *found):
        assert task.environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
        assert task.sanitizer == "/usr/bin/compute-sanitizer"
    assert probe.result_s <= 60
    assert probe.says
    absent = [t for stage in tasks.commands(None)["C"] for t in stage.tasks]
    assert [t.entry for t in absent if t.name == "probe"] == ["tests.gpu.sanitizer:skip"]


def test_what_is_left_out_is_there():
    """A name that no test has any more would leave nothing out."""
    text = "".join(path.read_text() for path in tasks.kernel_files())
    for name in tasks.TOO_MANY:
        assert f"\ndef {name}(" in text


@pytest.mark.parametrize("task", {t.entry: t for p in PLAN.values() for s in p for t in s.tasks})
def test_entries_exist(task):
    module, _, name = task.partition(":")
    path = ROOT / f"{module.replace('.', '/')}.py"
    assert f"\ndef {name}(" in path.read_text()


def test_names_that_nothing_has_are_refused_with_the_list(capsys):
    for arguments, listed in (
        (["--files", "test_nothing"], "test_attend"),
        (["X"], "A, B, C, D, E, R, S, T"),
        (["D", "--tasks", "nothing"], "8b-1b int4"),
        (["--only", "nothing"], "replay"),
    ):
        with pytest.raises(SystemExit) as caught:
            check.parse(arguments)
        assert caught.value.code == 2
        said = capsys.readouterr().err
        assert listed in said
        assert "test_interpreter" not in said
    assert check.parse([]).commands == ["A", "B", "C"]
    assert check.parse(["--files", "test_rows"]).commands == ["B"]


@pytest.mark.slow
def test_without_a_gpu_it_says_so(tmp_path):
    """As `make gpu-check` calls it: from anywhere, in a Python that knows of no `tests`."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OUT": str(tmp_path)}
    command = [sys.executable, "-P", str(ROOT / "tests/gpu/check.py"), "A"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 2, done.stderr
    assert "no GPU that torch can use" in done.stdout
    assert list(tmp_path.iterdir()) == []


LOOK = """
import importlib.util, json, os, sys
import tests, specc.kernels, tests.gpu.tasks
names = ("SPECC_BACKEND", "OMP_NUM_THREADS", "TRITON_INTERPRET", "PYTEST_CURRENT_TEST")
print(json.dumps([list(tests.__path__), [n for n in names if n in os.environ]]))
"""


def test_processes_import_this_tree_and_inherit_nothing(tmp_path, monkeypatch):
    """Another package called tests is on the path, and tests/conftest.py has left its variables."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").write_text("raise SystemExit('the other one')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name in ("SPECC_BACKEND", "OMP_NUM_THREADS", "TRITON_INTERPRET"):
        monkeypatch.setenv(name, "1")
    before = list(sys.path)
    with importable.importable() as site:
        environment = importable.environment(site)
        done = subprocess.run(
            [sys.executable, "-P", "-S", "-c", LOOK],
            capture_output=True,
            text=True,
            env=environment,
            cwd=tmp_path,
        )
    assert sys.path == before
    assert not site.exists()
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f'[["{ROOT}/tests"], []]'


def test_kernels_are_kept_here_or_where_files_can_be_written(tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setattr(importable, "ROOT", tmp_path)
    own = tmp_path / "build/gpu-check/triton"
    assert importable.environment(tmp_path)["TRITON_CACHE_DIR"] == str(own)
    assert list(own.iterdir()) == []
    own.rmdir()
    own.write_text("no folder")
    other = Path(importable.environment(tmp_path)["TRITON_CACHE_DIR"])
    assert other.parent.is_dir()
    assert not other.is_relative_to(tmp_path)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/chosen")
    assert importable.environment(tmp_path)["TRITON_CACHE_DIR"] == "/chosen"


def test_the_source_is_what_is_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "ROOT", tmp_path)
    monkeypatch.setattr(facts, "FOLDERS", ("specc",))
    monkeypatch.setattr(facts, "FILES", ())
    (tmp_path / "specc").mkdir()
    file = tmp_path / "specc" / "a.py"
    file.write_text("1")
    first = facts.source_facts()
    assert first == facts.source_facts()
    (tmp_path / "other.py").write_text("3")
    assert first == facts.source_facts()
    file.write_text("2")
    second = facts.source_facts()
    assert second["source"] != first["source"]
    file.rename(tmp_path / "specc" / "b.py")
    assert facts.source_facts()["source"] not in (first["source"], second["source"])


def test_the_check_itself_imports_no_torch():
    """The process that has to end in time loads nothing that could hang or crash it."""
    code = (
        "import sys; from tests.gpu import check, facts, report, schedule, tasks;"
        "assert 'torch' not in sys.modules and 'triton' not in sys.modules"
    )
    assert importlib.util.find_spec("torch") is not None
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
