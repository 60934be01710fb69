"""The GPU check on a machine without a GPU, with faults put into it: `make gpu-rehearsal`.

    python -P tests/gpu/rehearsal.py [A] [B] [C] [--device apart] [--output FILE] [--limit-s S]
                                     [--scale X]

Commands, processes, time plan and report are those of the check; the device is simulated, models
are tiny, and Triton interprets. With `--device apart` steps are not captured; instead, tensors of
the device are told apart from the host's (`told_apart`). Beside the kernels' own tests run files
that crash, hang, lose the device late, or cannot be imported. The exit status says whether
everything else is in the report, passed, and in time.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.gpu.tasks import Stage, Task

SOUND = """
def test_first():
    pass

{fault}

def test_behind():
    pass

def test_last(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECC_NOT_THERE", "1")
    assert not list(tmp_path.iterdir())
"""
# file → the test in it that goes wrong
FAULTS = {
    "test_aborts": 'def test_fault():\n    import os\n\n    os.write(2, b"bye")\n    os.abort()',
    # children and signals do not keep it alive
    "test_hangs": (
        "def test_fault():\n    import pathlib, signal, subprocess, time\n\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        '    child = subprocess.Popen(["sleep", "1234"])\n'
        '    pathlib.Path(__file__).with_suffix(".pid").write_text(str(child.pid))\n'
        "    time.sleep(1234)"
    ),
    "test_loses_its_device": (
        "def test_fault():\n    from tests.gpu import faults\n\n"
        '    faults.fail_later("an illegal memory access was encountered")'
    ),
    "test_fails": "def test_fault():\n    assert 1 == 2",
}
NO_IMPORT = "import a_module_that_nobody_has\n\ndef test_never():\n    pass\n"
# done, and the process does not end
LATE_EXIT = "import atexit, time\n\n\ndef test_first():\n    atexit.register(time.sleep, 1234)\n"
AFTER = {"test_first", "test_behind", "test_last"}
# kernel files that the interpreter is through with soon
QUICK = ("test_rows", "test_commit_kv", "test_lookup")
HANG_S = 60.0
# models of transformers are moved by torch's own code, which asks for a driver
OF_TRANSFORMERS = ("output", "transformers")
# what a draft leaves for its verification lies elsewhere each time that a step is run again
OF_REPLAYS = ("unsure-drafts",)
APART = "apart"
FACTS = {"device": "simulated", "versions": {}}


def write_faults(directory: Path) -> list[Path]:
    """Write the files with faults."""
    texts = {name: SOUND.format(fault=fault) for name, fault in FAULTS.items()}
    texts |= {"test_no_import": NO_IMPORT, "test_late_exit": LATE_EXIT}
    for name, text in texts.items():
        (directory / f"{name}.py").write_text(text, encoding="utf-8")
    return [directory / f"{name}.py" for name in texts]


def problems(kernels: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What is not as it has to be in the report of the files with faults: nothing, if all is well.

    Args:
        kernels: task → what the report has of it.
    """
    found = []

    def require(condition: object, text: str) -> None:
        if not condition:
            found.append(text)

    said = {
        "test_aborts": ("crashed: SIGABRT, at test_fault", "bye"),
        "test_hangs": ("hung: nothing came for", "at test_fault"),
        "test_loses_its_device": ("an illegal memory access was encountered",),
        "test_fails": ("assert 1 == 2",),
    }
    for name, words in said.items():
        task = kernels.get(name, {"results": {}, "state": "absent"})
        states = {key: result["state"] for key, result in task["results"].items()}
        wanted = dict.fromkeys(AFTER, "passed") | {"test_fault": "failed"}
        require(states == wanted, f"{name}: {states}")
        require(task["state"] == "failed", f"{name} is {task['state']}")
        value = str(task["results"].get("test_fault", {}).get("value"))
        for word in words:
            require(word in value, f"{name}: {word!r} is not in {value!r}")
    task = kernels.get("test_no_import", {"results": {}, "state": "absent"})
    values = [result["value"] for result in task["results"].values()]
    require(task["state"] == "failed", f"test_no_import is {task['state']}")
    require(
        len(values) == 1 and "a_module_that_nobody_has" in values[0], f"test_no_import: {values}"
    )
    task = kernels.get("test_late_exit", {"results": {}, "state": "absent"})
    require(task["state"] == "passed", f"test_late_exit is {task['state']}")
    return found


def fault_tasks(directory: Path, hang_s: float) -> list[Task]:
    """Tasks of the files with faults."""
    from tests.gpu.tasks import kernel_tasks

    tasks = kernel_tasks(write_faults(directory))
    return [replace(task, result_s=hang_s, least_s=1.0) for task in tasks]


def rehearsed(stages: Mapping[str, Sequence[Stage]], directory: Path) -> dict[str, list[Stage]]:
    """The commands as they are rehearsed: fewer kernel files, those with faults, two at a time."""
    from tests.gpu.tasks import kernel_files, kernel_tasks

    files = [path for path in kernel_files() if path.stem in QUICK]
    kernels = [*fault_tasks(directory, HANG_S), *kernel_tasks(files)]
    made = {
        name: [replace(stage, workers=min(stage.workers, 2)) for stage in plan]
        for name, plan in stages.items()
    }
    made["B"] = [replace(made["B"][0], tasks=tuple(kernels))]
    # the interpreter takes minutes for the others
    made["E"] = [
        replace(stage, tasks=kernel_tasks(files)) if _is_of_kernels(stage) else stage
        for stage in made["E"]
    ]
    return made


def _is_of_kernels(stage: Stage) -> bool:
    return all(task.part == "kernels" for task in stage.tasks)


def without(stages: Mapping[str, Sequence[Stage]], absent: Sequence[str]) -> dict[str, list[Stage]]:
    """The commands without the tasks of these parts, or of these names."""

    def kept(stage: Stage) -> tuple[Task, ...]:
        return tuple(x for x in stage.tasks if x.part not in absent and x.name not in absent)

    return {
        name: [replace(stage, tasks=kept(stage)) for stage in plan] for name, plan in stages.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commands", nargs="*", metavar="COMMAND", default=["A", "B", "C"])
    parser.add_argument("--device", choices=["simulated", APART], default="simulated")
    parser.add_argument("--output", type=Path, default=Path("build/gpu-check/rehearsal.json"))
    parser.add_argument("--limit-s", type=float, default=480.0)
    # a GPU runs in seconds what two cores interpret in minutes
    parser.add_argument("--scale", type=float, default=1.0, help="of all times that tasks may take")
    given = parser.parse_args()
    given.commands = given.commands or ["A", "B", "C"]
    check = _load("check")
    with _load("importable").importable() as site:
        from tests.gpu import importable, tasks

        environment = importable.environment(site) | {"TRITON_INTERPRET": "1"}
        more = ["--output", str(given.output), "--again", "--limit-s", str(given.limit_s)]
        options = check.parse([*given.commands, *more])
        with tempfile.TemporaryDirectory(prefix="specc-rehearsal-") as scratch:
            stages = rehearsed(tasks.commands(), Path(scratch))
            if given.device == APART:
                stages = without(stages, (*OF_TRANSFORMERS, *OF_REPLAYS))
            begin = time.monotonic()
            check.run(options, FACTS, environment, given.device, stages, given.scale)
            seconds = time.monotonic() - begin
    return judge(json.loads(given.output.read_text(encoding="utf-8")), given.commands, seconds)


def judge(report: Mapping[str, Any], commands: Sequence[str], seconds: float) -> int:
    """Say what is not as it has to be; 0 where nothing is."""
    parts = report["parts"]
    wrong = problems(parts["kernels"]) if "B" in commands else []
    for part, found in parts.items():
        for name, task in found.items():
            if name in FAULTS or name == "test_no_import":
                continue
            if task["state"] not in ("passed", "skipped"):
                wrong.append(f"{part}/{name} is {task['state']}: {task.get('reason')}")
    for name in commands:
        own = report["commands"][name]
        if own["seconds"] > own["limit_s"]:
            wrong.append(f"{name} took {own['seconds']} s of {own['limit_s']}")
    for line in wrong:
        print(line)
    print(f"rehearsal: {len(wrong)} things are wrong, {seconds:.0f} s")
    return int(bool(wrong))


def _load(name: str) -> Any:
    """A module beside this one, before `tests` is importable."""
    import importlib.util

    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main())
