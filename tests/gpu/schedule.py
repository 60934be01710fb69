"""Runs the stages of a command in time: a process a task, and every line of it into the report."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.gpu.report import DONE, NOT_AVAILABLE, Report
from tests.gpu.results import LONGEST, LOST
from tests.gpu.tasks import ROOT, Stage, Task

POLL_S = 0.1
# from the end of a task's work to that of its process, and from a signal to its effect
GRACE_S = 10.0
# the same under a sanitizer, which looks at all that is freed
SANITIZER_GRACE_S = 60.0
# for the stack of a process that hangs, before it is killed
STACK_S = 1.5
# processes that go on with one task
MOST_ATTEMPTS = 12
CUT_OFF = "cut off: no time left"
SANITIZER_OPTIONS = (
    "--tool", "memcheck", "--error-exitcode", "9",
    # calls that fail and are handled, as torch and Triton make some, are no faults of a kernel
    "--report-api-errors", "no",
    # not the compilers that Triton starts
    "--target-processes", "application-only",
)  # fmt: skip


class Process:
    """One attempt at a task.

    Args:
        directory: for its files; nobody else's.
        device: see `results.Device`.
    """

    def __init__(
        self,
        task: Task,
        known: Mapping[str, Any],
        directory: Path,
        environment: Mapping[str, str],
        device: str,
    ) -> None:
        self.task = task
        self.known = frozenset(known)
        self.current: str | None = None
        self.is_done = self.is_lost = False
        self.notes: dict[str, Any] = {}
        directory.mkdir(parents=True)
        self._events = directory / "events"
        self._events.touch()
        self._output = directory / "output"
        self._read = 0
        job = {
            "entry": task.entry,
            "arguments": task.arguments,
            "events": str(self._events),
            "known": dict(known),
            "device": device,
        }
        file = directory / "job.json"
        file.write_text(json.dumps(job), encoding="utf-8")
        tool = [task.sanitizer, *SANITIZER_OPTIONS] if task.sanitizer else []
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [*tool, sys.executable, "-P", "-m", "tests.gpu.child", str(file)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environment, **task.environment},
                cwd=ROOT,
                # a group of its own: what it starts ends with it
                start_new_session=True,
            )
        self.begin_s = self.event_s = time.monotonic()

    @property
    def status(self) -> int | None:
        return self._process.poll()

    def events(self) -> list[dict[str, Any]]:
        """Lines that are whole and were not read before."""
        with self._events.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        if whole:
            self.event_s = time.monotonic()
        return [json.loads(line) for line in whole.splitlines()]

    def output(self) -> str:
        """The end of what it printed, or what surrounds the first lines of a crash's stack."""
        text = self._output.read_bytes()[-64 * LONGEST :].decode(errors="replace")
        place = text.find("Fatal Python error")
        end = len(text) if place < 0 else place + LONGEST // 2
        return text[max(0, end - LONGEST) : end]

    def has_said(self, text: str) -> bool:
        return text in self._output.read_bytes().decode(errors="replace")

    def words_of_tool(self) -> str:
        """The first lines that a sanitizer has printed."""
        text = self._output.read_bytes().decode(errors="replace")
        lines = [line for line in text.splitlines() if line.startswith("=========")]
        return "\n".join(lines)[: LONGEST // 2]

    def wait(self, end: float) -> bool:
        """Whether it ends before a moment of `time.monotonic`."""
        try:
            self._process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True

    def signal(self, number: int) -> None:
        """Tell it, and all that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


class Scheduler:
    """Runs stages; `report` has every result as soon as it is known.

    Args:
        device: see `results.Device`.
        scale: of all times; below 1 in rehearsals.
    """

    def __init__(
        self, report: Report, environment: Mapping[str, str], device: str, scale: float = 1.0
    ) -> None:
        self._report = report
        self._environment = dict(environment)
        self._device = device
        self._scale = scale
        self._running: list[Process] = []
        self._attempts: Counter[str] = Counter()

    def run(self, name: str, stages: Sequence[Stage], limit_s: float) -> str:
        """Run the stages of a command within `limit_s`; returns its state.

        That is `passed`, `failed`, or `incomplete`: nothing failed, but time ran out.
        """
        begin = time.monotonic()
        tasks = [task for stage in stages for task in stage.tasks]
        own: dict[str, Any] = {"state": "running", "limit_s": limit_s}
        own["plan"] = [
            {"seconds": stage.seconds * self._scale, "tasks": [title(t) for t in stage.tasks]}
            for stage in stages
        ]
        self._report.commands[name] = own
        self._report.write()
        planned = 0.0
        try:
            with tempfile.TemporaryDirectory(
                prefix="specc-gpu-", ignore_cleanup_errors=True
            ) as scratch:
                for index, stage in enumerate(stages):
                    planned += stage.seconds * self._scale
                    end = begin + min(planned, limit_s)
                    self._run_stage(stage, end, Path(scratch) / str(index))
        finally:
            self._end(self._running)
            states = {title(t): self._report.task(t.part, t.name)["state"] for t in tasks}
            own |= {"seconds": round(time.monotonic() - begin, 1), "states": states}
            left = {*states.values()} - {*DONE, NOT_AVAILABLE}
            own["state"] = "passed" if not left else "failed"
            if left and left <= {"dropped", "cut"}:
                own["state"] = "incomplete"
            self._report.write()
        return str(own["state"])

    def _end(self, processes: Sequence[Process]) -> None:
        """End processes, all of them in the time that one may take; each may print its stack."""
        for process in processes:
            if process.status is None:
                process.signal(signal.SIGABRT)
        end = time.monotonic() + STACK_S
        for process in processes:
            process.wait(end)
        for process in processes:
            # what it started may live on, too
            process.signal(signal.SIGKILL)
        end = time.monotonic() + GRACE_S
        for process in processes:
            # one that is in the driver, where signals wait, is left behind
            process.wait(end)

    def _run_stage(self, stage: Stage, end: float, scratch: Path) -> None:
        left = [t for t in stage.tasks if not self._report.is_done(t.part, t.name)]
        # what a machine can do is asked again where that is needed: this may be another one
        needed = {(task.part, task.needs) for task in left}
        waiting = deque(t for t in stage.tasks if t in left or (t.part, t.name) in needed)
        # with as many threads each as there are cores here, they wait for each other
        cores = len(os.sched_getaffinity(0))
        threads = max(1, cores // max(1, min(stage.workers, len(waiting))))
        count = 0
        while waiting or self._running:
            while len(self._running) < stage.workers:
                if (task := self._next(waiting)) is None:
                    break
                if end - time.monotonic() < task.least_s * self._scale:
                    self._drop(task)
                    continue
                count += 1
                self._start(task, scratch / str(count), threads)
            is_over = time.monotonic() >= end
            if is_over:
                self._end([process for process in self._running if process.status is None])
            for process in [*self._running]:
                if self._watch(process, is_over):
                    waiting.appendleft(process.task)
            time.sleep(POLL_S)

    def _next(self, waiting: deque[Task]) -> Task | None:
        """Take the first task that waits for no other one; those that wait in vain are done."""
        for task in [*waiting]:
            others = (*waiting, *(process.task for process in self._running))
            if task.needs in [other.name for other in others if other.part == task.part]:
                continue
            waiting.remove(task)
            needed = self._report.task(task.part, task.needs or task.name)
            if task.needs is None or needed["state"] == "passed":
                return task
            if needed["state"] == "dropped":
                self._drop(task)
                continue
            state = "skipped" if needed["state"] == "skipped" else NOT_AVAILABLE
            reason = str(needed.get("reason", needed["state"])).partition("\n")[0]
            found = self._report.task(task.part, task.name)
            found |= {"state": state, "reason": f"{task.part}/{task.needs}: {reason}"}
            print(f"  {title(task)}: {state}", flush=True)
            self._report.write()
        return None

    def _start(self, task: Task, directory: Path, threads: int) -> None:
        found = self._report.task(task.part, task.name)
        self._attempts[title(task)] += 1
        found |= {"state": "running", "attempts": self._attempts[title(task)]}
        found.pop("reason", None)
        environment = {**self._environment, "OMP_NUM_THREADS": str(threads)}
        known = {name: result["value"] for name, result in found["results"].items()}
        self._running.append(Process(task, known, directory, environment, self._device))
        print(f"  {title(task)} …", flush=True)
        self._report.write()

    def _watch(self, process: Process, is_over: bool) -> bool:
        """Take what a process found; end it where it must be; whether another one is to go on."""
        # before its lines are read: none comes afterwards
        status = None if is_over and not process.is_done else process.status
        self._take_events(process)
        now = time.monotonic()
        if process.is_done:
            # what hangs in a destructor has done its work
            grace_s = SANITIZER_GRACE_S if process.task.sanitizer else GRACE_S
            if status is None and not is_over and now - process.event_s < grace_s * self._scale:
                return False
            return self._finish(process, status, None)
        if status is not None:
            return self._finish(process, status, _end_of(status))
        if now - process.event_s > process.task.result_s * self._scale:
            limit = process.task.result_s * self._scale
            return self._finish(process, None, f"hung: nothing came for {limit:.0f} s")
        if is_over:
            self._finish(process, None, CUT_OFF)
        return False

    def _take_events(self, process: Process) -> None:
        events = process.events()
        found = self._report.task(process.task.part, process.task.name)
        for event in events:
            if "begin" in event:
                process.current = event["begin"]
            elif "name" in event:
                process.current = None
                found["results"][event.pop("name")] = event
            elif "note" in event:
                process.notes |= event["note"]
                found |= {k: v for k, v in event["note"].items() if k not in ("skipped", "error")}
            process.is_done |= "done" in event
            process.is_lost |= "lost" in event
        if events:
            found["seconds"] = round(time.monotonic() - process.begin_s, 1)
            self._report.write()

    def _finish(self, process: Process, status: int | None, problem: str | None) -> bool:
        """The end of an attempt: note what is wrong, and say whether another one is to go on."""
        self._running.remove(process)
        self._end([process])
        self._take_events(process)
        task = process.task
        found = self._report.task(task.part, task.name)
        found["seconds"] = round(time.monotonic() - process.begin_s, 1)
        if process.status is None:
            found["left_behind"] = "a process that could not be ended"
        if "skipped" in process.notes:
            found |= {"state": "skipped", "reason": process.notes["skipped"]}
            self._report.write()
            return False
        if task.says is not None:
            return self._finish_probe(process, status, problem)
        # what memcheck finds changes no result of a test
        if task.sanitizer and process.is_done and status != 0:
            # the verdict comes with the end of the process, unless we have ended it
            has_verdict = status not in (None, -signal.SIGABRT, -signal.SIGKILL)
            problem = f"compute-sanitizer: status {status}" if has_verdict else CUT_OFF
        is_cut_off = problem == CUT_OFF
        # where the attempt before this one ended, too, the next one will
        is_new = process.current not in process.known
        has_moved = process.is_lost and is_new
        if problem is not None:
            told = process.notes.get("error") or process.output()
            said = f"{problem}, at {process.current or 'no test'}\n{told}"
            if process.current is not None and not is_cut_off:
                found["results"][process.current] = {"state": "failed", "value": said}
                has_moved = is_new
            elif not process.is_lost:
                found["reason"] = said
        failed = [name for name, x in found["results"].items() if x["state"] == "failed"]
        is_whole = problem is None and found["results"] and not failed
        found["state"] = "passed" if is_whole else "failed"
        if is_cut_off and not failed:
            found["state"] = "cut"
        is_to_go_on = task.is_resumed and has_moved and self._attempts[title(task)] < MOST_ATTEMPTS
        if not is_to_go_on:
            words = f"{len(found['results'])} results, {len(failed)} failed"
            print(f"  {title(task)}: {found['state']} in {found['seconds']} s, {words}", flush=True)
        self._report.write()
        return is_to_go_on

    def _finish_probe(self, process: Process, status: int | None, problem: str | None) -> bool:
        """It passes where it has said what it has to, however it ends; else nothing is at fault."""
        task = process.task
        found = self._report.task(task.part, task.name)
        found["state"] = "passed"
        if not process.has_said(str(task.says)):
            what = problem or f"status {status}, and it did not say: {task.says}"
            told = process.notes.get("error") or process.output()
            found["state"] = NOT_AVAILABLE
            found["reason"] = f"{what}\n{process.words_of_tool()}\n{told}"
        print(f"  {title(task)}: {found['state']} in {found['seconds']} s", flush=True)
        self._report.write()
        return False

    def _drop(self, task: Task) -> None:
        found = self._report.task(task.part, task.name)
        # what an attempt before this one found stays what it is
        has_failed = any(x["state"] == "failed" for x in found.get("results", {}).values())
        state = "failed" if has_failed else "dropped"
        found |= {"state": state, "reason": "no time left for it in this command"}
        print(f"  {title(task)}: {state}, no time left", flush=True)
        self._report.write()


def title(task: Task) -> str:
    return f"{task.part}/{task.name}"


def _end_of(status: int) -> str:
    if status == LOST:
        return "lost its device"
    if status < 0:
        return f"crashed: {signal.Signals(-status).name}"
    return f"ended with status {status}"
