"""Progress of a compilation: a bar a phase on a terminal, a line a phase elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from specc.cli_render import make_console

if TYPE_CHECKING:
    from specc.progress import ProgressEvent


class _SecondsColumn(ProgressColumn):
    """Time of a phase: running, then final as the compiler measured it."""

    max_refresh = 0.1

    def render(self, task: Task) -> Text:
        return Text(f"{task.fields['seconds'] or task.elapsed or 0.0:6.1f} s")


class Bars:
    """Listens to a compilation and draws its phases on standard error, a terminal."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description:<24}"),
            BarColumn(bar_width=30),
            _SecondsColumn(),
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
    """Listens to a compilation and writes `phase … 1.2 s`, for logs and pipes."""

    def __init__(self) -> None:
        self._is_open = False

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
            self._write(f"{event.phase} … ")

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


def make_listener() -> Bars | Lines:
    """Bars where standard error is a terminal, else lines."""
    return Bars() if sys.stderr.isatty() else Lines()
