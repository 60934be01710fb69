"""A simulated device whose captured graphs have two branches, and what these do to each other.

A replay runs the side branch as soon as it may, as late as it may, or a few operators at a time
between those of the other one. What is right in all three orders bit for bit reads nothing that the
other branch writes, as far as it shows; `conflicts` finds what one run need not show.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.runtime.backends.captured.simulated_device import LateDevice, SimulatedDevice, _LateTape
from tests.runtime.backends.captured.tape import Call, Tape, given_to, storage_of

EARLY, LATE, BETWEEN = "early", "late", "between"
ORDERS = (EARLY, LATE, BETWEEN)
MAIN, SIDE = "main", "side"


@dataclass(eq=False)
class Branch:
    """Operators of the side stream, after some and before others of the main one."""

    after: int
    calls: list[Call] = field(default_factory=list)
    until: int | None = None


class BranchedTape(Tape):
    """Recorded operators of two streams."""

    def __init__(self, device: Any, *more: Any) -> None:
        super().__init__(*more)
        self.branches: list[Branch] = []
        self.current: Branch | None = None
        self._owner = device

    def record(self, function: Any, args: tuple, kwargs: dict, outputs: list[Tensor]) -> None:
        super().record(function, args, kwargs, outputs)
        if self.current is not None:
            self.current.calls.append(self.calls.pop())

    @torch.inference_mode()
    def run(self, first: int, last: int, held: list[Tensor]) -> None:
        if first == 0:
            self.poison()
            self._done = dict.fromkeys(self.branches, 0)
        for place in range(first, last + 1):
            for branch in self.branches:
                self._go_on(branch, place, held)
            if place < last:
                beside = any(b.after <= place < (b.until or 0) for b in self.branches)
                self._watched(self.calls[place], MAIN if beside else None, held)

    def _go_on(self, branch: Branch, place: int, held: list[Tensor]) -> None:
        """Run what the order has of the side branch before this call of the main one."""
        assert branch.until is not None
        count, length = len(branch.calls), branch.until - branch.after
        if place < branch.after or (place < branch.until and self._owner.order == LATE):
            needed = 0
        elif place >= branch.until or self._owner.order == EARLY:
            needed = count
        else:
            needed = count * (place - branch.after) // length
        while self._done[branch] < needed:
            self._watched(branch.calls[self._done[branch]], SIDE, held)
            self._done[branch] += 1

    def _watched(self, call: Call, branch: str | None, held: list[Tensor]) -> None:
        """Perform a call, and note what it writes of the tensors that the device watches.

        Over other contents first: what is there already would not show where it is written again.
        """
        self._owner.branch = branch
        writes = _touched([self.live(call, held)]).writes if branch else []
        given = {storage_of(tensor) for _, tensor in writes}
        for name, tensor in self._owner.watched.items():
            if storage_of(tensor) not in given:
                continue
            before, other = tensor.clone(), 3 - tensor
            tensor.copy_(other)
            self.perform(call, held)
            written = self._owner.written[branch].setdefault(name, torch.zeros_like(tensor) != 0)
            written |= tensor != other
            tensor.copy_(before)
        self.perform(call, held)
        self._owner.branch = None


class _LateBranchedTape(BranchedTape, _LateTape):
    def __init__(self, device: Any) -> None:
        super().__init__(device, device)


class _Branches:
    """What both devices have.

    Args:
        order: of the branches, in replays; see the module.

    `watched` are tensors of which the elements that a branch writes while the other one runs are
    marked in `written`; `branch` is the one that runs.
    """

    tape: Any

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order
        self.branch: str | None = None
        self.watched: Mapping[str, Tensor] = {}
        self.written: dict[str, dict[str, Tensor]] = {MAIN: {}, SIDE: {}}

    def watch(self, tensors: Mapping[str, Tensor]) -> None:
        """From now on, see which of their elements branches write."""
        self.watched, self.written = tensors, {MAIN: {}, SIDE: {}}

    def written_by(self, branch: str) -> set[str]:
        """Names of the tensors that a branch has written to."""
        return {name for name, marks in self.written[branch].items() if bool(marks.any())}

    def written_by_both(self) -> list[str]:
        """Names of the tensors of which both have written an element."""
        main, side = self.written[MAIN], self.written[SIDE]
        return [name for name in main if name in side and bool((main[name] & side[name]).any())]

    def side_stream(self) -> Side:
        return Side(self)

    def capture(self, run: Any) -> Any:
        tape = super().capture(run)  # type: ignore[misc]
        # as CUDA, which ends such a capture with an error
        assert all(b.until is not None for b in tape.branches), "a branch that nothing joins"
        return tape


class BranchedDevice(_Branches, SimulatedDevice):
    """See the module."""

    def make_tape(self) -> BranchedTape:
        return BranchedTape(self)


class LateBranchedDevice(_Branches, LateDevice):
    """See the module and `LateDevice`."""

    def make_tape(self) -> _LateBranchedTape:
        return _LateBranchedTape(self)


class Side:
    """`SideStream`; outside of a capture, what it is given is done at once."""

    def __init__(self, device: Any) -> None:
        self._device = device

    @contextlib.contextmanager
    def forked(self) -> Iterator[None]:
        tape = self._device.tape
        if tape is None:
            yield
            return
        tape.current = Branch(len(tape.calls))
        tape.branches.append(tape.current)
        try:
            yield
        finally:
            tape.current = None

    def join(self) -> None:
        tape = self._device.tape
        for branch in tape.branches if tape is not None else ():
            if branch.until is None:
                branch.until = len(tape.calls)


def conflicts(tape: BranchedTape, leaves_out: Iterable[Tensor] = ()) -> list[str]:
    """Bytes that one branch writes and the other one touches, by what operators are given.

    Args:
        leaves_out: tensors that operators get whole and touch by the rows of a block table: caches.
    """
    without = {storage_of(tensor) for tensor in leaves_out}
    held = tape.hold()
    found = []
    for branch in tape.branches:
        beside = tape.calls[branch.after : branch.until]
        side, main = (
            _touched(tape.live(call, held) for call in calls) for calls in (branch.calls, beside)
        )
        for one, other in ((side, main), (main, side)):
            found += [
                f"{name} writes what {other_name} touches"
                for name, written in one.writes
                for other_name, touched in (*other.reads, *other.writes)
                if storage_of(written) == storage_of(touched)
                and storage_of(written) not in without
                and bool((_bytes(written) & _bytes(touched)).any())
            ]
    return found


class Touched(NamedTuple):
    """Names of operators, and tensors that they read and write."""

    reads: list[tuple[str, Tensor]]
    writes: list[tuple[str, Tensor]]


def _touched(calls: Iterable[Call]) -> Touched:
    """What operators read, and what they write: arguments that they change, and results."""
    found = Touched([], [])
    for function, args, kwargs, outputs in calls:
        pairs = given_to(function, args, kwargs)
        name, own = str(function), {storage_of(tensor) for _, tensor in pairs}
        # what makes a view touches nothing; some make one only where they can
        if function.is_view and all(storage_of(out) in own for out in outputs):
            continue
        for is_written, tensor in pairs:
            (found.writes if is_written else found.reads).append((name, tensor))
        found.writes.extend((name, out) for out in outputs)
    return found


def _bytes(tensor: Tensor) -> Tensor:
    """[bytes of its memory] whether they are the tensor's."""
    size = tensor.element_size()
    marks = torch.zeros(tensor.untyped_storage().nbytes() // size, dtype=torch.bool)
    if tensor.numel():
        marks.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(True)
    return marks.repeat_interleave(size)
