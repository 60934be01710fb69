"""Checksums of a file of weights, by blocks: written with it, compared while it is read.

The sha256 of a file takes one core two to four times as long as reading it from a disk, and cannot
be shared among cores. CRC-32 of blocks can: zlib lets go of Python's lock, so each thread reads a
block and sums it while its bytes are in the processor's caches. It finds every change of up to 32
bits in a row, and others but for one in four billion. It is no protection against attackers.
"""

from __future__ import annotations

import os
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from specc.errors import EngineError

BLOCK_BYTES = 16 << 20
# of a block's sum in hex
_DIGITS = 8
# one after the other: what is summed is still in the second-level cache
_STEP_BYTES = 256 << 10
# more read no faster from any disk, and memory is shared
_MOST_THREADS = 8


class BlockSums:
    """Sums of a stream of bytes that come in chunks of any size."""

    def __init__(self) -> None:
        self._done: list[int] = []
        self._sum, self._length = 0, 0

    def update(self, chunk: bytes | bytearray | memoryview) -> None:
        data = memoryview(chunk).cast("B")
        while data:
            part = data[: BLOCK_BYTES - self._length]
            self._sum = zlib.crc32(part, self._sum)
            self._length += len(part)
            if self._length == BLOCK_BYTES:
                self._done.append(self._sum)
                self._sum, self._length = 0, 0
            data = data[len(part) :]

    def hex(self) -> str:
        """Eight digits of each block, the last of which may be shorter."""
        sums = [*self._done, self._sum] if self._length else self._done
        return "".join(f"{value:08x}" for value in sums)


def digits_of(num_bytes: int) -> int:
    """Length of `BlockSums.hex` of so many bytes."""
    return -(-num_bytes // BLOCK_BYTES) * _DIGITS


def read_in_blocks(path: Path, crc32: str, parts: Sequence[tuple[int, memoryview]] = ()) -> None:
    """Read a file, by several threads, and compare its blocks with what was written.

    Args:
        crc32: `BlockSums.hex` of it; empty where nobody knows.
        parts: offset in the file → bytes that are filled from there on; ascending, apart. What lies
            between them is compared, and not kept.
    Raises:
        EngineError: it is shorter, cannot be read, or a block is another one.
    """
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if crc32 and digits_of(size) != len(crc32):
            raise EngineError(
                f"{path} has {size} bytes",
                f"{len(crc32) // _DIGITS} blocks of {BLOCK_BYTES} bytes, as manifest.json says",
                "copy or compile the engine again",
            )
        reader = _Reader(path, file.fileno(), size, crc32, parts)
        threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
        with ThreadPoolExecutor(threads) as pool:
            try:
                for _ in pool.map(reader.read, range(-(-size // BLOCK_BYTES))):
                    pass
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


class _Reader:
    def __init__(
        self, path: Path, file: int, size: int, crc32: str, parts: Sequence[tuple[int, memoryview]]
    ) -> None:
        self._path, self._file, self._size, self._crc32 = path, file, size, crc32
        self._parts = [(offset, part.cast("B")) for offset, part in parts if part.nbytes]
        self._offsets = [offset for offset, _ in self._parts]

    def read(self, block: int) -> None:
        """Raises EngineError: see `read_in_blocks`."""
        begin = block * BLOCK_BYTES
        end, found = min(begin + BLOCK_BYTES, self._size), 0
        scratch = memoryview(bytearray(min(_STEP_BYTES, end - begin) if self._crc32 else 0))
        for offset, target, size in self._pieces(begin, end):
            if target is None and not self._crc32:
                continue
            for done in range(0, size, _STEP_BYTES):
                step = min(_STEP_BYTES, size - done)
                into = scratch[:step] if target is None else target[done : done + step]
                self._fill(into, offset + done)
                if self._crc32:
                    found = zlib.crc32(into, found)
        expected = self._crc32[block * _DIGITS :][:_DIGITS]
        if expected and f"{found:08x}" != expected:
            raise EngineError(
                f"bytes {begin} … {end - 1} of {self._path} have crc32 {found:08x}",
                f"crc32 {expected}, as manifest.json says: something has altered the weights",
                "copy or compile the engine again, and check the disk and the memory",
            )

    def _pieces(self, begin: int, end: int) -> Iterator[tuple[int, memoryview | None, int]]:
        """Offset, buffer and bytes of what lies there, in order; None is what nobody keeps."""
        place = max(bisect_right(self._offsets, begin) - 1, 0)
        for offset, part in self._parts[place:]:
            if offset >= end:
                break
            if begin < offset:
                yield begin, None, offset - begin
                begin = offset
            stop = min(offset + len(part), end)
            if begin < stop:
                yield begin, part[begin - offset : stop - offset], stop - begin
                begin = stop
        if begin < end:
            yield begin, None, end - begin

    def _fill(self, target: memoryview, offset: int) -> None:
        done = 0
        while done < len(target):
            try:
                num_bytes = os.preadv(self._file, [target[done:]], offset + done)
            except OSError as error:
                raise self._unreadable(f"cannot be read: {error.strerror}") from error
            if num_bytes == 0:
                raise self._unreadable(f"ends at byte {offset + done}")
            done += num_bytes

    def _unreadable(self, what: str) -> EngineError:
        return EngineError(
            f"{self._path} {what}", "the weights that were compiled", "copy the engine again"
        )
