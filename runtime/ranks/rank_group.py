"""What ranks compute together: the little that leader and followers ask of their group."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from specc.runtime.execution.draws import Draws

_LOOK_S = 0.2
T = TypeVar("T")

# of a model's program; one more where layers keep states, and one more where blocks are voted on
NUM_INPUTS = 8

# before the address in a ticket
NCCL = "nccl+"


class RankGroup(Protocol):
    """The group of the ranks of one engine, in one of their processes.

    The collectives inside of programs find it by themselves; here is what stands around a program.
    """

    rank: int
    size: int

    @property
    def ticket(self) -> str:
        """With this, `open_group` finds the same group in another process; of rank 0."""
        ...

    @property
    def position(self) -> int:
        """Collectives that this rank has been through; tells which one keeps the others waiting."""
        ...

    def gather(self, logits: Tensor) -> Tensor:
        """Put the logits of a pass together, on all ranks after the same pass.

        Args:
            logits: [R, C] of this rank.
        Returns:
            [R, V] on rank 0; what the others get is for nobody.
        """
        ...

    def best(self, scores: Tensor, tokens: Tensor) -> Tensor:
        """The token of the largest score of all ranks, the smaller one of two.

        Args:
            scores: [R] float32 of this rank.
            tokens: [R] int64.
        Returns:
            [R] int64, the same on all ranks.
        """
        ...

    def add(self, values: Tensor) -> Tensor:
        """Add up float32 values of any shape; the sum, on all ranks."""
        ...

    def abort(self, reason: str) -> None:
        """Wake all ranks that wait in a collective, now and later: those calls fail."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class Copies:
    """Ranks of which each computes all of every pass: they have nothing to say to each other.

    Args:
        rank: of this process.
        size: ranks.
    """

    ticket = "copies"
    position = 0

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def gather(self, logits: Tensor) -> Tensor:
        """See `RankGroup.gather`: the logits are whole already."""
        return logits if self.rank == 0 else logits.new_empty(len(logits), 0)

    def best(self, scores: Tensor, tokens: Tensor) -> Tensor:
        """See `RankGroup.best`: each knows it alone."""
        return tokens

    def add(self, values: Tensor) -> Tensor:
        """See `RankGroup.add`: each has the whole."""
        return values

    def abort(self, reason: str) -> None:
        """Nobody waits in it."""

    def close(self) -> None:
        """It holds nothing."""


class Gathering(Copies):
    """Stands for a group over a network while rank 0 waits for the others to come to its address.

    Args:
        ticket: the address, `tcp://HOST:PORT`.
        size: ranks.
        join: joins it as rank 0, within so many seconds.
    """

    def __init__(self, ticket: str, size: int, join: Callable[[float], RankGroup]) -> None:
        super().__init__(0, size)
        self.ticket = ticket
        self._join = join

    def meet(self, timeout_s: float, check: Callable[[], None]) -> RankGroup:
        """The group, when all are there; the others open its ticket meanwhile.

        Args:
            timeout_s: to wait for them.
            check: called now and then; what it raises ends the wait.
        """
        return joined(lambda: self._join(timeout_s), check)


def joined(join: Callable[[], T], check: Callable[[], None]) -> T:
    """Wait for other ranks in a thread: of one that cannot come, only others know.

    Args:
        join: returns when all are there.
        check: called now and then; what it raises ends the wait.
    """
    met: Future[T] = Future()

    def run() -> None:
        try:
            met.set_result(join())
        except BaseException as error:
            met.set_exception(error)

    threading.Thread(target=run, name="specc-ranks-meet", daemon=True).start()
    while True:
        with contextlib.suppress(TimeoutError):
            return met.result(_LOOK_S)
        check()


def whole_logits(group: RankGroup, logits: Tensor, vocab_size: int) -> Tensor:
    """The logits of a pass, of all ranks; each of them has to call this after the same pass.

    Args:
        group: of this rank.
        logits: [R, C], this rank's columns, or all.
        vocab_size: V. Columns after it pad the last rank's part.
    Returns:
        [R, V] on rank 0; what the others get is for nobody.
    """
    if logits.shape[1] == vocab_size:
        return logits
    found = group.gather(logits)
    return found if found.shape[1] <= vocab_size else found[:, :vocab_size].contiguous()


def whole_votes(group: RankGroup, inputs: Sequence[Tensor | None]) -> None:
    """Add up the votes of a pass: a rank has those of its own heads.

    Args:
        group: of this rank.
        inputs: of the pass. The last, where it is no integers, is the mass of blocks (see
            `block_mass_reference`), and is changed: rows that vote become those of all ranks.
    """
    for mass in inputs[NUM_INPUTS:]:
        if mass is not None and mass.is_floating_point():
            mass.copy_(torch.where(mass < 0, mass, group.add(mass)))


def own_votes(mass: Tensor) -> Tensor:
    """Rank 0's mass before a pass, as another rank begins with it: what is counted is there."""
    return mass.clamp(max=0)


def drawn_tokens(
    group: RankGroup, logits: Tensor, draws: Draws, vocab_size: int, operators: Any
) -> Tensor:
    """The tokens after each row of a pass, of all ranks; as `whole_logits`, but tokens cross.

    Args:
        group: of this rank.
        logits: [R, C], this rank's columns, or all.
        draws: of R rows.
        vocab_size: V. Columns after it pad the last rank's part.
        operators: namespace of the `specc::` operators.
    Returns:
        [R] int64 on all ranks.
    """
    columns = logits.shape[1]
    is_whole = columns == vocab_size
    first = 0 if is_whole else group.rank * columns
    scores, tokens = operators.column_winners(logits, *draws, first, vocab_size)
    return tokens if is_whole else group.best(scores, tokens)
