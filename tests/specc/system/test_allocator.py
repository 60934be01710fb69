"""Memory that a process frees and takes again is not cleared again."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from specc.system.allocator import keep_freed_memory

# page faults of ten rounds that take, write and free three pieces of 8 MB
ROUNDS = """
import ctypes, resource, sys
from specc.system.allocator import keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
size = 8 << 20

def round():
    pieces = [ctypes.c_void_p(libc.malloc(ctypes.c_size_t(size))) for _ in range(3)]
    for piece in pieces:
        ctypes.memset(piece, 1, size)
    for piece in pieces:
        libc.free(piece)

for count in map(int, sys.argv[1:]):
    assert keep_freed_memory(count)
round()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    round()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 10 * 3 * (8 << 20) // 4096
IS_GLIBC = getattr(ctypes.CDLL(None), "mallopt", None) is not None


def faults(*counts: int) -> int:
    command = [sys.executable, "-c", ROUNDS, *map(str, counts)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(not IS_GLIBC, reason="the C library is not glibc")
@pytest.mark.parametrize("counts", [(1 << 20,), (64 << 20, 1 << 20), (1 << 40,)], ids=str)
def test_freed_memory_is_kept(counts: tuple[int, ...]) -> None:
    """As much as any call said, also what no int of C holds."""
    assert faults() > 0.5 * PAGES
    assert faults(*counts) < 0.01 * PAGES


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert not keep_freed_memory(1 << 20)


@pytest.mark.parametrize(
    "name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"]
)
def test_what_a_user_says_is_left(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def refuse(library: str | None) -> None:
        raise AssertionError(library)

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    monkeypatch.setenv(name, "1")
    assert not keep_freed_memory(1 << 20)
