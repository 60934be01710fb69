"""The short form of `make gpu-rehearsal`: faults in the check's processes cost their test alone.

But for the last test, no process here imports torch, so this takes seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import check, importable, rehearsal
from tests.gpu.tasks import Stage, Task, kernel_tasks, sanitizer_tasks

# of the check's own times
SCALE = 0.1
HANG_S = 3.0


@pytest.fixture(scope="module")
def environment() -> Any:
    before = list(sys.path)
    with importable.importable() as site:
        yield importable.environment(site)
    sys.path[:] = before


def run(stages: Any, environment: Any, output: Path, *more: str) -> Any:
    """Run command B; its exit status and the report."""
    options = check.parse(["B", "--output", str(output), *more])
    status = check.run(options, rehearsal.FACTS, environment, "simulated", {"B": stages}, SCALE)
    return status, json.loads(output.read_text())


def test_faults_cost_their_test_alone(environment, tmp_path):
    tasks = rehearsal.fault_tasks(tmp_path, HANG_S / SCALE)
    begin = time.monotonic()
    status, report = run([Stage(300.0, tuple(tasks), 4)], environment, tmp_path / "report.json")
    assert time.monotonic() - begin < 60
    assert status == 1
    assert rehearsal.problems(report["parts"]["kernels"]) == []
    assert report["commands"]["B"]["state"] == "failed"
    assert not is_alive(int((tmp_path / "test_hangs.pid").read_text()))
    # two processes where the first one did not get to the end
    attempts = {name: task["attempts"] for name, task in report["parts"]["kernels"].items()}
    assert attempts == {
        **dict.fromkeys(("test_aborts", "test_hangs", "test_loses_its_device"), 2),
        **dict.fromkeys(("test_fails", "test_no_import", "test_late_exit"), 1),
    }


def is_alive(pid: int) -> bool:
    """One that has ended may wait for somebody to ask how."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"


SLEEPY = """
import time
import pytest

@pytest.mark.parametrize("i", range({count}))
def test_one(i):
    time.sleep(0.12)
"""


@pytest.mark.slow
def test_time_ends_every_stage_and_the_next_run_goes_on(environment, tmp_path):
    """What was found stays; what was not started says so; nothing is done twice."""
    for name, count in (("test_a", 40), ("test_b", 4)):
        (tmp_path / f"{name}.py").write_text(SLEEPY.format(count=count))
    tasks = kernel_tasks([tmp_path / "test_a.py", tmp_path / "test_b.py"])
    stages = [Stage(30.0, (task,), 1) for task in tasks]
    output = tmp_path / "report.json"
    begin = time.monotonic()
    # 3 s for a, and the other 3 s of 6 are not given to b
    assert run(stages, environment, output, "--limit-s", "35")[0] == 3
    assert time.monotonic() - begin < 60
    report = json.loads(output.read_text())
    a, b = (report["parts"]["kernels"][name] for name in ("test_a", "test_b"))
    assert report["commands"]["B"]["state"] == "incomplete"
    assert a["state"] == "cut"
    assert a["reason"].startswith("cut off: no time left, at test_one[")
    assert b == {"state": "dropped", "results": {}} | {k: b[k] for k in ("code", "reason")}
    assert 1 <= len(a["results"]) < 40
    assert {result["state"] for result in a["results"].values()} == {"passed"}
    first = a["results"]
    status, report = run([Stage(600.0, (task,), 1) for task in tasks], environment, output)
    assert status == 0
    a, b = (report["parts"]["kernels"][name] for name in ("test_a", "test_b"))
    assert (len(a["results"]), len(b["results"])) == (40, 4)
    assert {name: a["results"][name] for name in first} == first
    assert "reason" not in a
    # in 3 s the 40 of a could not be done again
    assert run(stages, environment, output)[0] == 0


# what it is given before the command, the command, and its own verdict; of a probe what it says
TOOL = """#!/bin/sh
echo "$PYTORCH_NO_CUDA_MEMORY_CACHING $*" >> "$0.called"
while [ "$1" != {python} ]; do shift; done
if grep -q sanitizer:probe "$5"; then {probe}; fi
"$@" || exit
echo "ERROR SUMMARY: {status} errors"
exit {status}
"""
SEES = 'echo "========= Invalid __global__ write of size 4 bytes"'
REFUSES = 'echo "========= Error: Device not supported"; exit 1'
HANGS = 'echo "========= COMPUTE-SANITIZER"; sleep 1234'


def sanitized(tool: Path, probe: str, status: int) -> Stage:
    """The probe, and one file of tests after it."""
    tool.write_text(TOOL.format(python=sys.executable, probe=probe, status=status))
    tool.chmod(0o755)
    (first, task, *_) = sanitizer_tasks(str(tool))
    path = tool.with_name("test_watched.py")
    path.write_text("def test_one(): pass\n")
    arguments = {"path": str(path)}
    first = replace(first, least_s=1.0, result_s=20.0)
    return Stage(300.0, (first, replace(task, arguments=arguments, least_s=1.0)))


@pytest.mark.parametrize("status", [pytest.param(0, marks=pytest.mark.slow), 9])
def test_what_the_sanitizer_finds_fails_its_task(status, environment, tmp_path):
    """Whatever the tests say that it watched."""
    stage = sanitized(tmp_path / "compute-sanitizer", SEES, status)
    code, report = run([stage], environment, tmp_path / "report.json")
    own = report["parts"]["sanitizer"][stage.tasks[1].name]
    assert report["parts"]["sanitizer"]["probe"]["state"] == "passed"
    assert own["results"]["test_one"]["state"] == "passed"
    assert (code, own["state"]) == ((1, "failed") if status else (0, "passed"))
    if status:
        assert own["reason"].startswith("compute-sanitizer: status 9")
        assert "ERROR SUMMARY: 9 errors" in own["reason"]
    called = (tmp_path / "compute-sanitizer.called").read_text().splitlines()
    assert len(called) == 2
    for line in called:
        assert line.startswith("1 --tool memcheck --error-exitcode 9 --report-api-errors no ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("probe", "reason"),
    [
        (REFUSES, "ended with status 1\n========= Error: Device not supported"),
        pytest.param(
            HANGS, "hung: nothing came for 2 s\n========= COMPUTE-SANITIZER", marks=pytest.mark.slow
        ),
        # it runs, and lets what the probe plants pass
        pytest.param(
            "true",
            "status 0, and it did not say: Invalid __global__ write",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["refuses", "hangs", "sees-nothing"],
)
def test_a_sanitizer_that_does_not_work_here_costs_its_probe(probe, reason, environment, tmp_path):
    """Nothing has failed, and another machine is asked again."""
    tool = tmp_path / "compute-sanitizer"
    begin = time.monotonic()
    stage = sanitized(tool, probe, 0)
    code, report = run([stage], environment, tmp_path / "report.json")
    assert time.monotonic() - begin < 60
    first, own = report["parts"]["sanitizer"].values()
    assert (code, first["state"], own["state"]) == (0, "not available", "not available")
    assert first["reason"].startswith(reason)
    assert own["reason"].startswith("sanitizer/probe: ")
    assert own["results"] == {}
    assert len((tmp_path / "compute-sanitizer.called").read_text().splitlines()) == 1
    stage = sanitized(tool, SEES, 0)
    code, report = run([stage], environment, tmp_path / "report.json")
    states = [task["state"] for task in report["parts"]["sanitizer"].values()]
    assert (code, states) == (0, ["passed", "passed"])
    # all is known: nobody asks
    code, _ = run([sanitized(tool, REFUSES, 0)], environment, tmp_path / "report.json")
    assert code == 0
    assert len((tmp_path / "compute-sanitizer.called").read_text().splitlines()) == 3
    # something is left, and the next machine refuses the tool
    report["parts"]["sanitizer"][stage.tasks[1].name]["state"] = "cut"
    (tmp_path / "report.json").write_text(json.dumps(report))
    code, report = run([sanitized(tool, REFUSES, 0)], environment, tmp_path / "report.json")
    states = [task["state"] for task in report["parts"]["sanitizer"].values()]
    assert (code, states) == (0, ["not available"] * 2)


def test_without_a_sanitizer_all_of_it_is_skipped(environment, tmp_path):
    tasks = sanitizer_tasks(None)
    code, report = run([Stage(300.0, tasks)], environment, tmp_path / "report.json")
    states = {task["state"] for task in report["parts"]["sanitizer"].values()}
    assert (code, states) == (0, {"skipped"})
    reasons = {task["reason"] for task in report["parts"]["sanitizer"].values()}
    assert all("no compute-sanitizer" in reason for reason in reasons)


@pytest.mark.slow
def test_collectives_of_one_rank(environment, tmp_path):
    """What the check calls of the runtime's ranks, over gloo: a group, its nodes, its end."""
    task = Task("collectives", "nccl", "tests.gpu.collectives:measure", result_s=900.0)
    stages, output = [Stage(900.0, (task,), 1)], tmp_path / "report.json"
    status, report = run(stages, environment, output, "--limit-s", "1000")
    found = report["parts"]["collectives"]["nccl"]
    assert status == 0, found
    assert len(found["results"]) > 3
    assert {result["state"] for result in found["results"].values()} == {"passed"}


def passed(task: Task, environment: Any, output: Path, device: str) -> Any:
    """A task of minutes, with kernels interpreted: its part of the report."""
    options = check.parse(["B", "--output", str(output), "--limit-s", "1000"])
    stages = {"B": [Stage(900.0, (task,), 1)]}
    own = environment | {"TRITON_INTERPRET": "1"}
    status = check.run(options, rehearsal.FACTS, own, device, stages)
    found = json.loads(output.read_text())["parts"][task.part][task.name]
    assert status == 0, found
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "dtype"),
    [("simulated", "float32"), (rehearsal.APART, "float32"), ("simulated", "bfloat16")],
)
def test_drafts_that_obey_a_grammar(environment, tmp_path, device, dtype):
    """Where tensors of the device are told apart from the host's, too."""
    task = Task("replay", "grammar", "tests.gpu.grammar:check", {"dtype": dtype}, result_s=900.0)
    found = passed(task, environment, tmp_path / "report.json", device)
    values = [result["value"] for result in found["results"].values()]
    # a chain of four, and a tree of three levels
    assert [value["graphs"] for value in values] == [6, 5]
    for value in values:
        assert value["masked"]["tokens_a_step"] > value["unmasked"]["tokens_a_step"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "entry"),
    [
        ("simulated", "check_policies"),
        ("simulated", "check_drafters"),
        (rehearsal.APART, "check_policies"),
    ],
)
def test_trees_that_are_cut(environment, tmp_path, device, entry):
    """Each plan with its tokens and its times.

    Drafters are not asked on a device that runs steps again instead of replaying them: what their
    draft leaves for its verification would lie elsewhere each time.
    """
    task = Task("replay", "cut", f"tests.gpu.cut_trees:{entry}", result_s=900.0)
    found = passed(task, environment, tmp_path / "report.json", device)
    assert len(found["results"]) == {"check_policies": 4, "check_drafters": 12}[entry]


def say_threads(results: Any, device: Any) -> None:
    results.check("threads", lambda: int(os.environ["OMP_NUM_THREADS"]))


@pytest.mark.parametrize(("tasks", "workers", "threads"), [(1, 4, 16), (3, 4, 5), (5, 2, 8)])
def test_processes_share_the_cores(tasks, workers, threads, environment, tmp_path, monkeypatch):
    """Six processes with a thread for each of 16 cores had no result after 100 seconds.

    Cores are those that this process may use; a machine may have more.
    """
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    entry = "tests.gpu.test_rehearsal:say_threads"
    names = [f"t{i}" for i in range(tasks)]
    stage = Stage(300.0, tuple(Task("kernels", name, entry) for name in names), workers)
    status, report = run([stage], environment, tmp_path / "report.json")
    assert status == 0
    found = [report["parts"]["kernels"][name]["results"]["threads"]["value"] for name in names]
    assert found == [threads] * tasks
