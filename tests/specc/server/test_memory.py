"""What requests have freed goes back to the system."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys

from specc.server.memory import keep_memory_low

MIB = 1 << 20
# blocks that glibc does not map by themselves, all free but the last: nothing at the end is free
FREED = """
from specc.server.memory import resident_bytes
from specc.system.allocator import give_back
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = libc.free.argtypes = [ctypes.c_size_t]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
blocks = [libc.malloc(60_000) for _ in range(2000)]
for block in blocks:
    libc.memset(block, 1, 60_000)
for block in blocks[:-1]:
    libc.free(block)
before = resident_bytes()
assert give_back()
print((before - resident_bytes()) >> 20)
"""


def test_what_is_free_goes_back() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", FREED], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) > 80


# pieces that live in four threads at a time; the library's own report of its heaps
SHARED = """
import ctypes, sys, threading
from specc.server.memory import share_heaps
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fdopen.restype = ctypes.c_void_p
libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
libc.fclose.argtypes = [ctypes.c_void_p]
assert sys.argv[1] == "each" or share_heaps()
barrier = threading.Barrier(4)
def take():
    libc.malloc(10_000)
    barrier.wait()
threads = [threading.Thread(target=take) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
report = libc.fdopen(1, b"w")
libc.malloc_info(0, report)
libc.fclose(report)
"""


def num_heaps(how: str, **environment: str) -> int:
    done = subprocess.run(
        [sys.executable, "-P", "-c", SHARED, how],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | environment,
    )
    return done.stdout.count("<heap nr=")


def test_threads_share_two_heaps() -> None:
    assert num_heaps("each") >= 4
    assert num_heaps("shared") <= 2
    # whoever has chosen a number keeps it
    assert num_heaps("shared", MALLOC_ARENA_MAX="3") == 3


def run(sizes: list[int | None], does_trim: bool = True) -> list[int]:
    """The looks, by number, that were followed by a trim."""
    looks, trims = iter(sizes), []
    seen = -1

    def resident() -> int | None:
        nonlocal seen
        seen += 1
        size = next(looks, "end")
        if size == "end":
            raise StopAsyncIteration
        return size  # type: ignore[return-value]

    def trim() -> bool:
        trims.append(seen)
        return does_trim

    with contextlib.suppress(RuntimeError, StopAsyncIteration):
        asyncio.run(keep_memory_low(resident, trim, every_s=0.0))
    return trims


def test_growth_alone_costs_a_trim() -> None:
    # the look after a trim is its result
    assert run([400 * MIB, 404 * MIB, 410 * MIB, 401 * MIB, 408 * MIB, 410 * MIB]) == [2, 5]
    assert run([400 * MIB] * 5) == []
    # what stays is the new level, and what was given back, too
    assert run([400 * MIB, 500 * MIB, 500 * MIB, 505 * MIB, 300 * MIB, 309 * MIB]) == [1, 5]


def test_it_ends_where_it_is_of_no_use() -> None:
    assert run([None, 400 * MIB, 600 * MIB]) == []
    assert run([400 * MIB, 500 * MIB, 900 * MIB, 1900 * MIB], does_trim=False) == [1]


FROZEN = """
import gc
from specc.server.memory import forget_garbage
kept = [[i] for i in range(300_000)]
forget_garbage()
print(gc.get_freeze_count(), len(gc.get_objects()))
"""


def test_what_is_there_is_never_collected_again() -> None:
    """A full collection over the objects of torch holds everybody up for 0.2 s."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", FROZEN], capture_output=True, text=True, check=True
    )
    frozen, left = map(int, done.stdout.split())
    assert frozen > 300_000
    assert left < 1000
