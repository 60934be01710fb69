"""What the last stage gives to rank 0: taken in a thread, in the order of passes.

A value crosses when both sides are there. If rank 0 came for the results of a pass only when it
needs them, the last stage would wait for that, and rank 0, which hands on the next pass meanwhile,
for the last stage: with more than one pass in flight nobody would go on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

Take = Callable[[tuple[int, ...], torch.dtype], Tensor]


class _Expected(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    found: Future[Tensor]


class StageResults:
    """Results of passes that rank 0 has begun.

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
            dtype: of it.
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
