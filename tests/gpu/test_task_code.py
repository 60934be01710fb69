"""What makes known results stale: the code of the check that found them, helpers included."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.gpu import check, facts, importable, rehearsal, task_code, tasks
from tests.gpu.tasks import Stage, Task

FILES = {
    "tests/gpu/child.py": "import json\nfrom tests.gpu.results import Results",
    "tests/gpu/results.py": "def late():\n    from tests.gpu import simulated",
    "tests/gpu/simulated.py": "from tests import unrelated",
    "tests/gpu/entry.py": "from tests import helper\nfrom tests.gpu import results",
    "tests/helper.py": "def late():\n    from tests.kernels.cases import one",
    "tests/kernels/cases.py": "import tests.deep as deep",
    "tests/deep.py": "",
    "tests/kernels/test_rows.py": "from tests.deep import two",
    "tests/unrelated.py": "",
}
TASK = Task("part", "name", "tests.gpu.entry:run", {"dtype": "float32"})


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for module in (task_code, facts):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_a_helper_that_changes_makes_its_results_stale(name, root):
    """However it is imported: from a folder, by another helper, in a function."""
    before = task_code.code_of(TASK)
    assert task_code.code_of(TASK) == before
    (root / name).write_text(FILES[name] + "\n# repaired")
    is_used = name not in (
        "tests/gpu/simulated.py",
        "tests/unrelated.py",
        "tests/kernels/test_rows.py",
    )
    assert (task_code.code_of(TASK) != before) == is_used


def test_the_file_of_tests_that_a_task_runs_counts(root):
    task = replace(TASK, arguments={"path": str(root / "tests/kernels/test_rows.py")})
    before = task_code.code_of(task)
    (root / "tests/kernels/test_rows.py").write_text("from tests.deep import three")
    assert task_code.code_of(task) != before


def test_what_a_task_does_counts_and_its_time_does_not(root):
    before = task_code.code_of(TASK)
    for change in (
        {"arguments": {"dtype": "bfloat16"}},
        {"environment": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}},
        {"sanitizer": "/opt/compute-sanitizer"},
        {"entry": "tests.gpu.entry:other"},
    ):
        assert task_code.code_of(replace(TASK, **change)) != before
    assert task_code.code_of(replace(TASK, least_s=1.0, result_s=2.0)) == before


@pytest.mark.slow
def test_the_checks_own_helpers_are_among_them():
    """Of the parts as they are; the time plan and the scheduler find nothing themselves."""
    plan = tasks.commands("/usr/bin/compute-sanitizer")
    found = {
        task.part: {path.stem for path in task_code.files_of(task)}
        for stages in plan.values()
        for stage in stages
        for task in stage.tasks
    }
    assert found["kernels"] >= {"child", "results", "kernel_tests"}
    assert found["steps"] >= {"child", "results", "benchmark", "count_compiles"}
    assert found["replay"] >= {"replay", "pair", "mixed_sampling"}
    assert found["collectives"] >= {"child", "results", "collectives"}
    assert found["output"] >= {"output", "pair", "near_ties"}
    assert found["sanitizer"] >= {"kernel_tests"}
    for names in found.values():
        assert names.isdisjoint({"schedule", "report", "check", "rehearsal", "simulated"})


SOUND = "def test_one(): pass\n"


def test_a_repaired_helper_is_run_again(tmp_path, monkeypatch):
    """Through the whole check: what is known is taken over, and what is stale is not."""
    (tmp_path / "test_sound.py").write_text(SOUND)
    (task,) = tasks.kernel_tasks([tmp_path / "test_sound.py"])
    task = replace(task, least_s=1.0)
    stages = {"B": [Stage(300.0, (task,))]}
    output = tmp_path / "report.json"

    def attempts() -> int:
        options = check.parse(["B", "--output", str(output)])
        with importable.importable() as site:
            environment = importable.environment(site)
            check.run(options, rehearsal.FACTS, environment, "simulated", stages, 0.1)
        return json.loads(output.read_text())["parts"]["kernels"]["test_sound"]["attempts"]

    assert attempts() == 1
    read = Path.read_bytes
    report = json.loads(output.read_text())
    report["parts"]["kernels"]["test_sound"]["attempts"] = 7
    output.write_text(json.dumps(report))
    assert attempts() == 7
    # a change of a helper
    monkeypatch.setattr(
        Path,
        "read_bytes",
        lambda self: read(self) + (b"#" if self.name == "kernel_tests.py" else b""),
    )
    assert attempts() == 1
