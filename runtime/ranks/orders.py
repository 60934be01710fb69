"""What ranks say to each other: a fixed header, and raw tensors. Nothing in it is ever executed.

A message is a header, a table of its tensors, and their bytes, each from a multiple of 64 on. All
of it is compared with what it can be before it is used: a rank that gets anything else says so.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import json
import math
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specc.errors import FaultError

MAGIC = b"spcR"
VERSION = 1
# magic, version, kind, tensors, model, 0, sequence number, bytes of the table and of the tensors
_HEADER = struct.Struct("<4sBBHIIQQ")
HEADER_BYTES = _HEADER.size
# code of the dtype, dimensions, sizes
_ENTRY = struct.Struct("<BB6x4Q")
_ALIGNMENT = 64
_MOST_DIMS = 4
MOST_TENSORS = 256
# a pass of 100,000 tokens takes less
MOST_BYTES = 1 << 28
_ABSENT = 0
_DTYPES = {1: torch.int32, 2: torch.int64, 3: torch.float32, 4: torch.uint8}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


# dtype and shape of a tensor, or nothing in its place
Spec = tuple[torch.dtype, tuple[int, ...]] | None


class Kind(enum.IntEnum):
    """What a message is.

    Orders of rank 0: SETUP (what to load, as JSON), PASS (a model's eight inputs, and what more it
    takes), DRAW (the same and three tensors of `Draws`: a pass that yields tokens), COMMIT (of a
    step, see `Commit`), STATES (a `StateCopy`), DRAFT (a plan's number, and what its drafts on
    other ranks read), CHECKSUM (of caches and states), END; of engines on devices WORK (what a
    table says, see `device_work.py`), CAPTURE (it, as the graph of this number), REPLAY (a graph);
    where the target has stages, before all orders MEET (how to open groups and links, as JSON).
    Reports of the others: HELLO (what they are, as JSON), OFFER
    (groups and links that they have made, as JSON), READY, ERROR (as JSON; also from rank 0, which
    then ends), SUM (32 bytes), DRAFTED (the answer to a DRAFT, or to a PASS of a draft of theirs;
    it comes where orders go). BEAT goes both ways: the sender is alive, and has done the order of
    this number.
    """

    SETUP = 1
    PASS = 2
    COMMIT = 3
    CHECKSUM = 4
    END = 5
    DRAW = 6
    WORK = 7
    CAPTURE = 8
    REPLAY = 9
    DRAFT = 10
    MEET = 11
    STATES = 12
    HELLO = 16
    READY = 17
    ERROR = 18
    SUM = 19
    BEAT = 20
    DRAFTED = 21
    OFFER = 22


class Message(NamedTuple):
    """One message.

    Args:
        kind: of it.
        tensors: on the host, contiguous or not; None where an input is left out.
        model: number of the model in the engine: 0 is the target, 1 is draft_0.
        sequence: orders are numbered from 1 on.
    """

    kind: Kind
    tensors: tuple[Tensor | None, ...] = ()
    model: int = 0
    sequence: int = 0


class Commit(NamedTuple):
    """Tensors of a COMMIT: which rows of a model's cache a step keeps.

    Args:
        path: [B, P] int32 accepted nodes from the root on, then -1.
        num_accepted: [B] int32 accepted draft tokens.
        cache_len: [B] int32 committed rows before the step.
        block_table: [B, n] int32.
        slots: [N] or [B, N] int32 row after the committed ones that holds each node, or -1.
        states: [B, 2] int32 that the step's passes had, where the model keeps states; else None.
    """

    path: Tensor
    num_accepted: Tensor
    cache_len: Tensor
    block_table: Tensor
    slots: Tensor
    states: Tensor | None = None


class Header(NamedTuple):
    """What comes before a payload; `num_bytes` of it follow."""

    kind: Kind
    num_tensors: int
    model: int
    sequence: int
    num_bytes: int


def encode(message: Message) -> bytes:
    """The bytes of a message."""
    table, gaps, end = _layout(specs_of(message))
    parts = [table]
    given = (tensor for tensor in message.tensors if tensor is not None)
    for gap, tensor in zip(gaps, given, strict=True):
        parts += [gap, bytes_of(tensor)]
    fields = (message.kind, len(message.tensors), message.model, 0, message.sequence, end)
    return b"".join([_HEADER.pack(MAGIC, VERSION, *fields), *parts])


def specs_of(message: Message) -> tuple[Spec, ...]:
    """Dtype and shape of each tensor; None of one that is left out."""
    return tuple(None if t is None else (t.dtype, t.shape) for t in message.tensors)


@functools.lru_cache(256)
def _layout(specs: tuple[Spec, ...]) -> tuple[bytes, list[bytes], int]:
    """The table of such tensors, the bytes before each, and where the last ends."""
    table, gaps = [], []
    end = _ENTRY.size * len(specs)
    for spec in specs:
        if spec is None:
            table.append(_ENTRY.pack(_ABSENT, 0, 0, 0, 0, 0))
            continue
        dtype, shape = spec
        table.append(
            _ENTRY.pack(_CODES[dtype], len(shape), *shape, *[0] * (_MOST_DIMS - len(shape)))
        )
        begin = _aligned(end)
        gaps.append(bytes(begin - end))
        end = begin + math.prod(shape) * dtype.itemsize
    return b"".join(table), gaps, end


def decode_header(data: bytes | bytearray | memoryview) -> Header:
    """Read the first `HEADER_BYTES` bytes of a message.

    Raises:
        FaultError: they are none.
    """
    magic, version, kind, count, model, zero, sequence, num_bytes = _HEADER.unpack(data)
    if magic != MAGIC:
        raise refused(f"bytes that are no message of a rank: {bytes(data[:16])!r} …")
    if version != VERSION:
        raise refused(f"a message of version {version}, not {VERSION}")
    if kind not in Kind.__members__.values():
        raise refused(f"a message of kind {kind}")
    if zero or count > MOST_TENSORS or not count * _ENTRY.size <= num_bytes <= MOST_BYTES:
        raise refused(f"a message of {count} tensors in {num_bytes} bytes")
    return Header(Kind(kind), count, model, sequence, num_bytes)


def decode(header: Header, payload: Tensor) -> Message:
    """Read what follows a header; the tensors of the result are parts of it.

    Args:
        header: of the message.
        payload: [num_bytes] uint8.
    Raises:
        FaultError: a tensor is not what its entry says, or bytes are left over.
    """
    end = _ENTRY.size * header.num_tensors
    table = ctypes.string_at(payload.data_ptr(), end) if end else b""
    # a view of all of it for each dtype, then one call a tensor
    typed: dict[torch.dtype, Tensor] = {}
    tensors: list[Tensor | None] = []
    for part in _parts(table, header.num_bytes):
        if part is None:
            tensors.append(None)
            continue
        values = typed.get(part.dtype)
        if values is None:
            whole = header.num_bytes - header.num_bytes % part.dtype.itemsize
            values = typed[part.dtype] = payload[:whole].view(part.dtype)
        first = values.storage_offset()
        tensors.append(values.as_strided(part.shape, part.strides, first + part.offset))
    return Message(header.kind, tuple(tensors), header.model, header.sequence)


class _Part(NamedTuple):
    """A tensor of a payload; strides and offset in items."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


@functools.lru_cache(256)
def _parts(table: bytes, num_bytes: int) -> tuple[_Part | None, ...]:
    """Where the tensors of a payload lie; steps of one plan have the same table again and again.

    Raises:
        FaultError: see `decode`.
    """
    parts: list[_Part | None] = []
    end = len(table)
    for code, ndim, *sizes in _ENTRY.iter_unpack(table):
        if code == _ABSENT:
            parts.append(None)
            continue
        if code not in _DTYPES or ndim > _MOST_DIMS or any(sizes[ndim:]):
            raise refused(f"a tensor of dtype {code} with {ndim} dimensions of sizes {sizes}")
        dtype, shape = _DTYPES[code], tuple(sizes[:ndim])
        begin = _aligned(end)
        end = begin + math.prod(shape) * dtype.itemsize
        strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(ndim))
        parts.append(_Part(dtype, shape, strides, begin // dtype.itemsize))
    # each lies after the one before: if the last ends in time, all do
    if end != num_bytes:
        raise refused(f"{num_bytes} bytes, of which tensors take {end}")
    return tuple(parts)


def beat(done: int, position: int) -> Message:
    """A sign of life: the last order that was done, and collectives since the start."""
    return Message(Kind.BEAT, (torch.tensor([done, position]),))


def json_message(kind: Kind, data: Mapping[str, Any]) -> Message:
    """A message that holds JSON."""
    text = json.dumps(data).encode()
    return Message(kind, (torch.frombuffer(bytearray(text), dtype=torch.uint8),))


def json_of(message: Message) -> dict[str, Any]:
    """What `json_message` put into a message.

    Raises:
        FaultError: it holds something else.
    """
    (tensor,) = message.tensors if len(message.tensors) == 1 else (None,)
    try:
        if tensor is None or tensor.dtype != torch.uint8:
            raise ValueError("one tensor of bytes was expected")
        data = json.loads(bytes_of(tensor))
        if not isinstance(data, dict):
            raise ValueError("it is no object")
    except ValueError as error:
        raise refused(f"a message {message.kind.name} without JSON: {error}") from error
    return data


def bytes_of(tensor: Tensor) -> bytes:
    """A tensor's memory, in the order of its elements."""
    return tensor.numpy().tobytes()


def refused(found: str) -> FaultError:
    """The error of a rank that cannot follow what it was sent."""
    return FaultError(
        found,
        "messages of the ranks of one engine, all of the same specc",
        "start all ranks with the same installation, and see that nothing else uses their port",
    )


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
