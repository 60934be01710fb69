"""What a long operation says about itself; the command line draws it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, overload

T = TypeVar("T")


@dataclass(frozen=True)
class ProgressEvent:
    """One state of an operation.

    Args:
        phase: `trace target`, `write target weights`, …
        done: units done, 0 where they cannot be counted.
        total: units in all, 0 where they cannot be counted.
        seconds: time of the phase; None while it runs.
        what: the unit that is being worked on, where units have names.
    """

    phase: str
    done: int = 0
    total: int = 0
    seconds: float | None = None
    what: str = ""


class Advance(Protocol):
    """Told how far a phase is."""

    def __call__(self, done: int, total: int, what: str = "") -> None: ...


def ignore(done: int, total: int, what: str = "") -> None:
    """Nobody wants to know."""


@dataclass
class PhaseTimer:
    """Times the phases of an operation and tells a listener.

    Args:
        seconds: of the phases that have ended.
        num_phases: that the operation will have; they are numbered then. 0: nobody knows.
    """

    listen: Callable[[ProgressEvent], None] = lambda event: None
    seconds: dict[str, float] = field(default_factory=dict)
    num_phases: int = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[Advance]:
        """Run a phase; yields a function that takes (units done, units in all, name of the next).

        An exception ends it without an event.
        """
        start = time.perf_counter()
        shown = name
        if self.num_phases:
            shown = f"{len(self.seconds) + 1}/{self.num_phases} {name}"
        self.listen(ProgressEvent(shown))
        yield lambda done, total, what="": self.listen(ProgressEvent(shown, done, total, what=what))
        self.seconds[name] = time.perf_counter() - start
        self.listen(ProgressEvent(shown, seconds=self.seconds[name]))


class Counted(Sequence[T]):
    """A sequence that tells how far somebody is who iterates over it.

    Args:
        advance: told before each item, and after the last one.
    """

    def __init__(self, items: Sequence[T], advance: Advance) -> None:
        self._items = items
        self._advance = advance

    def __iter__(self) -> Iterator[T]:
        for done, item in enumerate(self._items):
            self._advance(done, len(self._items))
            yield item
        self._advance(len(self._items), len(self._items))

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        return self._items[index]
