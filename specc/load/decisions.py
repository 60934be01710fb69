"""What the goodput policy decided, and what came of it: a JSON line for every decision."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from specc.runtime.policies.base import Decision, Policy
from specc.speculation.metrics import SpecStats
from specc.system.files import output_error

if TYPE_CHECKING:
    from specc.runtime.backends.step_io import StepResult
    from specc.runtime.scheduling.batch import Batch, RunResult, StepGroup
    from specc.runtime.scheduling.request import Request
    from specc.runtime.scheduling.scheduler import Scheduler


class TraceFile:
    """JSON lines of all runs of a benchmark.

    Raises:
        OutputError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file: TextIO = path.open("w", encoding="utf-8")
        except OSError as error:
            raise output_error(path, error) from error

    def write(self, line: Mapping[str, Any]) -> None:
        """Raises OutputError: the file cannot be written."""
        try:
            self._file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise output_error(self._path, error) from error

    def close(self) -> None:
        """Raises OutputError: the file cannot be written."""
        try:
            self._file.close()
        except OSError as error:
            raise output_error(self._path, error) from error


class DecisionTrace:
    """Gathers the iterations of each decision.

    Args:
        write: called with a line for every decision, once the next one or the end is there.
        run: fields of every line, such as the rate.
    """

    def __init__(
        self, write: Callable[[dict[str, Any]], object], run: Mapping[str, Any] | None = None
    ) -> None:
        self._write = write
        self._run = dict(run or {})
        self._decision: Decision | None = None
        self._line: dict[str, Any] = {}
        self._seconds: tuple[list[float], list[float]] = ([], [])

    def take(
        self,
        decision: Decision,
        *,
        time_s: float,
        running: int,
        waiting: int,
        seconds: float,
        num_tokens: int,
        num_prompt_tokens: int,
    ) -> None:
        """Take an iteration in which requests decoded.

        Args:
            decision: of the policy, in force while it ran.
            time_s: when it began, seconds from the start of the load.
            running: requests that run.
            waiting: requests that wait.
            seconds: it took.
            num_tokens: that came in it, the first ones of prompts included.
            num_prompt_tokens: that came along.
        """
        if decision is not self._decision:
            self.end()
            self._decision = decision
            self._line = self._run | {
                "time_s": round(time_s, 6),
                "running": running,
                "waiting": waiting,
                "plans": dict(decision.plans),
                "is_probe": decision.is_probe,
                "acceptance": decision.acceptance,
                "predicted_s": decision.seconds,
                "predicted_tokens": decision.tokens,
                "iterations": 0,
                "tokens": 0,
                "prompt_tokens": 0,
            }
        self._line["iterations"] += 1
        self._line["tokens"] += num_tokens
        self._line["prompt_tokens"] += num_prompt_tokens
        self._seconds[bool(num_prompt_tokens)].append(seconds)

    def end(self) -> None:
        """Write the last decision."""
        if self._decision is None:
            return
        alone, mixed = map(_mean, self._seconds)
        # the prediction leaves out what prompts take
        self._write(self._line | {"observed_s": alone, "observed_with_prompts_s": mixed})
        self._decision, self._seconds = None, ([], [])


class TracedPolicy(Policy):
    """A policy that decides as another one does, and takes down what came of it.

    Args:
        policy: that has a `decision`.
    """

    def __init__(self, policy: Policy, scheduler: Scheduler, trace: DecisionTrace) -> None:
        self._policy = policy
        self._scheduler = scheduler
        self._trace = trace
        self._begin_s = self._last_s = time.perf_counter()
        self._num_tokens = scheduler.stats.num_output_tokens
        # requests that run, and that wait, when it was asked
        self._running = self._waiting = 0

    @property
    def needs_results(self) -> bool:
        return self._policy.needs_results

    @property
    def decision(self) -> Decision | None:
        return self._policy.decision

    def choose(self, num_running: int, stats: SpecStats) -> str:
        self._last_s = time.perf_counter()
        return self._policy.choose(num_running, stats)

    def choose_each(self, requests: list[Request], stats: SpecStats) -> Sequence[str] | None:
        self._last_s = time.perf_counter()
        self._running, self._waiting = len(self._scheduler.running), len(self._scheduler.waiting)
        return self._policy.choose_each(requests, stats)

    def observe(self, group: StepGroup, step: StepResult) -> None:
        self._policy.observe(group, step)

    def observe_batch(self, batch: Batch, result: RunResult) -> None:
        now_s, num_tokens = time.perf_counter(), self._scheduler.stats.num_output_tokens
        decision = self._policy.decision
        if batch.groups and decision is not None:
            self._trace.take(
                decision,
                time_s=self._last_s - self._begin_s,
                running=self._running,
                waiting=self._waiting,
                # of a step that was queued after another one, from the end of that one on
                seconds=now_s - self._last_s,
                num_tokens=num_tokens - self._num_tokens,
                num_prompt_tokens=sum(span.end - span.start for span in batch.prefill),
            )
        self._last_s, self._num_tokens = now_s, num_tokens
        self._policy.observe_batch(batch, result)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
