"""Rank 0's side of an engine that several ranks run: what it runs, it orders."""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor

from specc.runtime.execution.draws import Draws
from specc.runtime.ranks.answers import checksum
from specc.runtime.ranks.job import Job
from specc.runtime.ranks.order_checks import copy_tensors
from specc.runtime.ranks.orders import Commit, Kind, Message
from specc.runtime.ranks.rank_group import (
    NUM_INPUTS,
    RankGroup,
    drawn_tokens,
    whole_logits,
    whole_votes,
)
from specc.runtime.ranks.stage_passes import StagePasses
from specc.runtime.ranks.watch import Watch
from specc.runtime.scheduling.state_slabs import StateCopy

# more than `Watch` takes for ranks that do not end
_JOIN_S = 15.0
T = TypeVar("T")


class Leader:
    """Gives orders; when nobody has it any more, the other ranks end.

    Args:
        job: whose ranks are ready.
        watch: of the job.
        vocab_size: columns of the target's logits.
        operators: namespace of the `specc::` operators.
        passes: of rank 0, where the target has stages.
    """

    def __init__(
        self,
        job: Job,
        watch: Watch,
        vocab_size: int,
        operators: Any = torch.ops.specc,
        passes: StagePasses | None = None,
    ) -> None:
        self._passes = passes
        self._job = job
        self._vocab_size = vocab_size
        self._operators = operators
        self._end = weakref.finalize(self, end_job, job, watch)

    @property
    def pids(self) -> list[int | None]:
        """Process ids of the other ranks, rank 1 first."""
        return [follower.pid for follower in self._job.followers]

    @property
    def is_lost(self) -> bool:
        """A rank is lost, and every order fails from now on."""
        return self._job.failure is not None

    def check(self) -> None:
        """Raises RankError: a rank is lost."""
        self._job.check()

    @property
    def group(self) -> RankGroup:
        """Of this rank."""
        return self._job.group

    @property
    def num_stages(self) -> int:
        """Stages of the target; 1 where every rank runs all layers."""
        return 1 if self._passes is None else self._passes.num_stages

    def run_pass(
        self, model: int, inputs: tuple[Tensor | None, ...], run: Callable[..., Tensor]
    ) -> Tensor:
        """A pass of all ranks, of a model without stages.

        Args:
            model: number of the model.
            inputs: of its program. Of votes among them, see `whole_votes`.
            run: the program of this rank.
        Returns:
            [R, V] logits.
        Raises:
            RankError: a rank is lost, this one included.
        """
        with self.ordered(Kind.PASS, inputs, model):
            logits = self.whole_logits(run(*inputs))
            self.whole_votes(inputs)
            return logits

    def run_draw(
        self,
        model: int,
        draws: Draws,
        inputs: tuple[Tensor | None, ...],
        run: Callable[..., Tensor],
    ) -> Tensor:
        """A pass of all ranks that yields tokens; as `run_pass`.

        Args:
            model: number of the model.
            draws: of the R rows with logits.
            inputs: of its program.
            run: the program of this rank.
        Returns:
            [R] int64 tokens.
        Raises:
            RankError: a rank is lost, this one included.
        """
        group, vocab_size = self._job.group, self._vocab_size
        with self.ordered(Kind.DRAW, _drawn(inputs, draws), model):
            tokens = drawn_tokens(group, run(*inputs), draws, vocab_size, self._operators)
            self.whole_votes(inputs)
            return tokens

    def begin_staged(
        self,
        inputs: tuple[Tensor | None, ...],
        run: Callable[..., Tensor],
        draws: Draws | None = None,
    ) -> Callable[[], Tensor]:
        """Begin a pass of the target, which has stages; this rank's own is done when it returns.

        Args:
            inputs: of its program.
            run: the program of this rank.
            draws: of the R rows with logits, where tokens are wanted instead of these.
        Returns:
            waits for what the pass yields, once: [R, V] logits, or [R] int64 tokens. Other passes
            may be begun meanwhile, of sequences that are not in this one.
        Raises:
            RankError: a rank is lost, this one included; what is returned raises it, too.
        """
        assert self._passes is not None
        kind, tensors = (Kind.PASS, inputs) if draws is None else (Kind.DRAW, _drawn(inputs, draws))
        with self.ordered(kind, tensors):
            pending = self._passes.begin(run, inputs, draws is not None)
        return functools.partial(self._wait, pending.result)

    @contextlib.contextmanager
    def ordered(
        self, kind: Kind, tensors: tuple[Tensor | None, ...], model: int = 0
    ) -> Iterator[int]:
        """Give an order, and yield its number; within it, this rank does its part.

        Args:
            kind: of the order.
            tensors: of it, on the host.
            model: number of the model that it is about.
        Raises:
            RankError: a rank is lost, this one included: what fails within fails all.
        """
        with self._or_lost():
            yield self._job.order(kind, tensors, model)

    def _wait(self, result: Callable[[], T]) -> T:
        with self._or_lost():
            return result()

    @contextlib.contextmanager
    def _or_lost(self) -> Iterator[None]:
        """What fails in here fails all: the others have done it, or wait in it."""
        job = self._job
        with uninterrupted():
            try:
                yield
            except BaseException as error:
                job.fail_of(error)
                job.check()
                raise

    def whole_logits(self, logits: Tensor) -> Tensor:
        """[R, V] logits of a pass, of this rank's columns; see `whole_logits`."""
        return whole_logits(self._job.group, logits, self._vocab_size)

    def whole_votes(self, inputs: Sequence[Tensor | None]) -> None:
        """Those of a pass, of all ranks, where its inputs ask for votes; see `whole_votes`."""
        whole_votes(self._job.group, inputs)

    def ask(self, kind: Kind, tensors: tuple[Tensor | None, ...], model: int = 0) -> int:
        """Give an order that this rank has no part in; returns its number, see `answer`.

        Raises:
            RankError: a rank is lost.
        """
        with uninterrupted():
            return self._job.order(kind, tensors, model)

    def answer(self, rank: int, order: int) -> Message:
        """Wait for what a rank answers to an order.

        Raises:
            RankError: a rank is lost.
        """
        return self._wait(lambda: self._job.answer(rank, order))

    def commit(self, model: int, commit: Commit) -> None:
        """Have the others keep what a step of this rank has kept, before their next order.

        Raises:
            RankError: a rank is lost.
        """
        given = tuple(x for x in commit if x is not None)
        self._job.order(Kind.COMMIT, given, model, holds=True)

    def copy_states(self, copy: StateCopy) -> None:
        """Have the others do with their states what is done here, before their next order.

        Raises:
            RankError: a rank is lost.
        """
        self._job.order(Kind.STATES, copy_tensors(copy), holds=True)

    def checksums(self, slabs: list[Tensor]) -> list[bytes]:
        """[32] sha256 of the caches that all ranks have a part of, rank by rank.

        Args:
            slabs: of rank 0, the target's first.
        Raises:
            RankError: a rank is lost.
        """
        number = self._job.order(Kind.CHECKSUM)
        return [checksum(slabs), *self._job.wait_sums(number)]

    def close(self) -> None:
        """End the other ranks, and wait for that."""
        self._end()


def _drawn(inputs: tuple[Tensor | None, ...], draws: Draws) -> tuple[Tensor | None, ...]:
    """Tensors of a DRAW."""
    return (*inputs[:NUM_INPUTS], *draws, *inputs[NUM_INPUTS:])


def end_job(job: Job, watch: Watch) -> None:
    """Tell all ranks to end, and wait until they have."""
    if job.end() and threading.current_thread() is not watch:
        watch.join(_JOIN_S)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Inside, SIGINT waits: an order that only some ranks have got would part them.

    A second one does not wait.
    """
    before = signal.getsignal(signal.SIGINT)
    # handlers run in the main thread alone; one that was not set from Python cannot be put back
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if caught:
            before(number, frame)
        caught.append((number, frame))

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if caught:
        before(*caught[0])
