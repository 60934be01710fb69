"""GGUF files read in chunks, as `SafetensorsReader` reads safetensors.

A file is a header (magic, version, numbers of tensors and of fields), fields, the table of tensors,
and data at aligned offsets. Rows of block types are bytes here: [N, bytes of a row]. A model may be
in several files (`split.count` and `NAME-00001-of-00003.gguf`): the first has the fields, and each
its own table.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; llama.cpp,
src/llama-model-loader.cpp.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch

from specc.artifact.decoders.gguf_blocks import block_size
from specc.artifact.decoders.gguf_parts import check_part, check_whole, part_count, parts_of
from specc.artifact.safetensors_io import CHUNK_BYTES, Buffer, missing_tensor, read_exactly
from specc.artifact.tensor_part import TensorPart, read_part
from specc.errors import WeightError

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_ALIGNMENT = 32
# field types of a fixed size by number; 8 is a string, 9 an array
_FIELDS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
# more is no count but damage
_MOST_ITEMS = 1 << 26
PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
_NUMBERS = {
    2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K",
    13: "Q5_K", 14: "Q6_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL",
    21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
# block types by number: name, values of a block, bytes of a block
BLOCKS = {number: (name, *block_size(name)) for number, name in _NUMBERS.items()}
# of no file that people have, or newer than what is read here
_OTHERS = {9: "Q8_1", 15: "Q8_K", 40: "NVFP4"}


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor: its own shape, dim 0 first, and where its bytes are."""

    name: str
    file: Path
    shape: tuple[int, ...]
    kind: int
    begin: int

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Of blocks the bytes of each row."""
        if self.kind in PLAIN:
            return self.shape
        _, values, size = BLOCKS[self.kind]
        return (*self.shape[:-1], self.shape[-1] // values * size)

    @property
    def dtype(self) -> torch.dtype:
        return PLAIN.get(self.kind, torch.uint8)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.stored_shape) * self.dtype.itemsize


class GGUFReader:
    """A GGUF file, or all parts of one that is split, as a reader of tensors.

    Args:
        path: of the file, or of any of its parts. Fields and tables of tensors are read here.
        reads_lists: of fields that are arrays, read the items, not just how many there are.
    Raises:
        WeightError: it is malformed or truncated, holds tensors of a type that is not read, or
            lacks a part.
    """

    def __init__(self, path: Path, reads_lists: bool = False) -> None:
        self.path = path
        self._files: dict[Path, BinaryIO] = {}
        self.fields, self.tensors = _read_header(path, reads_lists)
        self.files = [path]
        if (count := part_count(path, self.fields)) > 1:
            self.files = parts_of(path, count)
            self.fields, self.tensors = _read_parts(self.files, reads_lists)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def keys(self) -> Iterable[str]:
        return self.tensors.keys()

    def dtype(self, key: str) -> torch.dtype:
        return self._tensor(key).dtype

    def shape(self, key: str) -> tuple[int, ...]:
        return self._tensor(key).stored_shape

    def location(self, key: str | None = None) -> str:
        return str(self.path if key is None else self._tensor(key).file)

    def read_chunks(
        self,
        key: str,
        chunk_bytes: int = CHUNK_BYTES,
        rows: tuple[int, int] | None = None,
        transpose: bool = False,
    ) -> Iterator[Buffer]:
        part = TensorPart.of_rows(self.shape(key), rows)
        yield from self.read_part(key, part, transpose, chunk_bytes)

    def read_part(
        self,
        key: str,
        part: TensorPart,
        transpose: bool = False,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> Iterator[Buffer]:
        tensor = self._tensor(key)
        width = tensor.stored_shape[-1] if tensor.shape else 1
        file = self._open(tensor.file)

        def read(offset: int, target: memoryview) -> None:
            read_exactly(file, target, tensor.begin + offset, partial(_malformed, tensor.file))

        yield from read_part(read, width, tensor.dtype.itemsize, part, transpose, chunk_bytes)

    def _tensor(self, key: str) -> GGUFTensor:
        if key not in self.tensors:
            raise missing_tensor(key, self)
        return self.tensors[key]

    def _open(self, path: Path) -> BinaryIO:
        if path not in self._files:
            self._files[path] = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by close()
        return self._files[path]


class _Cursor:
    """Reads a file's header from its beginning on."""

    def __init__(self, data: mmap.mmap, reads_lists: bool) -> None:
        self._data, self._reads_lists = data, reads_lists
        self.place = 0

    def take(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self._data, self.place)
        self.place += struct.calcsize(form)
        return value

    def count(self) -> int:
        value = int(self.take("<Q"))
        if value > min(_MOST_ITEMS, len(self._data)):
            raise ValueError(f"a count of {value}")
        return value

    def text(self) -> str:
        size = self.count()
        value = self._data[self.place : self.place + size]
        if len(value) < size:
            raise ValueError("it ends inside of a name")
        self.place += size
        return value.decode("utf-8", "replace")

    def field(self, kind: int) -> Any:
        """A value; of an array its items, or how many there are."""
        if kind in _FIELDS:
            return self.take(_FIELDS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise ValueError(f"a field of type {kind}")
        item, count = self.take("<I"), self.count()
        if self._reads_lists and (item in _FIELDS or item == _STRING):
            return [self.field(item) for _ in range(count)]
        if item in _FIELDS:
            self.place += count * struct.calcsize(_FIELDS[item])
        elif item == _STRING:
            for _ in range(count):
                self.text()
        else:
            raise ValueError(f"an array of type {item}")
        return count


def _read_parts(
    parts: Sequence[Path], reads_lists: bool
) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Fields of the first part, and the tensors of all."""
    fields: dict[str, Any] = {}
    tensors: dict[str, GGUFTensor] = {}
    for number, part in enumerate(parts):
        own, table = _read_header(part, reads_lists)
        check_part(part, number, len(parts), own)
        fields = fields or own
        if twice := table.keys() & tensors.keys():
            name = min(twice)
            raise _malformed(part, f"it holds {name}, which {tensors[name].file.name} holds, too")
        tensors |= table
    check_whole(parts[0], fields, len(tensors))
    return fields, tensors


def _read_header(path: Path, reads_lists: bool) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    try:
        return _parse_header(path, reads_lists)
    except (struct.error, ValueError, IndexError, OverflowError) as error:
        raise _malformed(path, str(error)) from error
    except OSError as error:
        raise _malformed(path, f"it cannot be read: {error.strerror or error}") from error


def _parse_header(path: Path, reads_lists: bool) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    size = path.stat().st_size
    if size < len(_MAGIC) + 20:
        raise ValueError(f"it has {size} bytes")
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data, reads_lists)
        if data[:4] != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        cursor.place = 4
        if (version := cursor.take("<I")) not in _VERSIONS:
            raise WeightError(
                f"{path} is of GGUF version {version}",
                f"version {' or '.join(map(str, _VERSIONS))}",
                "convert the model again with a current llama.cpp",
            )
        num_tensors, num_fields = cursor.count(), cursor.count()
        fields = {}
        for _ in range(num_fields):
            name = cursor.text()
            fields[name] = cursor.field(cursor.take("<I"))
        table = []
        for _ in range(num_tensors):
            name, dims = cursor.text(), cursor.take("<I")
            if not 1 <= dims <= 4:
                raise ValueError(f"{name} has {dims} dimensions")
            # the fastest one is first
            shape = tuple(int(cursor.take("<Q")) for _ in range(dims))[::-1]
            table.append((name, shape, cursor.take("<I"), cursor.take("<Q")))
        alignment = fields.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or alignment < 1:
            raise ValueError(f"an alignment of {alignment}")
        begin = -(-cursor.place // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in table:
        _check_kind(path, name, shape, kind)
        tensor = GGUFTensor(name, path, shape, kind, begin + offset)
        if tensor.begin + tensor.num_bytes > size:
            raise ValueError(f"it ends inside of {name}")
        if tensors.setdefault(name, tensor) is not tensor:
            raise ValueError(f"two tensors are called {name}")
    return fields, tensors


def _check_kind(path: Path, name: str, shape: tuple[int, ...], kind: int) -> None:
    if kind not in PLAIN and kind not in BLOCKS:
        known = ", ".join(item for item, _, _ in BLOCKS.values())
        raise WeightError(
            f"{name} in {path} is of the type {_OTHERS.get(kind, kind)}",
            f"{known}, F32, F16 or BF16",
            "pass the file of another quantization, such as Q4_K_M or Q8_0, or the unquantized"
            " checkpoint with --quantize int8 or int4",
        )
    if kind in BLOCKS and shape[-1] % BLOCKS[kind][1]:
        raise ValueError(f"{name} has rows of {shape[-1]} values in {BLOCKS[kind][0]}")


def _malformed(path: Path, reason: str) -> WeightError:
    return WeightError(
        f"{path} is malformed: {reason}", "a complete GGUF file", "download or convert it again"
    )
