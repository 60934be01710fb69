"""The C functions of the operators' library for groups of ranks, and links between two of them.

They know nothing of engines: `specc.runtime.ranks.group` and `links` are what a process uses.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from specc.errors import RankError
from specc.kernels import native

_I32, _I64, _F64, _TEXT = ctypes.c_int, ctypes.c_int64, ctypes.c_double, ctypes.c_char_p
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "create": (_I32, _I64, _F64, ctypes.POINTER(_I32)),
    "open": (_TEXT, _I32, _I32),
    "open_sockets": (ctypes.POINTER(_I32), _I32, _I32, _F64),
    "wait": (_F64,),
    "abort": (_TEXT,),
    "states": (ctypes.POINTER(_I64), _I32),
    "close": (),
}
_LINK_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "create": (_I64, _F64, ctypes.POINTER(_I32), ctypes.POINTER(_I32)),
    "open": (_TEXT, ctypes.POINTER(_I32)),
    "open_sockets": (ctypes.POINTER(_I32), _I32, _F64, ctypes.POINTER(_I32)),
    "pass": (_I32, ctypes.c_void_p, _I32, _I64, _I64, _I64),
    "abort": (_I32, _TEXT),
    "close": (_I32,),
}
# torch's codes, as messages of ranks that disagree have them
_DTYPE_CODES = {
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.bfloat16: 15,
}
_LINES = re.compile(r"found:  (.*)\nneeded: (.*)\ndo:     (.*)")


class RankState(NamedTuple):
    """What a rank last told the others.

    Args:
        rank: 0 … N - 1.
        pid: its process; 0 until it has opened the group.
        num_collectives: that it has begun.
        heartbeat_age_s: seconds since its last sign of life; None: there was none.
        is_closed: whether it has closed the group.
    """

    rank: int
    pid: int
    num_collectives: int
    heartbeat_age_s: float | None
    is_closed: bool


def create(num_ranks: int, slot_bytes: int, time_limit: float) -> int:
    """Open a group in new shared memory, as rank 0; returns a descriptor that others may open."""
    descriptor = _I32(-1)
    _call("create", num_ranks, slot_bytes, time_limit, ctypes.byref(descriptor))
    return descriptor.value


def open_shared(path: str, rank: int, num_ranks: int) -> None:
    """Open the group whose shared memory `path` is, as one of its ranks."""
    _call("open", path.encode(), rank, num_ranks)


def open_sockets(sockets: Sequence[int], rank: int, time_limit: float) -> None:
    """Open a group over connections to all other ranks, in their order; closes them, too."""
    _call("open_sockets", (_I32 * len(sockets))(*sockets), rank, len(sockets), time_limit)


def wait_for_all(seconds: float) -> None:
    _call("wait", seconds)


def abort(error: RankError) -> None:
    _call("abort", str(error).encode())


def states(num_ranks: int) -> list[RankState]:
    values = (_I64 * (4 * num_ranks))()
    _call("states", values, num_ranks)
    rows = [values[4 * rank : 4 * rank + 4] for rank in range(num_ranks)]
    return [
        RankState(rank, pid, count, age * 1e-9 if age >= 0 else None, bool(is_closed))
        for rank, (pid, count, age, is_closed) in enumerate(rows)
    ]


def close() -> None:
    _call("close")


def create_link(slot_bytes: int, time_limit: float) -> tuple[int, int]:
    """A link in new shared memory, as its sender: its number, and a descriptor to be opened."""
    descriptor, number = _I32(-1), _I32(0)
    arguments = (slot_bytes, time_limit, ctypes.byref(descriptor), ctypes.byref(number))
    _call_link("create", *arguments)
    return number.value, descriptor.value


def open_link(path: str) -> int:
    """The link whose shared memory `path` is, as its receiver; returns its number."""
    number = _I32(0)
    _call_link("open", path.encode(), ctypes.byref(number))
    return number.value


def open_sockets_link(sockets: Sequence[int], rank: int, time_limit: float) -> int:
    """A link over a connection of two ranks, of which this is the first or the second.

    Args:
        sockets: of both; this rank's is not read, and the other one is the link's.
        rank: 0 or 1.
        time_limit: seconds that a side waits for the other one.
    Returns:
        its number.
    """
    number = _I32(0)
    both = (_I32 * 2)(*sockets)
    _call_link("open_sockets", both, rank, time_limit, ctypes.byref(number))
    return number.value


def pass_on(number: int, values: torch.Tensor) -> None:
    """Give values to the receiver, or fill them with those of the sender.

    Args:
        number: of the link.
        values: contiguous, on the host; dtype and shape have to be the same on both sides.
    """
    columns = values.shape[-1] if values.ndim else 1
    rows = values.numel() // columns if columns else 0
    code = _DTYPE_CODES[values.dtype]
    _call_link("pass", number, values.data_ptr(), code, rows, columns, values.nbytes)


def abort_link(number: int, error: RankError) -> None:
    _call_link("abort", number, str(error).encode())


def close_link(number: int) -> None:
    _call_link("close", number)


def rank_error(error: BaseException) -> RankError | None:
    """What a collective says that failed in C++, alone or in a compiled program; None: others."""
    match = _LINES.search(str(error))
    return RankError(*match.groups()) if match else None


def _call(name: str, *values: Any) -> None:
    _call_function("ranks", name, _ARGUMENTS[name], *values)


def _call_link(name: str, *values: Any) -> None:
    _call_function("links", name, _LINK_ARGUMENTS[name], *values)


def _call_function(kind: str, name: str, types: tuple[Any, ...], *values: Any) -> None:
    # ctypes lets other threads of Python run meanwhile
    library = native.c_functions()
    function = getattr(library, f"specc_{kind}_{name}")
    function.argtypes, function.restype = types, _I32
    if function(*values):
        text = getattr(library, f"specc_{kind}_error")
        text.argtypes, text.restype = (), _TEXT
        message = text().decode(errors="replace")
        raise rank_error(RuntimeError(message)) or RuntimeError(message)


def as_rank_error(function: Any, *arguments: torch.Tensor) -> Any:
    """Call an operator; its RankError, where that is why it fails."""
    try:
        return function(*arguments)
    except RuntimeError as error:
        found = rank_error(error)
        if found is None:
            raise
        raise found from None
