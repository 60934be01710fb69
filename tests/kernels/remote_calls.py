"""Operators of another processor's library, called in an emulator: `torch.ops.specc_cpu` is it.

With SPECC_TEST_REMOTE="COMMAND …", such as "qemu-aarch64 -L /usr/aarch64-linux-gnu SERVER LIBRARY",
the tests of tests/kernels run against that library: every call of an operator goes through a pipe
to `call_server.cpp`, and its results and what it has changed come back. `tests/kernels/aarch64.py`
builds both and runs them so.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import struct
import subprocess
from typing import Any

import torch
from torch import Tensor

from specc.kernels import native_calls as calls

VARIABLE = "SPECC_TEST_REMOTE"


class RemoteCalls:
    """The process that calls operators, with its pipes.

    Args:
        command: the emulator, the server and the library.
    """

    def __init__(self, command: str) -> None:
        self._process = subprocess.Popen(
            shlex.split(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def call(self, name: str, *arguments: Any) -> Any:
        """As `native_calls.call`."""
        assert self._process.stdin is not None
        given: list[tuple[Tensor, bytes]] = []
        data = [struct.pack("<q", len(name)), name.encode(), struct.pack("<q", len(arguments))]
        for value in arguments:
            data += _argument(value, given)
        self._process.stdin.write(b"".join(data))
        self._process.stdin.flush()
        if self._number():
            raise RuntimeError(self._read(self._number()).decode())
        results = [self._result() for _ in range(self._number())]
        for x, sent in given:
            _write_changes(x, sent, self._read(len(sent)))
        return results[0] if len(results) == 1 else tuple(results) or None

    def _result(self) -> Tensor:
        dtype, dim = calls.DTYPES[self._number()], self._number()
        sizes = [self._number() for _ in range(dim)]
        strides = [self._number() for _ in range(dim)]
        data = self._read(self._number())
        flat = torch.frombuffer(bytearray(data or bytes(8)), dtype=torch.uint8)
        size = len(flat) // dtype.itemsize * dtype.itemsize
        return flat[:size].view(dtype).as_strided(sizes, strides)

    def _number(self) -> int:
        return struct.unpack("<q", self._read(8))[0]

    def _read(self, size: int) -> bytes:
        assert self._process.stdout is not None
        data = self._process.stdout.read(size) if size else b""
        if len(data) < size:
            raise RuntimeError(f"the emulator has ended: {self._process.wait()}")
        return data


def _write_changes(x: Tensor, sent: bytes, changed: bytes) -> None:
    """Only what has changed: tensors that share memory here are apart there."""
    if changed == sent:
        return
    memory = (ctypes.c_uint8 * len(sent)).from_address(x.data_ptr())
    held = torch.frombuffer(memory, dtype=torch.uint8)
    old, new = (torch.frombuffer(bytearray(b), dtype=torch.uint8) for b in (sent, changed))
    held.copy_(torch.where(old == new, held, new))


def _argument(value: Any, given: list[tuple[Tensor, bytes]]) -> list[bytes]:
    kind, integer, real, items = calls.NONE, 0, 0.0, b""
    tensors: list[Tensor] = []
    if isinstance(value, Tensor):
        kind, tensors = calls.OF_TENSOR, [value]
    elif isinstance(value, bool):
        kind, integer = calls.BOOL, int(value)
    elif isinstance(value, int):
        kind, integer = calls.INT, value
    elif isinstance(value, float):
        kind, real = calls.REAL, value
    elif isinstance(value, str):
        kind, items = calls.TEXT, value.encode()
        integer = len(items)
    elif isinstance(value, list | tuple):
        integer = len(value)
        if any(isinstance(x, Tensor) for x in value):
            kind, tensors = calls.TENSORS, list(value)
        else:
            kind = calls.REALS if any(isinstance(x, float) for x in value) else calls.INTS
            code = "d" if kind == calls.REALS else "q"
            items = struct.pack(f"<{len(value)}{code}", *value)
    found = [struct.pack("<qqd", kind, integer, real)]
    if not tensors and kind != calls.TENSORS:
        return [*found, struct.pack("<q", len(items)), items]
    for x in tensors:
        size = _bytes_of(x)
        data = ctypes.string_at(x.data_ptr(), size) if size else b""
        given.append((x, data))
        numbers = (calls.CODES.get(x.dtype, -1), x.dim(), *x.shape, *x.stride(), size)
        found += [struct.pack(f"<{len(numbers)}q", *numbers), data]
    return found


def _bytes_of(x: Tensor) -> int:
    """From its first element to the end of the last one that it can reach."""
    if x.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()


def use_remote() -> bool:
    """Have all calls of operators of this process made there; whether a command is given."""
    command = os.environ.get(VARIABLE)
    if not command:
        return False
    calls.call = RemoteCalls(command).call  # type: ignore[assignment]
    return True
