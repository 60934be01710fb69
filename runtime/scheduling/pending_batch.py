"""An iteration that was queued as a whole: prompts, and the steps of all its groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from specc.runtime.backends.captured.graph_device import Event
from specc.runtime.backends.step import PendingStep, QueuedStep
from specc.runtime.scheduling.run_result import RunResult


class PendingPrefill(NamedTuple):
    """Passes over prompts that were queued.

    Args:
        step: any of the engine, which knows when the host last saw the device's work end.
        end: after the passes.
        begin_s: when they were queued.
        read: what they yield, once they are done.
    """

    step: QueuedStep
    end: Event
    begin_s: float
    read: Callable[[], RunResult]

    def result(self) -> RunResult:
        """Wait for the passes; the seconds are those since the work before them ended."""
        self.end.synchronize()
        return replace(self.read(), prefill_s=self.step.seconds_since(self.begin_s))


@dataclass(frozen=True)
class PendingBatch:
    """A batch that was queued.

    Args:
        read_prefill: waits for its prompts, and tells what they yield.
        steps: of its groups, in their order.
    """

    read_prefill: Callable[[], RunResult]
    steps: list[PendingStep]

    def result(self) -> RunResult:
        """Wait for all of it; once."""
        found = self.read_prefill()
        return replace(found, steps=[step.result() for step in self.steps])
