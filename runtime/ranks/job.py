"""What rank 0 knows of the ranks that follow it; its threads share this."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specc.errors import RankError, SpeccError
from specc.kernels.ranks import rank_error
from specc.runtime.ranks.channel import Channel
from specc.runtime.ranks.lost_rank import lost
from specc.runtime.ranks.orders import Kind, Message, encode, json_message, refused
from specc.runtime.ranks.rank_group import RankGroup
from specc.runtime.ranks.rank_options import RankOptions

# seconds until the watching thread knows why a rank could not be reached
_CAUSE_S = 5.0


@dataclass
class Follower:
    """A rank that follows.

    Args:
        rank: 1 or more.
        signs: of life, to and from it, and its reports.
        process: that rank 0 has started; None for one that somebody else has.
    """

    rank: int
    orders: Channel
    signs: Channel
    process: subprocess.Popen[bytes] | None = None
    pid: int | None = None
    host: str = ""
    is_ready: bool = False
    # the last order that it has done, and collectives since its start
    done: int = 0
    position: int = 0
    # `done` when somebody last looked
    last_done: int = 0
    # when it last gave a sign, and when it last got on, or had nothing to do
    beat_s: float = field(default_factory=time.monotonic)
    moved_s: float = field(default_factory=time.monotonic)
    sums: dict[int, bytes] = field(default_factory=dict)

    @property
    def name(self) -> str:
        where = [f"pid {self.pid}"] if self.pid else []
        where += [self.host] if self.host and self.process is None else []
        return f"rank {self.rank}" + (f" ({', '.join(where)})" if where else "")


class Job:
    """The ranks of an engine, as rank 0 sees them.

    Args:
        facts: about this installation and this engine, which all ranks have to share.
        setup: what the others load.
        group: of rank 0.
    """

    def __init__(
        self,
        options: RankOptions,
        facts: Mapping[str, Any],
        setup: Mapping[str, Any],
        group: RankGroup,
    ) -> None:
        self.options = options
        self.facts = dict(facts)
        self.setup = dict(setup)
        self.group = group
        self.followers: list[Follower] = []
        # rank → groups and links that it has made, where the target has stages
        self.offers: dict[int, dict[str, str]] = {}
        # orders that were sent
        self.sent = 0
        # bytes of orders that go with the next one
        self._held: list[bytes] = []
        self.changed = threading.Condition()
        self.failure: SpeccError | None = None
        self.is_started = self.is_closing = False
        self._owner = os.getpid()

    def check(self) -> None:
        """Raises SpeccError: a rank is lost, or all were told to end."""
        if (failure := self.failure) is not None:
            # a traceback of its own each time
            raise type(failure)(failure.found, failure.needed, failure.do)
        if self.is_closing:
            raise lost("an engine whose ranks were told to end")

    def order(
        self, kind: Kind, tensors: tuple[Any, ...] = (), model: int = 0, holds: bool = False
    ) -> int:
        """Give an order to all that follow; returns its number.

        Args:
            tensors: of it, on the host; they may change afterwards.
            model: number of the model that it is about.
            holds: it goes with the next order, in the same bytes: to wake the others takes longer
                than to write a message. Only for what nothing but a later order depends on.
        Raises:
            SpeccError: a rank is lost.
        """
        self.check()
        number = self.sent + len(self._held) + 1
        data = encode(Message(kind, tensors, model, number))
        if holds:
            self._held.append(data)
            return number
        data = b"".join([*self._held, data])
        self._held.clear()
        self.sent = number
        for follower in self.followers:
            try:
                follower.orders.send_bytes(data)
            except OSError as error:
                self._wait_for_cause()
                self.fail(lost(f"{follower.name} takes no orders: {error.strerror}"))
                self.check()
        return number

    def meet(self, own: Mapping[str, str], address: str | None) -> dict[str, str]:
        """Tell all ranks how to open the groups and links that any of them has made.

        Args:
            own: name → ticket, of rank 0.
            address: where ranks of several hosts meet.
        Returns:
            name → ticket, of all.
        Raises:
            SpeccError: a rank cannot, or does not come in time.
        """
        count = self.options.num_ranks - 1
        with self.changed:
            self.changed.wait_for(lambda: self.failure is not None or len(self.offers) == count)
        self.check()
        tickets = {**own, **{k: v for offer in self.offers.values() for k, v in offer.items()}}
        for follower in self.followers:
            try:
                follower.orders.send(
                    json_message(Kind.MEET, {"tickets": tickets, "address": address})
                )
            except OSError:
                # how it ended is said later
                follower.signs.is_ended = True
        return tickets

    def answer(self, rank: int, order: int) -> Message:
        """Wait for what a rank answers to an order.

        Raises:
            FaultError: it says something else.
            SpeccError: a rank is lost.
        """
        (follower,) = (one for one in self.followers if one.rank == rank)
        while (message := follower.orders.receive()) is not None:
            # of a step that was broken off before its answer was read
            is_late = message.sequence < order
            if message.kind is not Kind.DRAFTED or message.sequence > order:
                raise refused(f"{message.kind.name} {message.sequence} in answer to order {order}")
            if not is_late:
                return message
        self._wait_for_cause()
        self.check()
        raise lost(f"{follower.name} does not answer order {order}")

    def wait_ready(self, starts: bool = True) -> None:
        """Wait until all have loaded the engine.

        Args:
            starts: rank 0 has, too; else it says so by `start`, and may give orders before.
        Raises:
            SpeccError: one cannot, or none answers in time.
        """
        with self.changed:
            self.changed.wait_for(lambda: self.failure is not None or self._is_ready)
            self.check()
            self.is_started = starts

    def start(self) -> None:
        """From now on ranks that do not get on with an order are lost."""
        with self.changed:
            self.check()
            self.is_started = True

    def wait_sums(self, number: int) -> list[bytes]:
        """What the ranks answer to a CHECKSUM of this number, rank 1 first."""
        with self.changed:
            self.changed.wait_for(
                lambda: self.failure is not None or all(number in f.sums for f in self.followers)
            )
        self.check()
        return [follower.sums.pop(number) for follower in self.followers]

    def fail(self, error: SpeccError) -> None:
        """Give the job up; the first cause counts."""
        with self.changed:
            if self.failure is None and not self.is_closing:
                self.failure = error
            self.changed.notify_all()
            failure = self.failure
        if failure is None:
            return
        self.group.abort(failure.found)
        for follower in self.followers:
            follower.signs.offer(json_message(Kind.ERROR, {"found": failure.found}))
            if follower.process is not None:
                # stopped ones, too
                follower.process.kill()
            follower.orders.shut()

    def end(self) -> bool:
        """Tell all to end; False where this is a process that was forked off."""
        if os.getpid() != self._owner:
            return False
        with self.changed:
            self.is_closing = True
            self.changed.notify_all()
        for follower in self.followers:
            if self.failure is None:
                follower.signs.offer(Message(Kind.END))
                follower.orders.offer(Message(Kind.END, sequence=self.sent + 1))
            else:
                follower.orders.shut()
        return True

    def fail_of(self, error: BaseException) -> None:
        """Give the job up: rank 0's own part in an order failed, which the others wait in.

        Where rank 0 cannot meet the others, one of them may be the cause, which the watch is about
        to see.
        """
        # what a collective says inside a program comes as torch's error
        error = rank_error(error) or error
        if isinstance(error, RankError):
            self._wait_for_cause()
        self.fail(self._fault_of(error))

    def _wait_for_cause(self) -> None:
        """Until the watch has seen which rank is lost, or for so long that none is."""
        with self.changed:
            self.changed.wait_for(lambda: self.failure is not None, _CAUSE_S)

    def _fault_of(self, error: BaseException) -> RankError:
        return lost(f"rank 0 (pid {self._owner}) failed in order {self.sent}: {_first_line(error)}")

    @property
    def _is_ready(self) -> bool:
        count = self.options.num_ranks - 1
        return len(self.followers) == count and all(one.is_ready for one in self.followers)


def _first_line(error: BaseException) -> str:
    if isinstance(error, SpeccError):
        return error.found
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
