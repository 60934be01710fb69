"""What the C library does with memory that is freed."""

from __future__ import annotations

import ctypes
import threading

# of malloc.h
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_HEAP_PIECE = 32 << 20  # larger ones are always mapped by themselves
_MOST_OF_INT = 2**31 - 1

_lock = threading.Lock()
_kept = 2 * _HEAP_PIECE  # glibc comes to that by itself where pieces are large


def keep_freed_memory(count: int) -> bool:
    """Have this process keep `count` bytes that are freed, or more if an earlier call said so.

    A pass frees what the next one takes again. glibc gives freed memory at the end of its heap, and
    large pieces, back to the system, which clears every page of it when it is taken anew: a fourth
    of the time of a prompt of 200 tokens on one thread (docs/cpu.md).

    Args:
        count: bytes; for an engine, its workspace.
    Returns:
        whether the C library was told; False where it is not glibc.
    """
    global _kept
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    with _lock:
        _kept = max(_kept, count)
        trim = min(_kept, _MOST_OF_INT)
        return bool(mallopt(_TRIM_THRESHOLD, trim) and mallopt(_MMAP_THRESHOLD, _HEAP_PIECE))
