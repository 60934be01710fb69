"""What a long operation says about itself; the command line draws it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ProgressEvent:
    """One state of an operation.

    Args:
        phase: `trace target`, `write target weights`, …
        done: units done, 0 where they cannot be counted.
        total: units in all, 0 where they cannot be counted.
        seconds: time of the phase; None while it runs.
    """

    phase: str
    done: int = 0
    total: int = 0
    seconds: float | None = None


@dataclass
class PhaseTimer:
    """Times the phases of an operation and tells a listener.

    Args:
        listen: called with every event.
    """

    listen: Callable[[ProgressEvent], None] = lambda event: None
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[Callable[[int, int], None]]:
        """Run a phase; yields a function that takes (units done, units in all)."""
        start = time.perf_counter()
        self.listen(ProgressEvent(name))
        yield lambda done, total: self.listen(ProgressEvent(name, done, total))
        self.seconds[name] = time.perf_counter() - start
        self.listen(ProgressEvent(name, seconds=self.seconds[name]))
