"""The process that runs tests in a copy: it imports what is slow once and forks for each run.

    python -P worker.py MODULE…

Nothing of the repository is imported before a fork, so a run sees the sources as they are then.
Requests are lines of JSON on standard input: `{"tests": […], "stop": bool, "limit_s": number,
"output": path}`; an answer is a line of JSON, see `Answer`. Lines come one at a time.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TypedDict

import pytest

_POLL_S = 0.02
_child = 0


class Case(TypedDict):
    """What became of a case of a test: `kinds` are names of the exception's classes."""

    test: str
    outcome: str
    phase: str
    kinds: list[str]


class Answer(TypedDict):
    """What became of a run: `status` is that of the process, None where its time was up."""

    status: int | None
    collection: list[str]
    cases: list[Case]
    seconds: float


class Recorder:
    """Writes every case down as soon as it is known, since the process may die in the next one."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _write(self, **line: Any) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(collection=report.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report = yield
        if report.when == "call" or not report.passed:
            kinds = [kind.__name__ for kind in call.excinfo.type.__mro__] if call.excinfo else []
            case = Case(test=item.nodeid, outcome=report.outcome, phase=report.when, kinds=kinds)
            self._write(case=case)
        return report


class Tiers:
    """Leaves slow cases out, but for those that are named with all their parameters."""

    def __init__(self, tests: list[str]) -> None:
        self._named = set(tests)

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        left_out = [
            item
            for item in items
            if item.get_closest_marker("slow") and item.nodeid not in self._named
        ]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def _run_child(request: dict[str, Any], scratch: Path) -> None:
    """Run tests in this process, which ends with it."""
    os.setsid()
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    options = ["-q", "-p", "no:cacheprovider", f"--basetemp={scratch / 't'}"]
    options += ["-x"] if request["stop"] else []
    plugins = [Recorder(scratch / "cases"), Tiers(request["tests"])]
    code = pytest.main([*options, *request["tests"]], plugins)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code))


def answer(request: dict[str, Any]) -> Answer:
    """Fork, run tests in the child within the time limit, and end all that it started."""
    global _child
    began = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix="mutant-"))
    _child = os.fork()
    if _child == 0:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            _run_child(request, scratch)
        finally:
            os._exit(99)
    status: int | None = None
    while time.monotonic() - began < request["limit_s"]:
        pid, waited = os.waitpid(_child, os.WNOHANG)
        if pid:
            status = os.waitstatus_to_exitcode(waited)
            break
        time.sleep(_POLL_S)
    # its group outlives it where a test left processes
    with contextlib.suppress(ProcessLookupError):
        os.killpg(_child, signal.SIGKILL)
    if status is None:
        os.waitpid(_child, 0)
    _child = 0
    found = scratch / "cases"
    lines = found.read_text(encoding="utf-8").splitlines() if found.exists() else []
    records = [json.loads(line) for line in lines]
    shutil.rmtree(scratch, ignore_errors=True)
    return Answer(
        status=status,
        collection=[record["collection"] for record in records if "collection" in record],
        cases=[record["case"] for record in records if "case" in record],
        seconds=round(time.monotonic() - began, 2),
    )


def _end(*_: Any) -> None:
    if _child:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(_child, signal.SIGKILL)
    os._exit(1)


def main() -> None:
    """Answer requests until there are no more."""
    signal.signal(signal.SIGTERM, _end)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for module in sys.argv[1:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
