"""Links between two ranks: values go one way, from the one that has made it to the other one.

On one host they go through shared memory, between hosts over gloo, as those of a group do. Both
sides say dtype and shape, so a receiver that expects something else gets an error. A value is
passed on when the other side is there: a sender waits for that.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from specc.errors import RankError
from specc.kernels import ranks
from specc.runtime.ranks.group import SLOT_BYTES


class Link:
    """One side of a link; `create`, `open` or `over` make it.

    Args:
        number: by which the operators' library knows it.
        descriptor: what keeps the shared memory there for the receiver; None where there is none.
        first_sends: of the two ranks, in the order of their group, the first is the sender.
    """

    def __init__(
        self, number: int, descriptor: int | None = None, first_sends: bool = True
    ) -> None:
        self._first_sends = first_sends
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
    def over(cls, name: str, time_limit: float, first_sends: bool) -> Link:
        """A link over a process group of torch.distributed of two ranks."""
        return cls(ranks.open_gloo_link(name, time_limit), None, first_sends)

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
        ranks.pass_on(self._number, values.contiguous(), self._first_sends)

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """What the sender gives next.

        Raises:
            RankError: the sender is gone, late, or sends something else.
        """
        values = torch.empty(tuple(shape), dtype=dtype)
        ranks.pass_on(self._number, values, self._first_sends)
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
