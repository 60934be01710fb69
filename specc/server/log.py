"""The server's log: what repeats is counted instead of told again and again."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

# kinds of messages that are remembered
_MAX_KINDS = 1000


def start_logging(level: str) -> None:
    """Log to standard error, unless this process logs somewhere already."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(RepeatFilter())
    logging.basicConfig(
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        level=logging.WARNING,
        handlers=[handler],
    )
    for name in ("specc", "uvicorn"):
        logging.getLogger(name).setLevel(level.upper())
    if level == "info":  # its own lines say less than those of specc
        logging.getLogger("uvicorn").setLevel(logging.WARNING)


class RepeatFilter(logging.Filter):
    """Lets so many warnings and errors of a kind through; a later one says how many others it was.

    A kind is a place in the code, and for exceptions also their type and where they come from.

    Args:
        burst: of a kind in a period.
        every_s: seconds of a period.
        clock: in seconds; no wall clock, which can jump.
    """

    def __init__(
        self, burst: int = 5, every_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._burst, self._every_s, self._clock = burst, every_s, clock
        # kind → begin of its period, records since
        self._kinds: dict[tuple[object, ...], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        kind, now_s = _kind_of(record), self._clock()
        begin_s, count = self._kinds.pop(kind, (now_s, 0))
        num_hidden = 0
        if now_s - begin_s >= self._every_s:
            num_hidden = max(0, count - self._burst)
            begin_s, count = now_s, 0
        # the kind that was seen last is the last one to be forgotten
        self._kinds[kind] = (begin_s, count + 1)
        while len(self._kinds) > _MAX_KINDS:
            del self._kinds[next(iter(self._kinds))]
        if num_hidden:
            _add(record, f"({num_hidden} more of this kind were not shown)")
        elif count == self._burst - 1:
            _add(record, f"(more of this kind are not shown for {self._every_s:g} s)")
        return count < self._burst


def _kind_of(record: logging.LogRecord) -> tuple[object, ...]:
    place = (record.name, record.levelno, record.pathname, record.lineno)
    if not record.exc_info or record.exc_info[0] is None:
        return place
    trace = record.exc_info[2]
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = None if trace is None else (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
    return (*place, record.exc_info[0], where)


def _add(record: logging.LogRecord, text: str) -> None:
    record.msg, record.args = f"{record.getMessage().rstrip()} {text}", ()
