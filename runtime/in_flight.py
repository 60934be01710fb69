"""The loop of an engine: schedule, run, postprocess; one step ahead of the results if it can."""

from __future__ import annotations

from collections import deque

from specc.runtime.captured_step import PendingStep
from specc.runtime.runner import Runner, RunResult
from specc.runtime.scheduler import Batch, Scheduler


class InFlight:
    """Iterations, and the steps that are queued on the device: none, one, or two.

    Where the next step is certain to be the last one again, it is queued before the host waits for
    results. So the device runs step n + 1 while the host appends the tokens of step n, decodes
    them, looks for stop strings and hands them out. Who ends in step n has a row in step n + 1
    that nobody reads; the blocks of that row stay taken until the step is done.

    Args:
        scheduler: picks batches and commits their results.
        runner: runs or queues them.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._queued: deque[tuple[Batch, PendingStep]] = deque()

    def advance(self) -> bool:
        """Bring all requests one iteration further; False where none can run."""
        if not self._queued:
            batch = self._scheduler.schedule()
            if not batch.prefill and not batch.groups:
                return False
            pending = self._runner.queue(batch)
            if pending is None:
                self._scheduler.postprocess(batch, self._runner.run(batch))
                return True
            self._enter(batch, pending)
        self._queue_ahead()
        self._finish_oldest()
        return True

    def settle(self) -> None:
        """Wait for what is queued, where nobody is left whose next iteration would do it."""
        while self._queued and not self._scheduler.running:
            self._finish_oldest()

    def _queue_ahead(self) -> None:
        """Queue the step behind the only one that is queued, where both are certain to be alike."""
        batch, pending = self._queued[-1]
        if len(self._queued) == 1 and pending.can_go_on and self._scheduler.repeats(batch):
            self._enter(batch, pending.step.submit_next(pending.batch))

    def _finish_oldest(self) -> None:
        batch, pending = self._queued[0]
        result = RunResult(steps=[pending.result()])
        # not before: who interrupts the wait finds the step still queued
        self._queued.popleft()
        self._scheduler.postprocess(batch, result)

    def _enter(self, batch: Batch, pending: PendingStep) -> None:
        self._queued.append((batch, pending))
        self._scheduler.hold(batch)
