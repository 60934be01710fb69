"""The loop of an engine: schedule, run, postprocess; one step ahead of the results if it can."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from specc.runtime.runner import Runner
from specc.runtime.scheduler import Scheduler


class InFlight:
    """Iterations, and the steps that are queued on the device: none, one, or two.

    Where the next step is certain to be the last one again, it is queued before the host waits for
    results. So the device runs step n + 1 while the host appends the tokens of step n, decodes
    them, looks for stop strings and hands them out. Who ends in step n has a row in step n + 1
    that nobody reads; the blocks of that row stay taken until the step is done.

    Whatever ends a call early (a wait or an operator that fails, a detokenizer, Ctrl-C) may leave
    the device ahead of what was committed. So the next call waits for everything that is queued,
    gives it up, and goes on from what was committed. An interrupt meanwhile changes nothing: the
    call behind it starts over.

    Args:
        scheduler: picks batches and commits their results.
        runner: runs or queues them.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self._scheduler = scheduler
        self._runner = runner
        # False within a call, and where one ended early
        self._is_whole = True

    def advance(self) -> bool:
        """Bring all requests one iteration further; False where none can run."""
        with self._as_a_whole():
            if not self._scheduler.queued:
                batch = self._scheduler.schedule()
                if not batch.prefill and not batch.groups:
                    return False
                pending = self._runner.queue(batch)
                if pending is None:
                    self._scheduler.postprocess(batch, self._runner.run(batch))
                    return True
                self._scheduler.hold(batch, pending)
            self._queue_ahead()
            self._finish_oldest()
            return True

    def settle(self) -> None:
        """Wait for what is queued, where no next iteration would, or a failure has spoilt it."""
        with self._as_a_whole():
            while self._scheduler.queued and not self._scheduler.running:
                self._finish_oldest()

    @contextlib.contextmanager
    def _as_a_whole(self) -> Iterator[None]:
        """What runs in here ends, or the next call starts from what was committed."""
        if not self._is_whole:
            for _, pending in self._scheduler.queued:
                pending.result()
            self._scheduler.forget_queued()
        self._is_whole = False
        yield
        self._is_whole = True

    def _queue_ahead(self) -> None:
        """Queue the step behind the only one that is queued, where both are certain to be alike."""
        scheduler = self._scheduler
        batch, pending = scheduler.queued[-1]
        if len(scheduler.queued) == 1 and pending.can_go_on and scheduler.repeats(batch):
            scheduler.hold(batch, pending.step.submit_next(pending.batch, pending.places))

    def _finish_oldest(self) -> None:
        batch, pending = self._scheduler.queued[0]
        self._scheduler.postprocess(batch, self._runner.finish(batch, pending))
