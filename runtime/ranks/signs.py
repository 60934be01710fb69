"""A follower's thread that shows that it is alive, and ends it when rank 0 is not."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from typing import NoReturn

from specc.errors import FaultError
from specc.runtime.ranks.channel import Channel
from specc.runtime.ranks.lost_rank import is_stopped
from specc.runtime.ranks.orders import Kind, beat, json_of
from specc.runtime.ranks.rank_group import RankGroup
from specc.runtime.ranks.ticks import Ticks

# for the order that runs when rank 0 has said that this is the end
_END_S = 10.0


class Signs(threading.Thread):
    """Beats, and listens to rank 0's.

    The process ends from here: its main thread may wait in a collective for a rank that is gone.

    Args:
        channel: to rank 0.
        rank: of this process.
        limit_s: after which rank 0's silence counts.
        stopped_s: the same, where its process is stopped.
        parent: process id of rank 0, where that has started this process.
    """

    def __init__(
        self, channel: Channel, rank: int, limit_s: float, stopped_s: float, parent: int | None
    ) -> None:
        super().__init__(name="specc-signs", daemon=True)
        self._channel = channel
        self._rank = rank
        self._limit_s = limit_s
        self._stopped_s = stopped_s
        self._parent = parent
        self._ticks = Ticks(stopped_s)
        self.group: RankGroup | None = None
        # the last order that was done
        self.done = 0
        self._is_over = threading.Event()

    def stop(self) -> None:
        """End the thread: one that Python finds within torch at its exit aborts the process."""
        self._is_over.set()
        self.join()

    def run(self) -> None:
        heard_s = time.monotonic()
        self._ticks.begin()
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        while not self._is_over.is_set():
            poll.poll(1000 * self._ticks.seconds)
            try:
                messages = self._channel.received()
            except FaultError as error:
                self._end(f"rank 0 sent {error.found}")
            for message in messages:
                if message.kind is Kind.END:
                    self._end_softly()
                    return
                if message.kind is Kind.ERROR:
                    self._end(json_of(message).get("found", ""))
            if self._channel.is_ended:
                self._end("rank 0 is gone")
            heard_s += self._ticks.pass_by()
            if messages:
                heard_s = time.monotonic()
            silent_s = time.monotonic() - heard_s
            limit_s = self._stopped_s if self._leader_is_stopped(silent_s) else self._limit_s
            if silent_s > limit_s:
                self._say(f"rank 0 has given no sign of life for {limit_s:g} s")
                self._end_leader()
                os._exit(1)
            if self._ticks.is_time_for_beat():
                position = self.group.position if self.group is not None else 0
                self._channel.offer(beat(self.done, position))

    def _leader_is_stopped(self, silent_s: float) -> bool:
        """Whether rank 0 is a process of this machine that stands still, if it has been silent."""
        if silent_s <= self._stopped_s or self._parent is None:
            return False
        return is_stopped(self._parent)

    def _end_leader(self) -> None:
        """A rank 0 that stands still would keep its port and memory without anyone to work."""
        if self._parent is not None and os.getppid() == self._parent:
            os.kill(self._parent, signal.SIGKILL)

    def _end_softly(self) -> None:
        if not self._is_over.wait(_END_S):
            os._exit(0)

    def _end(self, why: str) -> NoReturn:
        self._say(why)
        os._exit(1)

    def _say(self, why: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(f"rank {self._rank} (pid {os.getpid()}) ends: {why}", file=sys.stderr, flush=True)
