"""Races between programs of one launch, found in Triton's interpreter.

The interpreter runs the programs of a launch one after another, so that a program finds what all
before it have written: a kernel that needs an order passes every test there and fails on a GPU.
Here every launch of a test is watched:

- Its programs run in a shuffled order, another one for each launch.
- The bytes that each program reads, writes and updates atomically are recorded. Two programs that
  touch a byte, one of them by writing it, race, unless both do so by atomics, or atomics order
  them: what a program did before it released an address comes before what another does after it
  has acquired that address.
- A launch with atomics runs a second time, in the opposite order, from the same memory: what only
  one order makes right is found (a read of all that has arrived by a program that does not know
  itself the last one), and so is a result that depends on which one comes first.
- A program that touches bytes outside of the launch's tensors is named.

Two programs that write the same value race, too: that the values are equal is what one test's data
makes of them, and stores wider than their alignment tear. No kernel here needs it.

What happens between the threads of one program is not seen: no thread has its own accesses here.
"""

from __future__ import annotations

import contextlib
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from triton._C.libtriton import ir
from triton.runtime.interpreter import (
    GridExecutor,
    InterpretedFunction,
    InterpreterBuilder,
    TensorHandle,
)

from specc.kernels.cuda.shipped import ALIGNMENT
from tests.kernels.cuda.byte_ranges import Ranges, first_conflict, merged

READ, WRITE, ATOMIC = "reads", "writes", "updates atomically"
_ACQUIRES = (ir.MEM_SEMANTIC.ACQUIRE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE)
_RELEASES = (ir.MEM_SEMANTIC.RELEASE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE)
# ranges of one kind that a program may collect before they are merged
_MOST_RANGES = 20_000


class RaceError(AssertionError):
    """Programs of one launch touch the same bytes, or bytes that the launch was not given."""


@dataclass
class _Piece:
    """What a program touches between two atomics that order it among others.

    Args:
        program: its number in the grid.
        epoch: how many releases of the program came before.
        seen: program → its last epoch that comes before this piece.
    """

    program: int
    epoch: int
    seen: dict[int, int]
    touched: dict[str, list[np.ndarray]] = field(default_factory=dict)
    num_ranges: int = 0

    def add(self, kind: str, addresses: np.ndarray, size: int) -> None:
        """Note elements of `size` bytes at addresses, in any order, as runs of neighbors."""
        if addresses.size == 1:
            ranges = np.array([[addresses[0], addresses[0] + size]], dtype=np.uint64)
        else:
            (breaks,) = np.nonzero(addresses[1:] - addresses[:-1] != size)
            ranges = np.empty((len(breaks) + 1, 2), dtype=np.uint64)
            ranges[0, 0], ranges[-1, 1] = addresses[0], addresses[-1] + size
            ranges[1:, 0], ranges[:-1, 1] = addresses[breaks + 1], addresses[breaks] + size
        self.touched.setdefault(kind, []).append(ranges)
        self.num_ranges += len(ranges)
        if self.num_ranges > _MOST_RANGES:
            self.merge()
            self.num_ranges = 0

    def merge(self) -> None:
        for kind, parts in self.touched.items():
            self.touched[kind] = [merged(np.concatenate(parts))]

    def comes_after(self, other: _Piece) -> bool:
        return self.seen.get(other.program, -1) >= other.epoch


class _Launch:
    """Programs of a launch that runs, in the order of a permutation."""

    def __init__(self, order: Sequence[int]) -> None:
        self.order = order
        self.pieces: list[_Piece] = []
        self.has_atomics = False
        self._num_started = 0
        # address → program → its last epoch that was released there, or came before that
        self._released: dict[int, dict[int, int]] = {}

    def start_program(self) -> int:
        self._end_piece()
        program = self.order[self._num_started]
        self._num_started += 1
        self.pieces.append(_Piece(program, 0, {}))
        return program

    def note(self, kind: str, pointer: TensorHandle, mask: np.ndarray) -> None:
        addresses = _selected(pointer, mask)
        if addresses.size:
            size = max(1, pointer.get_element_ty().primitive_bitwidth // 8)
            self.pieces[-1].add(kind, addresses, size)

    def note_atomic(
        self, pointer: TensorHandle, mask: np.ndarray, semantic: Any, scope: Any
    ) -> None:
        if scope == ir.MEM_SYNC_SCOPE.CTA:
            # atomic for threads of the program alone
            self.note(READ, pointer, mask)
            self.note(WRITE, pointer, mask)
            return
        self.has_atomics = True
        addresses = np.unique(_selected(pointer, mask)).tolist()
        if semantic in _ACQUIRES:
            self._split(is_released=False)
            for address in addresses:
                _join(self.pieces[-1].seen, self._released.get(address, {}))
        self.note(ATOMIC, pointer, mask)
        if semantic in _RELEASES:
            piece = self.pieces[-1]
            for address in addresses:
                known = self._released.setdefault(address, {})
                _join(known, piece.seen)
                _join(known, {piece.program: piece.epoch})
            self._split(is_released=True)

    def _split(self, *, is_released: bool) -> None:
        before = self.pieces[-1]
        self._end_piece()
        epoch = before.epoch + is_released
        self.pieces.append(_Piece(before.program, epoch, dict(before.seen)))

    def _end_piece(self) -> None:
        if self.pieces:
            self.pieces[-1].merge()

    def ranges(self, kind: str) -> Ranges:
        """What all programs touch in a way; owners are numbers of pieces."""
        self._end_piece()
        found = [(i, x) for i, piece in enumerate(self.pieces) for x in piece.touched.get(kind, ())]
        if not found:
            return Ranges.none()
        owners = np.concatenate([np.full(len(x), i) for i, x in found])
        return Ranges(np.concatenate([x for _, x in found]), owners)

    def race(self) -> tuple[_Piece, str, _Piece, str, int] | None:
        """Two pieces, what they do, and where."""
        reads, writes, atomics = (self.ranges(kind) for kind in (READ, WRITE, ATOMIC))
        programs = np.array([piece.program for piece in self.pieces])

        def is_race(one: int, other: int) -> bool:
            a, b = self.pieces[one], self.pieces[other]
            return a.program != b.program and not (a.comes_after(b) or b.comes_after(a))

        for kind, ranges, other_kind, others in (
            (WRITE, writes, WRITE, writes),
            (WRITE, writes, READ, reads),
            (WRITE, writes, ATOMIC, atomics),
            (ATOMIC, atomics, READ, reads),
        ):
            found = first_conflict(ranges, others, programs, is_race)
            if found is not None:
                one, other, address = found
                return self.pieces[one], kind, self.pieces[other], other_kind, address
        return None


def _selected(pointer: TensorHandle, mask: np.ndarray) -> np.ndarray:
    # some operators make masks of integers, which as an index would be places
    return np.broadcast_to(pointer.data, mask.shape)[mask.astype(bool, copy=False)]


def _join(clock: dict[int, int], other: dict[int, int]) -> None:
    for program, epoch in other.items():
        clock[program] = max(epoch, clock.get(program, -1))


@dataclass(frozen=True)
class Seen:
    """A launch, and for which of its arguments Triton would compile another kernel.

    Args:
        folded: integers that are 1: Triton makes them constants.
        unaligned: tensors that do not start at a multiple of 16 bytes.
    """

    name: str
    folded: tuple[str, ...]
    unaligned: tuple[str, ...]


@dataclass
class _Watch:
    """What `watched` looks at: `name` seeds the orders."""

    name: str
    seen: list[Seen] = field(default_factory=list)


_watched: list[_Watch] = []
_running: _Launch | None = None
_kernel: InterpretedFunction | None = None


@contextlib.contextmanager
def watched(name: str = "") -> Iterator[list[Seen]]:
    """Watch the launches of this process; `name`, say of a test, seeds their orders."""
    _patch()
    watch = _Watch(name)
    _watched.append(watch)
    try:
        yield watch.seen
    finally:
        _watched.remove(watch)


def _patch() -> None:
    """Patch the interpreter of this process; a second call changes nothing."""
    if hasattr(GridExecutor, "specc_run"):
        return
    GridExecutor.specc_run = GridExecutor.__call__
    GridExecutor.__call__ = _run
    run = InterpretedFunction.run
    set_grid_idx = InterpreterBuilder.set_grid_idx
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    rmw, cas = InterpreterBuilder.create_atomic_rmw, InterpreterBuilder.create_atomic_cas

    def place(self: InterpreterBuilder, x: int, y: int, z: int) -> None:
        if _running is not None:
            x, y, z = np.unravel_index(_running.start_program(), self.grid_dim)
            x, y, z = int(x), int(y), int(z)
        set_grid_idx(self, x, y, z)

    def watch_load(self: InterpreterBuilder, ptrs: Any, mask: Any, *rest: Any) -> Any:
        if _running is not None:
            _running.note(READ, ptrs, mask.data)
        return load(self, ptrs, mask, *rest)

    def watch_store(self: InterpreterBuilder, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        if _running is not None:
            _running.note(WRITE, ptrs, mask.data)
        return store(self, ptrs, value, mask, *rest)

    def watch_rmw(
        self: InterpreterBuilder, op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any
    ) -> Any:
        if _running is not None:
            _running.note_atomic(ptr, mask.data, sem, scope)
        return rmw(self, op, ptr, val, mask, sem, scope)

    def watch_cas(
        self: InterpreterBuilder, ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any
    ) -> Any:
        if _running is not None:
            _running.note_atomic(ptr, np.ones(np.shape(ptr.data), dtype=bool), sem, scope)
        return cas(self, ptr, cmp, val, sem, scope)

    def remember(kernel: InterpretedFunction, *args: Any, **options: Any) -> Any:
        global _kernel
        _kernel = kernel
        return run(kernel, *args, **options)

    InterpretedFunction.run = remember
    InterpreterBuilder.set_grid_idx = place
    InterpreterBuilder.create_masked_load = watch_load
    InterpreterBuilder.create_masked_store = watch_store
    InterpreterBuilder.create_atomic_rmw = watch_rmw
    InterpreterBuilder.create_atomic_cas = watch_cas


def _run(self: GridExecutor, *args: Any, **options: Any) -> None:
    """In place of the executor: run a launch, and look at what it did."""
    if not _watched or _running is not None:
        self.specc_run(*args, **options)
        return
    name = self.fn.__name__
    given = dict(zip(self.arg_names, args, strict=False))
    given |= {key: x for key, x in options.items() if key in self.arg_names}
    tensors = {key: x for key, x in given.items() if isinstance(x, torch.Tensor)}
    grid = self.grid(given) if callable(self.grid) else self.grid
    grid = (*grid, *(1,) * (3 - len(grid)))
    watch = _watched[-1]
    watch.seen.append(_seen(name, given, tensors, self.constexprs))
    order = list(range(int(np.prod(grid))))
    random.Random(zlib.crc32(f"{watch.name} {len(watch.seen)}".encode())).shuffle(order)
    before = _copies(tensors)
    launch = _recorded(self, order, args, options)
    _check(launch, name, grid, tensors)
    if launch.has_atomics and len(order) > 1:
        once = _copies(tensors)
        for storage, copy in before:
            storage.copy_(copy)
        launch = _recorded(self, order[::-1], args, options)
        _check(launch, name, grid, tensors)
        for (_, one), (storage, _) in zip(once, before, strict=True):
            if not _equal(one, storage):
                raise RaceError(
                    f"{name}, grid {grid}: found other results where its programs run in the"
                    " opposite order; needed the same: what atomics return depends on which comes"
                    " first"
                )


def _seen(
    name: str, given: dict[str, Any], tensors: dict[str, torch.Tensor], fixed: Sequence[str]
) -> Seen:
    fixed = {*fixed, *(_kernel.kwargs["do_not_specialize"] or ())} if _kernel else fixed
    ones = [key for key, x in given.items() if isinstance(x, int) and x == 1 and key not in fixed]
    unaligned = [key for key, x in tensors.items() if x.numel() and x.data_ptr() % ALIGNMENT]
    return Seen(name, tuple(ones), tuple(unaligned))


def _recorded(executor: GridExecutor, order: Sequence[int], args: Any, options: Any) -> _Launch:
    global _running
    _running = launch = _Launch(order)
    try:
        executor.specc_run(*args, **options)
    finally:
        _running = None
    return launch


def _copies(tensors: dict[str, torch.Tensor]) -> list[tuple[Any, Any]]:
    """(memory, what it holds now) of all tensors, each once."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors.values()}
    return [(storage, storage.clone()) for storage in storages.values()]


def _equal(one: torch.UntypedStorage, other: torch.UntypedStorage) -> bool:
    """Whether all bits are the same; `bytes` of a storage would take a call for each byte."""
    a, b = (torch.empty(0, dtype=torch.uint8, device=x.device).set_(x) for x in (one, other))
    return torch.equal(a, b)


def _check(
    launch: _Launch, name: str, grid: Sequence[int], tensors: dict[str, torch.Tensor]
) -> None:
    """Raise for a race, and for what lies outside of the tensors."""

    def place(program: int) -> tuple[int, ...]:
        return tuple(int(i) for i in np.unravel_index(program, grid))

    found = launch.race()
    if found is not None:
        one, kind, other, other_kind, address = found
        raise RaceError(
            f"{name}, grid {tuple(grid)}: found that program {place(one.program)} {kind} and"
            f" program {place(other.program)} {other_kind} {_element(address, tensors)}; needed"
            " atomics of both, or programs that share nothing they write; do: give each its own"
            " rows, or merge in another launch"
        )
    spans = [x.untyped_storage() for x in tensors.values()]
    spans = merged(np.array([[s.data_ptr(), s.data_ptr() + s.nbytes()] for s in spans], np.uint64))
    for kind in (READ, WRITE, ATOMIC):
        ranges = launch.ranges(kind)
        outside = ranges.outside_of(spans)
        if outside is not None:
            piece = launch.pieces[ranges.owners[outside]]
            address = int(ranges.bounds[outside, 0])
            raise RaceError(
                f"{name}, grid {tuple(grid)}: found that program {place(piece.program)} {kind}"
                f" {address:#x}, beside {_element(address, tensors)}; needed addresses in the"
                f" launch's tensors; do: mask the access"
            )


def _element(address: int, tensors: dict[str, torch.Tensor]) -> str:
    """The tensor whose memory an address is in, or is nearest to, and the element there."""
    distances = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        first, last = storage.data_ptr(), storage.data_ptr() + storage.nbytes() - 1
        far = max(first - address, address - last, 0)
        offset = (address - tensor.data_ptr()) // tensor.element_size()
        distances[name] = far, f"element {offset} of {name} {list(tensor.shape)}"
    return min(distances.values(), default=(0, f"{address:#x}"))[1]
