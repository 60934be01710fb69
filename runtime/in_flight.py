"""The loop of an engine: schedule, run, postprocess; one iteration ahead of results if it can."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

from specc.runtime.runner import Runner
from specc.runtime.scheduling.batch import Batch, PendingBatch
from specc.runtime.scheduling.beside import ALONE, Beside
from specc.runtime.scheduling.scheduler import Scheduler

# steps in a row: of what is paid once for all of them, each has an eighth by then, and more would
# gain nothing
_MOST = 8


class Queued(NamedTuple):
    """A batch that the device has, and where its results will be."""

    batch: Batch
    pending: PendingBatch


class StepPace:
    """Seconds of the last steps, by plan and number of requests.

    Args:
        interval_s: seconds after which requests are looked at again; 0 is after each step.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._seconds: dict[tuple[str, int], float] = {}

    def most(self, batch: Batch) -> int:
        """Steps of the batch that end before requests are to be looked at; 1 where unknown."""
        if not self._interval_s or len(batch.groups) != 1:
            return 1
        seconds = self._seconds.get(_kind(batch))
        return 1 if seconds is None else max(1, min(_MOST, int(self._interval_s / seconds)))

    def took(self, batch: Batch, seconds: float, num_steps: int) -> None:
        """Learn how long steps of this kind take.

        Args:
            seconds: of all steps.
            num_steps: 1 or more.
        """
        if self._interval_s and len(batch.groups) == 1 and not batch.prefill:
            self._seconds[_kind(batch)] = seconds / num_steps


def _kind(batch: Batch) -> tuple[str, int]:
    group = batch.groups[0]
    return group.plan.name, len(group.requests)


class InFlight:
    """Iterations, and those that are queued on the device: none, one, or two.

    Before the host waits for results, it queues the next iteration wherever that can be chosen
    without them: prompts, and the steps of all plans. So the device runs iteration n + 1 while the
    host appends the tokens of iteration n, decodes them, looks for stop strings and hands them out.
    A sequence that ends in iteration n has a row in iteration n + 1 that nothing reads; the blocks
    of that row stay taken until it is done. Where masks of iteration n + 1 follow from the results
    of n, it is queued up to its verification, or to the first pass of a draft that obeys a grammar;
    where its drafter says how much is verified, its draft alone is. The rest is queued when these
    are committed, before n + 2.

    Whatever ends a call early (a wait or an operator that fails, a detokenizer, Ctrl-C) may leave
    the device ahead of what was committed. So the next call waits for everything that is queued,
    gives it up, and goes on from what was committed. An interrupt meanwhile changes nothing: the
    call after it starts over.

    `queued` holds the batches that the device has and whose results nobody has read, in order.
    `num_iterations` counts them, `num_ahead` those that were queued before the results of the one
    before were read, `num_beside` those that were queued beside batches of other requests.

    Where the target has stages, batches of disjoint requests are in flight instead, as many as
    there are stages: while one of these computes a batch, the one before it has the next. A batch
    has an equal part of all requests that run, and each has steps of its own. Policies that need
    the results of all steps before they choose have one batch at a time.

    What the host itself runs is looked at after every step, or after several where these follow
    from nothing that the host decides (`Scheduler.steps_in_a_row`): it takes the interpreter, whose
    code the weights of a step have driven out of the caches, about a third of a millisecond to come
    back to. A sequence that ends in the first of them has no part in what the others bring.

    Args:
        scheduler: picks batches and commits their results.
        num_batches: of disjoint requests in flight, of a target in stages; None is another target.
        interval_s: seconds that steps in a row may take before requests are looked at; 0 has none.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        num_batches: int | None = None,
        interval_s: float = 0.0,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self.num_batches = num_batches
        self._pace = StepPace(interval_s)
        self.queued: deque[Queued] = deque()
        self.num_iterations = self.num_ahead = self.num_beside = 0
        # when the last iteration had run, if it ran here and nothing has come between
        self._last_end_s: float | None = None
        # False within a call, and where one ended early
        self._is_whole = True

    def advance(self) -> bool:
        """Bring all requests one iteration further; False where none can run."""
        self._begin()
        has_run = self._advance()
        self._is_whole = True
        return has_run

    def settle(self) -> None:
        """Wait for what is queued, where no next iteration would, or a failure has spoilt it."""
        self._begin()
        while self.queued and not self._scheduler.running:
            self.queued[0].pending.complete()
            self._finish_oldest()
        self._is_whole = True

    def finish(self) -> None:
        """Commit all that is queued, and queue nothing: no step is in flight after it."""
        self._begin()
        while self.queued:
            self.queued[0].pending.complete()
            self._finish_oldest()
        self._last_end_s = None
        self._is_whole = True

    @property
    def is_idle(self) -> bool:
        """No request runs or waits, and nothing is queued."""
        return not self.queued and not self._scheduler.has_work

    def _begin(self) -> None:
        """Start from what was committed, if the call before this one ended early."""
        if not self._is_whole:
            self._runner.wait()
            self._last_end_s = None
            self.queued.clear()
            self._scheduler.recover()
        self._is_whole = False

    def _advance(self) -> bool:
        if not self.queued:
            batch = self._scheduler.schedule(
                ALONE if self.num_batches is None else Beside(most=self._most_beside)
            )
            if not batch.prefill and not batch.groups:
                self._last_end_s = None
                return False
            self.num_iterations += 1
            pending = self._runner.begin(batch, self._steps_of(batch))
            assert pending is not None, "no results are on their way"
            if not pending.is_queued:
                self._run(batch, pending)
                return True
            self._last_end_s = None
            self._hold(batch, pending)
        # nothing is queued before it any more
        self.queued[0].pending.complete()
        if self.num_batches is None:
            self._queue_ahead()
        else:
            self._queue_beside()
        self._finish_oldest()
        return True

    def _steps_of(self, batch: Batch) -> int:
        """How often the steps of a batch run before anybody has to look at the requests."""
        count = self._pace.most(batch)
        if count == 1 or not self._runner.can_repeat(batch):
            return 1
        return self._scheduler.steps_in_a_row(batch, count)

    def _run(self, batch: Batch, pending: PendingBatch) -> None:
        """Run a batch here, and take over the results."""
        begin_s = time.perf_counter()
        results = pending.results()
        end_s = time.perf_counter()
        self._pace.took(batch, end_s - begin_s, len(results))
        if len(results) > 1:
            self.num_iterations += len(results) - 1
            # a request that ends by the first of them keeps its blocks for the last
            for _ in results:
                self._scheduler.hold(batch)
        if self._last_end_s is not None:
            for result in results:
                result.wall_s = (end_s - self._last_end_s) / len(results)
        for result in results:
            self._scheduler.postprocess(batch, result)
        # after the last request nobody knows for how long the host does other things
        self._last_end_s = end_s if self._scheduler.running else None

    def _queue_ahead(self) -> None:
        """Queue the iteration after the only one that is queued, where it needs no results."""
        if len(self.queued) != 1:
            return
        batch = self._scheduler.schedule_ahead([queued.batch for queued in self.queued])
        if batch is not None and (pending := self._runner.begin(batch)) is not None:
            self._hold(batch, pending)
            self.num_iterations += 1
            self.num_ahead += 1

    def _queue_beside(self) -> None:
        """Queue batches of requests that have no part in those that are queued."""
        while len(self.queued) < self._most_beside:
            in_flight = (queued.batch for queued in self.queued)
            batch = self._scheduler.schedule(Beside(in_flight, self._most_beside))
            if not batch.prefill and not batch.groups:
                return
            pending = self._runner.begin(batch)
            assert pending is not None, "a target in stages takes every batch"
            self._hold(batch, pending)
            self.num_iterations += 1
            self.num_beside += 1

    @property
    def _most_beside(self) -> int:
        """Batches that may be in flight together, as the policy is now."""
        return (self.num_batches or 1) if self._scheduler.may_look_ahead else 1

    def _hold(self, batch: Batch, pending: PendingBatch) -> None:
        self._scheduler.hold(batch)
        self.queued.append(Queued(batch, pending))

    def _finish_oldest(self) -> None:
        batch, pending = self.queued[0]
        (result,) = pending.results()
        self.queued.popleft()
        self._scheduler.postprocess(batch, result)
