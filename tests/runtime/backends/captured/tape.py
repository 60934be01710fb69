"""What a simulated device records of a capture: operators, and where in memory they read and write.

As a CUDA graph, a tape knows addresses and keeps nothing alive that lies outside of it. Memory that
the recording took stays its own, whoever lets go of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
# read values on the host, or make shapes of them
_FORBIDDEN = {
    aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.equal, aten.allclose,
    aten.nonzero, aten.masked_select, aten.unique_dim, aten._unique2, aten.bincount,
    aten.unique_consecutive, aten.repeat_interleave, aten.argwhere,
}  # fmt: skip


class Call(NamedTuple):
    """A recorded operator; its tensors are `Place`s, or, while it is replayed, tensors."""

    function: Any
    args: tuple
    kwargs: dict
    outputs: list[Any]


class Place(NamedTuple):
    """Number of a tensor of a recording, see `Tape.hold`."""

    number: int


class Memory:
    """A storage that a recording has met.

    Args:
        is_own: the recording took it, so it stays for replays when nobody else holds it.
    """

    def __init__(self, tensor: Tensor, is_own: bool) -> None:
        storage = tensor.untyped_storage()
        self.is_own, self.dtype = is_own, tensor.dtype
        self._ref, self._address = StorageWeakRef(storage), storage.data_ptr()
        self._num_bytes = storage.nbytes()
        # of a tape's own, once nobody else holds it
        self.kept: torch.UntypedStorage | None = None
        # what outside memory held before the recording wrote there
        self.before: Tensor | None = None

    def storage(self, whose: str) -> torch.UntypedStorage:
        """As it lies where it was recorded.

        Args:
            whose: operator and tensor, for errors.
        """
        if self.kept is not None:
            return self.kept
        found = torch.UntypedStorage._new_with_weak_ptr(self._ref.cdata)
        if found is None:
            assert self.is_own, f"a graph reads memory that nobody holds any more: {whose}"
            self.kept = torch.UntypedStorage(self._num_bytes)
            return self.kept
        assert found.data_ptr() == self._address, f"memory that has moved since: {whose}"
        return found

    def whole(self) -> Tensor | None:
        """All of it; None where nobody holds it any more."""
        found = self.kept
        if found is None:
            found = torch.UntypedStorage._new_with_weak_ptr(self._ref.cdata)
        if found is None:
            return None
        values = torch.empty(0, dtype=self.dtype)
        return values.set_(found, 0, (found.nbytes() // values.element_size(),))


class _Recorded:
    def __init__(self, memory: Memory, tensor: Tensor, whose: str) -> None:
        self.memory, self._whose = memory, whose
        self._dtype, self._offset = tensor.dtype, tensor.storage_offset()
        self._shape, self._strides = tuple(tensor.shape), tensor.stride()
        self._kept: Tensor | None = None

    def tensor(self) -> Tensor:
        if self._kept is not None:
            return self._kept
        storage = self.memory.storage(self._whose)
        found = torch.empty(0, dtype=self._dtype)
        found.set_(storage, self._offset, self._shape, self._strides)
        if self.memory.kept is not None:
            self._kept = found
        return found


class Tape:
    """Recorded operators."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        # number of the calls before a mark, and its event
        self.marks: list[tuple[int, Any]] = []
        # of all outputs
        self.num_bytes = 0
        # what it took stays where it was; else it goes elsewhere when nobody else holds it
        self.keeps_own = False
        self._memories: dict[int, Memory] = {}
        self._recorded: list[_Recorded] = []
        self._numbers: dict[tuple, int] = {}

    def before(self, function: Any, args: tuple, kwargs: dict) -> None:
        """What an operator is about to read and write."""
        for is_written, tensor in given_to(function, args, kwargs):
            memory = self._memory(tensor, is_own=False)
            if is_written and not memory.is_own and memory.before is None:
                whole = memory.whole()
                assert whole is not None
                memory.before = whole.clone()

    def record(self, function: Any, args: tuple, kwargs: dict, outputs: list[Tensor]) -> None:
        for out in outputs:
            self._memory(out, is_own=True)
        self.num_bytes += sum(out.nbytes for out in outputs)
        places = (self._places(x, str(function)) for x in (args, kwargs, outputs))
        self.calls.append(Call(function, *places))

    @torch.inference_mode()
    def end(self) -> None:
        """As a capture leaves memory: nothing is computed, and nothing is written."""
        for memory in self._memories.values():
            whole = memory.whole()
            if whole is not None and memory.is_own:
                poison(whole)
            elif whole is not None and memory.before is not None:
                whole.copy_(memory.before)
            memory.before = None

    @property
    def operators(self) -> list[str]:
        return [str(call.function) for call in self.calls]

    def replay(self) -> None:
        self.run(0, len(self.calls), self.hold())
        for _, event in self.marks:
            event.record()

    @torch.inference_mode()
    def hold(self) -> list[Tensor]:
        """The tensors of all places.

        Raises:
            AssertionError: memory that the recording did not take is gone.
        """
        # this is no work of the device
        with _disable_current_modes():
            return [recorded.tensor() for recorded in self._recorded]

    @torch.inference_mode()
    def run(self, first: int, last: int, held: list[Tensor]) -> None:
        """Some of the calls; the first ones after all that the recording took is poisoned."""
        if first == 0:
            self.poison()
        for call in self.calls[first:last]:
            self.perform(call, held)

    def poison(self) -> None:
        for memory in self._memories.values():
            if memory.is_own and (whole := memory.whole()) is not None:
                poison(whole)

    def live(self, call: Call, held: list[Tensor]) -> Call:
        return Call(call.function, *(_filled(values, held) for values in call[1:]))

    def perform(self, call: Call, held: list[Tensor]) -> None:
        """One call, on the tensors of its recording."""
        function, args, kwargs, outputs = self.live(call, held)
        found = [x for x in tree_leaves(function(*args, **kwargs)) if isinstance(x, Tensor)]
        for old, new in zip(outputs, found, strict=True):
            assert old.shape == new.shape, f"{function}: a shape that follows from data"
            if storage_of(old) != storage_of(new):
                old.copy_(new)

    def place_of(self, tensor: Tensor, whose: str) -> Place:
        """Where a tensor lies that is outside, or that has been recorded."""
        memory = self._memory(tensor, is_own=False)
        shape = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)
        number = self._numbers.setdefault((id(memory), *shape), len(self._recorded))
        if number == len(self._recorded):
            name = f"{tensor.dtype} {list(tensor.shape)} of {whose}"
            self._recorded.append(_Recorded(memory, tensor, name))
        return Place(number)

    def _memory(self, tensor: Tensor, is_own: bool) -> Memory:
        storage = tensor.untyped_storage()
        memory = self._memories.get(storage._cdata)
        if memory is None:
            # its weak reference keeps the number from being another storage's; what is empty is
            # nowhere, and cannot be gone
            memory = Memory(tensor, is_own or not storage.nbytes())
            if memory.is_own and self.keeps_own:
                memory.kept = storage
            self._memories[storage._cdata] = memory
        return memory

    def _places(self, values: Any, whose: str) -> Any:
        if isinstance(values, Tensor):
            return self.place_of(values, whose)
        if isinstance(values, dict):
            return {name: self._places(value, whose) for name, value in values.items()}
        if isinstance(values, list | tuple):
            return type(values)(self._places(value, whose) for value in values)
        return values


class Recorder(TorchDispatchMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # nothing is compiled under it; torch would import its compiler, 2 s of each process
        return False

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
        with _disable_current_modes():
            self._tape.before(func, args, kwargs)
        result = func(*args, **kwargs)
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        self._tape.record(func, args, kwargs, outputs)
        return result


def poison(tensor: Tensor) -> None:
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def storages_of(values: list[Any]) -> set[int]:
    return {storage_of(value) for value in values if isinstance(value, Tensor)}


def given_to(function: Any, args: tuple, kwargs: dict) -> list[tuple[bool, Tensor]]:
    """Tensors that an operator is given, and whether it writes there."""
    schema = function._schema.arguments
    given = [*zip(schema, args, strict=False)]
    given += [(x, kwargs[x.name]) for x in schema if x.name in kwargs]
    return [
        (argument.alias_info is not None and argument.alias_info.is_write, tensor)
        for argument, value in given
        for tensor in tree_leaves(value)
        if isinstance(tensor, Tensor)
    ]


def _filled(values: Any, held: list[Tensor]) -> Any:
    if isinstance(values, Place):
        return held[values.number]
    if isinstance(values, dict):
        return {name: _filled(value, held) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(_filled(value, held) for value in values)
    return values
