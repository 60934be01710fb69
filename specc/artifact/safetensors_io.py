"""Safetensors checkpoints read in chunks, so that memory stays flat whatever their size.

The library's `safe_open` checks files; what it reads stays in memory, as mapped pages or as whole
tensors: a tensor of 400 MiB, taken in slices of 16 MiB, costs 403 MiB as a map, 417 MiB and 20
times the seconds as plain reads (safetensors 0.8, `backend="pread"`, which reads all of a tensor
for every slice), and 16 MiB here. Nor does it tell where in a file a tensor is, which ONNX files
name. So data are read here, and offsets come from the header.
Format: 8 bytes little-endian header length, a JSON header, then the data without holes.
Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specc.artifact.tensor_part import TensorPart, new_buffer, read_part
from specc.errors import ModelNotFoundError, WeightError
from specc.system.json_file import parse_json

CHUNK_BYTES = 16 << 20
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

Buffer = bytes | bytearray | memoryview
Progress = Callable[[int, int], None]

_HEADER_ERROR = "Error while deserializing header: "

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# of quantized checkpoints alone: numbers that mean nothing without scales beside them
_FLOAT8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu}


class TensorReader(Protocol):
    """Where tensors come from: a checkpoint on disk, or tensors in memory."""

    def keys(self) -> Iterable[str]: ...

    def dtype(self, key: str) -> torch.dtype: ...

    def shape(self, key: str) -> tuple[int, ...]: ...

    def location(self, key: str | None = None) -> str:
        """Name the file of a tensor, or the whole checkpoint, for error messages."""
        ...

    def read_chunks(
        self,
        key: str,
        chunk_bytes: int = CHUNK_BYTES,
        rows: tuple[int, int] | None = None,
        transpose: bool = False,
    ) -> Iterator[Buffer]:
        """Yield the bytes of a tensor, or of its rows start … stop - 1 along dim 0.

        Chunks are whole elements, in row-major order. With `transpose` (2-D tensors only) the
        order is that of the transpose of those rows. A chunk is valid until the next one is asked
        for, since buffers are reused.
        """
        ...

    def read_part(
        self,
        key: str,
        part: TensorPart,
        transpose: bool = False,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> Iterator[Buffer]:
        """The same of some of a tensor's vectors and columns; with `transpose`, of that part's."""
        ...


@dataclass(frozen=True)
class _Entry:
    file: Path
    dtype_name: str
    shape: tuple[int, ...]
    begin: int  # offsets in the file
    end: int


class SafetensorsReader:
    """One safetensors file, or a Hugging Face directory: `model.safetensors` or a sharded one.

    Args:
        path: the file or the directory. Only headers are read here.
        reads_float8: numbers of 8 bits are known, as decoders of quantized checkpoints need.
    Raises:
        ModelNotFoundError: the path is absent or holds no safetensors checkpoint.
        WeightError: a header is malformed, or a file is truncated.
    """

    def __init__(self, path: str | Path, reads_float8: bool = False) -> None:
        self.path = Path(path)
        self._dtypes = DTYPES | _FLOAT8 if reads_float8 else DTYPES
        self._files: dict[Path, BinaryIO] = {}
        self._entries: dict[str, _Entry] = {}
        weight_map = _find_files(self.path)
        if weight_map is None:
            self._entries = _read_header(_single_file(self.path))
            return
        # of what several shards hold, the index says which is meant: one may overlay others
        for file in dict.fromkeys(weight_map.values()):
            for key, entry in _read_header(file).items():
                if weight_map.get(key, file) != file:
                    continue
                if key in self._entries:
                    raise WeightError(
                        f"{self._entries[key].file} and {file.name} both hold {key}, and"
                        f" {INDEX_FILE} does not say which is meant",
                        "an index that names the tensors of its shards",
                        "add it to weight_map of the index, or download the checkpoint again",
                    )
                self._entries[key] = entry
        for key, file in weight_map.items():
            if key not in self._entries:
                raise WeightError(
                    f"{self.path / INDEX_FILE} places {key} in {file.name}, which does not hold it",
                    "an index that matches its shards",
                    "download the checkpoint again",
                )

    def __enter__(self) -> SafetensorsReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def keys(self) -> Iterable[str]:
        return self._entries.keys()

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of a tensor.

        Raises:
            WeightError: the tensor is absent, or of a type that only quantized checkpoints use.
        """
        entry = self._entry(key)
        if entry.dtype_name not in self._dtypes:
            raise WeightError(
                f"{key} in {entry.file} has dtype {entry.dtype_name}",
                f"one of {', '.join(self._dtypes)}",
                "pass the unquantized checkpoint of this model",
            )
        return self._dtypes[entry.dtype_name]

    def shape(self, key: str) -> tuple[int, ...]:
        return self._entry(key).shape

    def place(self, key: str) -> tuple[int, int]:
        """Offset of a tensor's data in its file, and its bytes."""
        entry = self._entry(key)
        return entry.begin, entry.end - entry.begin

    def location(self, key: str | None = None) -> str:
        return str(self.path if key is None else self._entry(key).file)

    def read_chunks(
        self,
        key: str,
        chunk_bytes: int = CHUNK_BYTES,
        rows: tuple[int, int] | None = None,
        transpose: bool = False,
    ) -> Iterator[Buffer]:
        entry, item_bytes = self._entry(key), self.dtype(key).itemsize
        begin, end = entry.begin, entry.end
        if rows is not None:
            row_bytes = math.prod(entry.shape[1:]) * item_bytes
            begin, end = begin + rows[0] * row_bytes, begin + rows[1] * row_bytes
        if begin == end:
            return
        file = self._open(entry.file)
        if transpose:
            part = TensorPart.of_rows(entry.shape, rows)
            yield from self.read_part(key, part, transpose, chunk_bytes)
            return
        chunk_bytes = max(item_bytes, chunk_bytes - chunk_bytes % item_bytes)
        buffer = new_buffer(min(chunk_bytes, end - begin))
        for offset in range(begin, end, chunk_bytes):
            chunk = buffer[: end - offset]
            read_exactly(file, chunk, offset, partial(_malformed, entry.file))
            yield chunk

    def read_part(
        self,
        key: str,
        part: TensorPart,
        transpose: bool = False,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> Iterator[Buffer]:
        entry, item_bytes = self._entry(key), self.dtype(key).itemsize
        file = self._open(entry.file)

        def read(offset: int, target: memoryview) -> None:
            read_exactly(file, target, entry.begin + offset, partial(_malformed, entry.file))

        width = entry.shape[-1] if entry.shape else 1
        yield from read_part(read, width, item_bytes, part, transpose, chunk_bytes)

    def _entry(self, key: str) -> _Entry:
        if key not in self._entries:
            raise missing_tensor(key, self)
        return self._entries[key]

    def _open(self, path: Path) -> BinaryIO:
        if path not in self._files:
            self._files[path] = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by close()
        return self._files[path]


def missing_tensor(key: str, reader: TensorReader) -> WeightError:
    """Describe a tensor that a checkpoint does not hold, with up to three close names."""
    close = difflib.get_close_matches(key, reader.keys(), n=3, cutoff=0.6)
    hint = f"; close names: {', '.join(close)}" if close else ""
    return WeightError(
        f"{reader.location()} holds no tensor {key}{hint}",
        f"a tensor {key}",
        "pass a complete checkpoint of this model's architecture",
    )


def _single_file(path: Path) -> Path:
    return path / SINGLE_FILE if path.is_dir() else path


def _find_files(path: Path) -> dict[str, Path] | None:
    """Return key → shard for a sharded checkpoint, None where there is one file."""
    if not path.exists():
        raise ModelNotFoundError(
            f"{path} does not exist",
            "a safetensors file, or a Hugging Face model directory",
            "check the path",
        )
    if _single_file(path).is_file():
        return None
    index = path / INDEX_FILE
    if not index.is_file():
        patterns = ("pytorch_model*.bin", "*.pth", "*.pt")
        pickled = [file for pattern in patterns for file in sorted(path.glob(pattern))]
        if pickled:
            raise ModelNotFoundError(
                f"{path} holds {pickled[0].name} but no safetensors file",
                f"{SINGLE_FILE} or {INDEX_FILE}: specc never loads a pickle",
                "convert it: AutoModelForCausalLM.from_pretrained(path).save_pretrained(path)",
            )
        raise ModelNotFoundError(
            f"{path} holds no checkpoint",
            f"{SINGLE_FILE} or {INDEX_FILE}",
            "pass the directory of a downloaded model",
        )
    try:
        weight_map = parse_json(index.read_bytes())["weight_map"]
        shards = {str(key): path / str(name) for key, name in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise _malformed(index, f"it has no readable weight_map ({error})") from error
    for shard in dict.fromkeys(shards.values()):
        if shard.parent != path:
            raise _malformed(index, f"shard {shard} is outside the directory")
        if not shard.is_file():
            raise WeightError(
                f"{index} names {shard.name}, which is absent",
                f"all {len(set(shards.values()))} shards of the checkpoint",
                "download the checkpoint again",
            )
    return shards


def _read_header(path: Path) -> dict[str, _Entry]:
    try:
        with safe_open(path, framework="pt"):
            pass  # all of the header is checked on opening, that it covers the file included
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except SafetensorError as error:
        raise _malformed(path, str(error).removeprefix(_HEADER_ERROR)) from error
    except OSError as error:
        raise _malformed(path, f"it cannot be read: {error.strerror or error}") from error
    return {
        key: _Entry(
            path,
            value["dtype"],
            tuple(value["shape"]),
            *(8 + length + offset for offset in value["data_offsets"]),
        )
        for key, value in header.items()
        if key != "__metadata__"
    }


def _malformed(path: Path, reason: str) -> WeightError:
    return WeightError(
        f"{path} is malformed: {reason}",
        "a complete safetensors checkpoint",
        "download or save the checkpoint again",
    )


def read_exactly(
    file: BinaryIO, target: memoryview, offset: int, malformed: Callable[[str], WeightError]
) -> None:
    """Fill a buffer from an offset of a file on.

    Args:
        file: opened without a buffer.
        target: all of it is filled.
        offset: in the file.
        malformed: makes the error of this file from what is wrong with it.
    Raises:
        WeightError: the file ends before that, or cannot be read.
    """
    done = 0
    while done < len(target):
        try:
            num_bytes = os.preadv(file.fileno(), [target[done:]], offset + done)
        except OSError as error:
            raise malformed(f"it cannot be read: {error.strerror}") from error
        if num_bytes == 0:
            raise malformed(f"it ends at byte {offset + done}")
        done += num_bytes


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a CPU tensor in row-major order; a view where it is contiguous."""
    # a dimension of size 1 may have any stride, also in a contiguous tensor, and view minds it
    flat = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
