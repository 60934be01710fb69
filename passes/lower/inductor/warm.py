"""The process that has imported Inductor, which takes as long as compiling a small program does."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping

from specc.system.warm_process import WarmProcess

# what torch and its compiler read when they are imported
_READ_AT_IMPORT = (
    "AOT",
    "ATEN_",
    "CC",
    "CXX",
    "INDUCTOR",
    "LD_",
    "OMP_",
    "PATH",
    "PYTHON",
    "TORCH",
)
_MODULE = "specc.passes.lower.inductor.worker"
_lock = threading.Lock()
_holders = 0
_kept: tuple[dict[str, str], WarmProcess] | None = None


@contextlib.contextmanager
def keep_inductor() -> Iterator[None]:
    """Let programs that are compiled inside of the block, in any thread, share one process."""
    global _holders, _kept
    with _lock:
        _holders += 1
    try:
        yield
    finally:
        ended = None
        with _lock:
            _holders -= 1
            if not _holders:
                ended, _kept = _kept, None
        if ended is not None:
            ended[1].close()


@contextlib.contextmanager
def warm_inductor(environment: Mapping[str, str]) -> Iterator[WarmProcess]:
    """The process that is kept, or one for this block alone: where none is kept, or with others of
    the variables that count when Inductor is imported.

    Args:
        environment: variables besides those of this process.
    """
    global _kept
    variables = {**os.environ, **environment}
    settings = {k: v for k, v in variables.items() if k.startswith(_READ_AT_IMPORT)}
    with _lock:
        if _holders and _kept is None:
            _kept = settings, WarmProcess(_MODULE, environment)
        kept = _kept[1] if _kept is not None and _kept[0] == settings else None
    if kept is not None:
        yield kept
        return
    with contextlib.closing(WarmProcess(_MODULE, environment)) as own:
        yield own
