"""What the C library does with memory that is freed."""

from __future__ import annotations

import ctypes
import os
import threading

# of malloc.h
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_OF_USERS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
_HEAP_PIECE = 32 << 20  # larger ones are always mapped by themselves
_MOST_OF_INT = 2**31 - 1

_lock = threading.Lock()
_kept = 2 * _HEAP_PIECE  # glibc comes to that by itself where pieces are large


def keep_freed_memory(count: int) -> bool:
    """Have this process keep up to `count` freed bytes, or more if an earlier call said so.

    A pass frees what the next one takes again. glibc gives freed memory at the end of its heap, and
    large pieces, back to the system, which clears every page of it when it is taken anew: a fourth
    of the time of a prompt of 200 tokens on one thread (docs/design/cpu.md).

    It lasts as long as the process, whoever else takes memory in it. Pieces above 32 MB go back in
    any case, as does what lies above 64 MB in the heaps of other threads than the main one: glibc
    has no setting for these. What a user has told it by the environment is left alone.

    Args:
        count: bytes; for an engine, its workspace and logits.
    Returns:
        whether the C library was told; False where it is not glibc, or where the environment says
        how it behaves.
    """
    global _kept
    if any(name in os.environ for name in _OF_USERS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    with _lock:
        _kept = max(_kept, count)
        trim = min(_kept, _MOST_OF_INT)
        return bool(mallopt(_TRIM_THRESHOLD, trim) and mallopt(_MMAP_THRESHOLD, _HEAP_PIECE))


def give_back() -> bool:
    """Return free pages to the system; False where the C library has no way to.

    A body of megabytes, or a grammar, leaves pieces free in each thread's share of the heap, which
    glibc returns at the end of a share alone. Takes milliseconds, without the interpreter's lock.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return False
    trim(0)
    return True
