"""Links between two ranks: values go one way, from the one that has made it to the other one.

On one host they go through shared memory, between hosts over TCP, as those of a group do. Both
sides say dtype and shape, so a receiver that expects something else gets an error. A value is
passed on when the other side is there: a sender waits for that, and rank 0 has a thread that waits
for the results of the last stage.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

from specc.errors import RankError
from specc.kernels import ranks
from specc.runtime.ranks.group import SLOT_BYTES

Take = Callable[[tuple[int, ...], torch.dtype], Tensor]


class Link:
    """One side of a link; `create`, `open` or `over` make it.

    Args:
        number: by which the operators' library knows it.
        descriptor: what keeps the shared memory there for the receiver; None where there is none.
    """

    def __init__(self, number: int, descriptor: int | None = None) -> None:
        self._number = number
        self._descriptor = descriptor
        self._is_open = True

    @classmethod
    def create(cls, time_limit: float) -> Link:
        """Make a link on this host, as its sender.

        Args:
            time_limit: seconds that a side waits for the other one.
        Raises:
            RankError: no memory.
        """
        return cls(*ranks.create_link(SLOT_BYTES, time_limit))

    @classmethod
    def open(cls, ticket: str) -> Link:
        """Open a link of this host, as its receiver.

        Raises:
            RankError: the sender is gone, or somebody has opened it.
        """
        return cls(ranks.open_link(ticket))

    @classmethod
    def over(cls, sockets: Sequence[int], rank: int, time_limit: float) -> Link:
        """A link of two hosts.

        Args:
            sockets: as of `Meeting.connect`, of the sender and the receiver.
            rank: 0 of the sender, 1 of the receiver.
            time_limit: seconds that a side waits for the other one.
        """
        return cls(ranks.open_sockets_link(sockets, rank, time_limit))

    @property
    def ticket(self) -> str:
        """With this, `open` finds it; of its sender on this host."""
        assert self._descriptor is not None
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def send(self, values: Tensor) -> None:
        """Give values on.

        Raises:
            RankError: the receiver is gone, late, or expects something else.
        """
        ranks.pass_on(self._number, values.contiguous())

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """What the sender gives next.

        Raises:
            RankError: the sender is gone, late, or sends something else.
        """
        values = torch.empty(tuple(shape), dtype=dtype)
        ranks.pass_on(self._number, values)
        return values

    def abort(self, reason: str) -> None:
        """End all waits on it, on both sides; the first reason stays. Not if it is closed."""
        if self._is_open:
            # another thread may close it at this moment, which ends all waits, too
            with contextlib.suppress(RankError):
                ranks.abort_link(
                    self._number, RankError(reason, "all ranks at work", "start the ranks again")
                )

    def close(self) -> None:
        """Let go of it: the other side fails. More than once is once."""
        if not self._is_open:
            return
        self._is_open = False
        ranks.close_link(self._number)
        if self._descriptor is not None:
            os.close(self._descriptor)


class _Expected(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    found: Future[Tensor]


class StageResults:
    """What the last stage gives to rank 0: taken in a thread, in the order of passes.

    If rank 0 came for the results of a pass only when it needs them, the last stage would wait for
    that, and rank 0, which hands on the next pass meanwhile, for the last stage: with more than one
    pass in flight nobody would go on.

    Args:
        take: waits for the next value of the last stage, given its shape and dtype.
    """

    def __init__(self, take: Take) -> None:
        self._take = take
        self._expected: SimpleQueue[_Expected | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def expect(self, shape: tuple[int, ...], dtype: torch.dtype) -> Future[Tensor]:
        """Have the result of the pass that was begun last taken when it comes; see `Future`.

        Args:
            shape: of it.
        Returns:
            the result, or the RankError of a rank that is lost.
        """
        if self._thread is None:
            self._thread = threading.Thread(
                target=_run, args=(self._take, self._expected), name="specc-results", daemon=True
            )
            self._thread.start()
        found: Future[Tensor] = Future()
        self._expected.put(_Expected(shape, dtype, found))
        return found

    def close(self) -> None:
        """End the thread, once nothing is to come; whoever closes the link wakes it before."""
        self._expected.put(None)


def _run(take: Take, expected: SimpleQueue[_Expected | None]) -> None:
    while (one := expected.get()) is not None:
        try:
            one.found.set_result(take(one.shape, one.dtype))
        except BaseException as error:
            # of a link that has failed, every further value fails likewise
            one.found.set_exception(error)
