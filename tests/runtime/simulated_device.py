"""A device without a GPU that captures and replays as CUDA graphs do, and is stricter than they.

Capture records every operator with the tensors that it read and wrote. A replay runs the recorded
operators again on the same tensors, after it has poisoned all that the recording allocated: Python
between the operators does not run, inputs are read where they lay at capture, and a value that no
operator wrote before it is read shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
# read values on the host, or make shapes of them
_FORBIDDEN = {
    *(aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.equal, aten.allclose),
    *(aten.nonzero, aten.masked_select, aten.unique_dim, aten._unique2, aten.bincount),
    *(aten.unique_consecutive, aten.repeat_interleave, aten.argwhere),
}


class Tape:
    """Recorded operators."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, tuple, dict, list[Tensor]]] = []
        self._made: list[Tensor] = []

    def record(self, function: Any, args: tuple, kwargs: dict, outputs: list[Tensor]) -> None:
        self.calls.append((function, args, kwargs, outputs))
        given = _storages(tree_leaves((args, kwargs)))
        self._made += [out for out in outputs if _storage(out) not in given]

    @property
    def operators(self) -> list[str]:
        return [str(function) for function, *_ in self.calls]

    @torch.inference_mode()
    def replay(self) -> None:
        for tensor in self._made:
            _poison(tensor)
        for function, args, kwargs, outputs in self.calls:
            found = [x for x in tree_leaves(function(*args, **kwargs)) if isinstance(x, Tensor)]
            for old, new in zip(outputs, found, strict=True):
                assert old.shape == new.shape, f"{function}: a shape that follows from data"
                if _storage(old) != _storage(new):
                    old.copy_(new)


class _Recorder(TorchDispatchMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in _FORBIDDEN:
            raise RuntimeError(f"{func} reads device data on the host")
        if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_) and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        ):
            raise RuntimeError(f"{func} with a mask: a shape that follows from data")
        result = func(*args, **kwargs)
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        self._tape.record(func, args, kwargs, outputs)
        return result


class SimulatedDevice:
    """A `GraphDevice` on the CPU; `tapes` holds what it captured, `events` counts waits."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.tapes: list[Tape] = []
        self.num_waits = 0

    def capture(self, run: Callable[[], object]) -> Tape:
        tape = Tape()
        with _Recorder(tape):
            run()
        self.tapes.append(tape)
        return tape

    def record_event(self) -> SimulatedDevice:
        return self

    def synchronize(self) -> None:
        self.num_waits += 1

    def host_buffer(self, *shape: int, dtype: torch.dtype) -> Tensor:
        buffer = torch.empty(*shape, dtype=dtype)
        _poison(buffer)
        return buffer

    def used_bytes(self) -> int:
        return sum(out.nbytes for tape in self.tapes for *_, outs in tape.calls for out in outs)


def _poison(tensor: Tensor) -> None:
    if tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _storages(values: list[Any]) -> set[int]:
    return {_storage(value) for value in values if isinstance(value, Tensor)}
