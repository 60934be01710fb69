"""Safetensors files written from streams of chunks, so that memory stays flat whatever their size.

The library's `serialize_file` takes tensors that are in memory, all of them at once.
Format: 8 bytes little-endian header length, a JSON header, then the data without holes.
Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from specc.artifact.block_sums import BlockSums
from specc.artifact.manifest_entries import FileEntry
from specc.artifact.safetensors_io import DTYPES, Buffer, Progress, new_buffer, tensor_bytes
from specc.errors import WeightError
from specc.system.files import check_free_space, output_error

# data that starts on a cache line lets a memory-mapped load use aligned vector loads
_DATA_ALIGNMENT = 64
# of a chunk that another thread is not worth
_SMALL_BYTES = 256 << 10

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def convert_chunks(
    chunks: Iterable[Buffer], source: torch.dtype, target: torch.dtype
) -> Iterator[Buffer]:
    """Convert a stream of elements from one dtype to another; chunks may split elements.

    As with readers, a chunk is valid until the next one is asked for.

    Raises:
        WeightError: the stream ends within an element.
    """
    if source == target:
        yield from chunks
        return
    rest, output = b"", torch.empty(0, dtype=target)
    for chunk in chunks:
        # frombuffer warns about memory that it could write to by mistake
        data = memoryview(chunk).cast("B")
        if rest or data.readonly:
            data = memoryview(bytearray(rest) + data)
        whole = len(data) - len(data) % source.itemsize
        rest = bytes(data[whole:])
        if whole:
            values = torch.frombuffer(data[:whole], dtype=source)
            if output.numel() < values.numel():
                buffer = new_buffer(values.numel() * target.itemsize)
                output = torch.frombuffer(buffer, dtype=target)
            yield tensor_bytes(output[: values.numel()].copy_(values))
    if rest:
        raise WeightError(
            f"a stream of {source} ends with {len(rest)} bytes of an element",
            "whole elements",
            "download or save the checkpoint again",
        )


@dataclass(frozen=True)
class OutputTensor:
    """One tensor to write: `chunks` are its bytes, already of `dtype`, consumed once, lazily."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Iterable[Buffer]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(
    path: str | Path,
    tensors: Iterable[OutputTensor],
    progress: Progress | None = None,
    metadata: Mapping[str, str] | None = None,
) -> FileEntry:
    """Write a safetensors file from streams of chunks; durable when it returns.

    Tensors are laid out in the given order; put larger items first (as `write_weights` does), so
    that every tensor is aligned to its items.

    Returns:
        hash, size and sums of the file.
    Raises:
        OutputError: the file cannot be written. A partial file is removed, on any exception.
    """
    path, tensors = Path(path), list(tensors)
    header = _make_header(tensors, dict(metadata or {}))
    total = sum(tensor.num_bytes for tensor in tensors)
    check_free_space(path, len(header) + total)
    digest, sums, done = _Digest(), BlockSums(), 0
    try:
        file = open(path, "wb", buffering=0)  # noqa: SIM115 - closed below
    except OSError as error:
        raise output_error(path, error) from error
    try:
        with file, digest:
            with digest.of(header):
                sums.update(header)
                _write(file, header, path)
            for tensor in tensors:
                begin = done
                for chunk in tensor.chunks:
                    with digest.of(chunk):
                        sums.update(chunk)
                        _write(file, chunk, path)
                    done += memoryview(chunk).nbytes
                    if progress:
                        progress(done, total)
                if done - begin != tensor.num_bytes:
                    raise ValueError(
                        f"{tensor.key} got {done - begin} bytes instead of {tensor.num_bytes}"
                    )
            try:
                os.fsync(file.fileno())
            except OSError as error:
                raise output_error(path, error) from error
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return FileEntry(digest.hexdigest(), len(header) + total, sums.hex())


class _Digest:
    """SHA-256 of a stream, which takes another thread as long as sums and writing take this one."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._pool = ThreadPoolExecutor(1)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()

    @contextlib.contextmanager
    def of(self, chunk: Buffer) -> Iterator[None]:
        """Add a chunk while the block runs; it is not read any more when that ends."""
        if memoryview(chunk).nbytes < _SMALL_BYTES:
            self._digest.update(chunk)
            yield
            return
        added = self._pool.submit(self._digest.update, chunk)
        try:
            yield
        finally:
            added.result()

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def _make_header(tensors: list[OutputTensor], metadata: dict[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for tensor in tensors:
        entries[tensor.key] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.num_bytes],
        }
        offset += tensor.num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _DATA_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _write(file: BinaryIO, chunk: Buffer, path: Path) -> None:
    data = memoryview(chunk).cast("B")
    while data:
        try:
            written = file.write(data)
        except OSError as error:
            raise output_error(path, error) from error
        data = data[written:]
