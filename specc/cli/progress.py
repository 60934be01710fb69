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
# a line in a log says how far a phase is after so many seconds, if it is so much further; and after
# so many in any case
_SECONDS_BETWEEN_COUNTS, _LEAST_STEP, _LONGEST_SILENCE_S = 10.0, 0.1, 60.0
# before that, nobody can say how long the rest will take
_LEAST_ELAPSED_S = 2.0


class _SecondsColumn(ProgressColumn):
    """Time of a phase: running, then final as the compiler measured it."""

    max_refresh = 0.1

    def render(self, task: Task) -> Text:
        return Text(f"{task.fields['seconds'] or task.elapsed or 0.0:6.1f} s")


class _CountColumn(ProgressColumn):
    """How much of a phase is done, where that can be counted, and how long the rest will take."""

    def render(self, task: Task) -> Text:
        if task.finished or not task.total:
            return Text("")
        done, total = int(task.completed), int(task.total)
        return Text(count_text(done, total, task.elapsed or 0.0, task.fields["what"]))


def count_text(done: int, total: int, elapsed_s: float = 0.0, what: str = "") -> str:
    """`2 of 3`, and of bytes a share; then what comes next, and the seconds of the rest.

    Args:
        done: units.
        total: units in all.
        elapsed_s: since the phase began: the rest is taken to be as slow.
        what: the unit that is being worked on.
    """
    parts = [f"{done} of {total}" if total <= _MOST_COUNTED else f"{done / total:.0%}"]
    parts += [what] * bool(what)
    if 0 < done < total and elapsed_s >= _LEAST_ELAPSED_S:
        parts.append(f"about {_duration(elapsed_s * (total - done) / done)} left")
    return ", ".join(parts)


def _duration(seconds: float) -> str:
    """As exact as an estimate is: `4 s`, `50 s`, `3 min`, `2 h 10 min`."""
    if seconds < 10:
        return f"{max(1, round(seconds))} s"
    if seconds < 90:
        return f"{10 * round(seconds / 10)} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


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
                event.phase, total=None, seconds=None, what=""
            )
        task = self._progress.tasks[self._tasks[event.phase]].id
        if event.seconds is not None:
            self._progress.update(task, total=1, completed=1, seconds=event.seconds)
            self._progress.stop_task(task)
        elif event.total:
            self._progress.update(task, total=event.total, completed=event.done, what=event.what)


class Lines:
    """Listens to a compilation and writes `phase … 1.2 s`, for logs and pipes.

    A phase that takes longer and can be counted says how far it is, now and then:
    `phase … 1 of 3, about 20 s left … 30.1 s`.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._is_open = False
        self._clock = clock
        self._began_at = self._told_at = 0.0
        self._told_share = 0.0

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
            self._began_at = self._told_at = self._clock()
            self._told_share = 0.0
            self._write(f"{event.phase} … ")
        elif event.total and self._is_worth_telling(event.done / event.total):
            elapsed_s = self._told_at - self._began_at
            self._write(f"{count_text(event.done, event.total, elapsed_s, event.what)} … ")

    def _is_worth_telling(self, share: float) -> bool:
        now = self._clock()
        silent_s = now - self._told_at
        is_further = share - self._told_share >= _LEAST_STEP
        if silent_s < (_SECONDS_BETWEEN_COUNTS if is_further else _LONGEST_SILENCE_S):
            return False
        self._told_at, self._told_share = now, share
        return True

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


def make_listener() -> Bars | Lines:
    """Bars where standard error is a terminal, else lines."""
    return Bars() if sys.stderr.isatty() else Lines()
