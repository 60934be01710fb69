"""The C functions of the operators' library that open, watch and close a group of ranks.

They know nothing of engines: `specc.runtime.ranks.group` is what a process uses.
"""

from __future__ import annotations

import ctypes
import re
from typing import Any, NamedTuple

import torch

from specc.errors import RankError
from specc.kernels import native

_I32, _I64, _F64, _TEXT = ctypes.c_int, ctypes.c_int64, ctypes.c_double, ctypes.c_char_p
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "create": (_I32, _I64, _F64, ctypes.POINTER(_I32)),
    "open": (_TEXT, _I32, _I32),
    "open_gloo": (_TEXT, _F64),
    "wait": (_F64,),
    "abort": (_TEXT,),
    "states": (ctypes.POINTER(_I64), _I32),
    "close": (),
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


def open_gloo(name: str, time_limit: float) -> None:
    """Open a group over the process group of this name, which has a gloo backend."""
    _call("open_gloo", name.encode(), time_limit)


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


def rank_error(error: BaseException) -> RankError | None:
    """What a collective says that failed in C++, alone or in a compiled program; None: others."""
    match = _LINES.search(str(error))
    return RankError(*match.groups()) if match else None


def _call(name: str, *values: Any) -> None:
    # ctypes lets other threads of Python run meanwhile
    library = native.c_functions()
    function = getattr(library, f"specc_ranks_{name}")
    function.argtypes, function.restype = _ARGUMENTS[name], _I32
    if function(*values):
        text = library.specc_ranks_error
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
