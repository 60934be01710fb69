"""Memory that requests have freed goes back to the system: the C library keeps it otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from specc.system.allocator import give_back

# bytes more than there were after the last time, and seconds between two looks
_GROWTH_BYTES, _EVERY_S = 8 << 20, 5.0
# M_ARENA_MAX of glibc's malloc.h
_ARENA_MAX = -8


def resident_bytes() -> int | None:
    """Of this process; None where the system does not tell."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def forget_garbage() -> None:
    """Let the collection of garbage never look again at what is there now.

    Millions of objects of torch and of the engine: each full collection takes 0.2 s over them, with
    the interpreter's lock, and a request with ten thousand values brings one about.
    """
    gc.collect()
    gc.freeze()


def share_heaps() -> bool:
    """Let all threads to come share two heaps of the C library; False where it has no such setting.

    Else each of them has one, and keeps in it what lies between what requests have freed. What the
    user has set (MALLOC_ARENA_MAX) stays.
    """
    if os.environ.get("MALLOC_ARENA_MAX"):
        return True
    try:
        return bool(ctypes.CDLL(None).mallopt(_ARENA_MAX, 2))
    except (AttributeError, OSError):
        return False


async def keep_memory_low(
    resident: Callable[[], int | None] = resident_bytes,
    trim: Callable[[], bool] = give_back,
    every_s: float = _EVERY_S,
) -> None:
    """Give free memory back whenever the process has grown; until cancelled, or of no use.

    Args:
        resident: bytes that the process has.
        every_s: seconds between two looks.
    """
    level: int | None = None
    while True:
        await asyncio.sleep(every_s)
        now = resident()
        if now is None:
            return
        if level is None or now < level:
            level = now
        elif now > level + _GROWTH_BYTES:
            if not await asyncio.to_thread(trim):
                return
            level = resident() or now


@contextlib.asynccontextmanager
async def memory_kept_low() -> AsyncIterator[None]:
    """`keep_memory_low`, while this is open."""
    task = asyncio.ensure_future(keep_memory_low())
    try:
        yield
    finally:
        task.cancel()
