"""What ranks compute together: the little that leader and followers ask of their group."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from torch import Tensor

from specc.errors import FaultError
from specc.runtime.execution.draws import Draws

_LOOK_S = 0.2

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
        """Collectives that this rank has been through; tells who keeps the others waiting."""
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

    def abort(self, reason: str) -> None:
        """Nobody waits in it."""

    def close(self) -> None:
        """It holds nothing."""


class Gathering(Copies):
    """Stands for a group over a network while rank 0 waits for the others to come to its address.

    Args:
        ticket: the address, `tcp://HOST:PORT`.
        size: ranks.
    """

    def __init__(self, ticket: str, size: int) -> None:
        super().__init__(0, size)
        self.ticket = ticket

    def meet(self, timeout_s: float, check: Callable[[], None]) -> RankGroup:
        """The group, when all are there; the others open its ticket meanwhile.

        Args:
            timeout_s: to wait for them.
            check: called now and then; what it raises ends the wait.
        """
        met: Future[RankGroup] = Future()

        def join() -> None:
            try:
                met.set_result(_join_gloo(self.ticket, 0, self.size, timeout_s))
            except BaseException as error:
                met.set_exception(error)

        # of a rank that cannot come, only others know
        threading.Thread(target=join, name="specc-ranks-meet", daemon=True).start()
        while True:
            with contextlib.suppress(TimeoutError):
                return met.result(_LOOK_S)
            check()


def make_group(
    size: int, timeout_s: float, address: str | None = None, is_on_gpu: bool = False
) -> RankGroup:
    """A group of ranks that share a cut model, as its rank 0; the operators' library is loaded.

    Args:
        size: ranks.
        timeout_s: that a rank waits for the others in a collective.
        address: where ranks of several hosts meet; None: all are on this host, and share memory.
        is_on_gpu: what they add up is in the memory of GPUs, one for each.
    Raises:
        RankError: no memory, or a torch that cannot.
    """
    if is_on_gpu:
        from specc.runtime.ranks.nccl import NcclGathering

        return NcclGathering(address, size)
    if address is not None:
        return Gathering(address, size)
    from specc.runtime.ranks.group import RankGroup as SharedGroup

    return SharedGroup.create(size, timeout_s)


def open_group(ticket: str, rank: int, size: int, timeout_s: float) -> RankGroup:
    """The group that rank 0 has made.

    Args:
        ticket: rank 0's.
        rank: of this process.
        size: ranks.
        timeout_s: see `make_group`.
    Raises:
        FaultError: a group of a kind that is not known here.
        RankError: rank 0 is gone, or the group has another size.
    """
    if ticket == Copies.ticket:
        return Copies(rank, size)
    if ticket.startswith(NCCL):
        from specc.runtime.ranks.nccl import join_nccl

        return join_nccl(ticket.removeprefix(NCCL), rank, size, timeout_s)
    if ticket.startswith("tcp://"):
        return _join_gloo(ticket, rank, size, timeout_s)
    if not ticket.startswith("/proc/"):
        raise FaultError(
            f"a group {ticket!r}", "a group of this specc", "start all ranks with one installation"
        )
    from specc.runtime.ranks.group import RankGroup as SharedGroup

    return SharedGroup.open(ticket, rank, size)


def _join_gloo(address: str, rank: int, size: int, timeout_s: float) -> RankGroup:
    # loaded nowhere else: engines on one host need no torch.distributed
    from specc.runtime.ranks.gloo import join_gloo

    return join_gloo(address, rank, size, timeout_s)


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
