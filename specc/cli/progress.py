"""Progress of a compilation: a bar a phase on a terminal, a line a phase elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from specc.cli.render import make_console

if TYPE_CHECKING:
    from specc.progress import ProgressEvent


# units that are worth a number each: programs, not bytes
_MOST_COUNTED = 999
# a line in a log says how far a phase is as often as this
_SECONDS_BETWEEN_COUNTS = 2.0


class _SecondsColumn(ProgressColumn):
    """Time of a phase: running, then final as the compiler measured it."""

    max_refresh = 0.1

    def render(self, task: Task) -> Text:
        return Text(f"{task.fields['seconds'] or task.elapsed or 0.0:6.1f} s")


class _CountColumn(ProgressColumn):
    """How much of a phase is done, where that can be counted."""

    def render(self, task: Task) -> Text:
        if task.finished or not task.total:
            return Text("")
        return Text(count_text(int(task.completed), int(task.total)))


def count_text(done: int, total: int) -> str:
    """`2 of 3`, and of bytes a share."""
    return f"{done} of {total}" if total <= _MOST_COUNTED else f"{done / total:.0%}"


class Bars:
    """Listens to a compilation and draws its phases on standard error, a terminal."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description:<24}"),
            BarColumn(bar_width=30),
            _SecondsColumn(),
            _CountColumn(),
            console=make_console(stderr=True),
        )
        self._tasks: dict[str, int] = {}

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        # a phase that was cut short must not go on ticking
        for task in self._progress.tasks:
            self._progress.stop_task(task.id)
        self._progress.stop()

    def __call__(self, event: ProgressEvent) -> None:
        if event.phase not in self._tasks:
            # without a total the bar pulses
            self._tasks[event.phase] = self._progress.add_task(
                event.phase, total=None, seconds=None
            )
        task = self._progress.tasks[self._tasks[event.phase]].id
        if event.seconds is not None:
            self._progress.update(task, total=1, completed=1, seconds=event.seconds)
            self._progress.stop_task(task)
        elif event.total:
            self._progress.update(task, total=event.total, completed=event.done)


class Lines:
    """Listens to a compilation and writes `phase … 1.2 s`, for logs and pipes.

    A phase that takes longer and can be counted says how far it is: `phase … 1 of 3 … 8.1 s`.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._is_open = False
        self._clock = clock
        self._told_at = 0.0

    def __enter__(self) -> Lines:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._is_open:
            self._write("\n")

    def __call__(self, event: ProgressEvent) -> None:
        if event.seconds is not None:
            self._write(f"{event.seconds:.1f} s\n")
            self._is_open = False
        elif not self._is_open:
            # first the state, then the text: Ctrl-C may come between them
            self._is_open = True
            self._told_at = self._clock()
            self._write(f"{event.phase} … ")
        elif event.total and self._clock() - self._told_at >= _SECONDS_BETWEEN_COUNTS:
            self._told_at = self._clock()
            self._write(f"{count_text(event.done, event.total)} … ")

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


def make_listener() -> Bars | Lines:
    """Bars where standard error is a terminal, else lines."""
    return Bars() if sys.stderr.isatty() else Lines()
