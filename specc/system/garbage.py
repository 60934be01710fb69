"""How often Python looks for cycles of objects that nobody uses."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

# new objects, and how many collections of a generation come before one of the next older
_RARELY = (200_000, 50, 50)
_lock = threading.Lock()
_holders = 0
_before = gc.get_threshold()


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Look for cycles after 200,000 new objects instead of 700, as long as the block runs.

    Tracing and lowering make millions of objects that live as long as their graph: Python went
    through all of them again and again, an eighth of the time of a compilation from warm caches
    (docs/design/cpu.md). The thresholds are those of the process: of blocks that overlap, in any
    threads, the first sets them and the last gives them back. A process that has turned collections
    off keeps them off.
    """
    global _holders, _before
    with _lock:
        if not _holders:
            _before = gc.get_threshold()
            if 0 < _before[0] < _RARELY[0]:  # 0: turned off
                gc.set_threshold(*_RARELY)
        _holders += 1
    try:
        yield
    finally:
        with _lock:
            _holders -= 1
            # whoever has set others meanwhile keeps them
            if not _holders and gc.get_threshold() == _RARELY:
                gc.set_threshold(*_before)
