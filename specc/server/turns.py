"""Reading in turns: what one connection brings holds no other one up for long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from uvicorn.protocols.http.flow_control import FlowControl

# bytes that are parsed at a time: a few milliseconds, whatever they are
TURN_BYTES = 16 << 10
# bytes of a request after which its connection shares turns with others that bring as much
FREE_BYTES = 64 << 10
# such a turn goes on for so many seconds; it is followed by a rest that is as long, and at least
# the millisecond that event loops wait
_LONG_TURN_S = 1e-3


class LongTurns:
    """The turns of all connections whose requests are long: one after another, with rests.

    Each loop of the event loop would parse a part of every one of them, and each step of the engine
    would wait for the interpreter's lock until that is done. As it is, ordinary requests wait for
    one part at most, and half of the time is theirs and the engine's.
    """

    def __init__(self) -> None:
        # in the order of their turns
        self._waiting: dict[Turns, None] = {}
        self._next: asyncio.Handle | None = None

    def add(self, turns: Turns) -> None:
        """One more turn for a connection."""
        self._waiting[turns] = None
        if self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._go_on)

    def remove(self, turns: Turns) -> None:
        self._waiting.pop(turns, None)

    def _go_on(self) -> None:
        self._next = None
        if not self._waiting:
            return
        turns = next(iter(self._waiting))
        self.remove(turns)
        loop = asyncio.get_running_loop()
        begin_s = now_s = loop.time()
        is_due = True
        while is_due and now_s - begin_s < _LONG_TURN_S:
            is_due, now_s = turns.step(), loop.time()
        if is_due:
            # behind the others
            self._waiting[turns] = None
        # a rest for whoever comes next, too
        self._next = loop.call_later(now_s - begin_s, self._go_on)


class Turns(FlowControl):
    """uvicorn's, and between two parts of what has come the event loop does its other work.

    asyncio hands out 256 KiB at a time. Nothing more is read while something of them is left.

    Args:
        take: parses what it is given.
        long: turns after the first bytes of a request, shared by all connections.
    """

    def __init__(
        self, transport: asyncio.Transport, take: Callable[[bytes], None], long: LongTurns
    ) -> None:
        super().__init__(transport)
        self._take = take
        self._long = long
        self._left = bytearray()
        # of a request, those that have been parsed
        self._num_bytes = 0
        self._next: asyncio.Handle | None = None

    def feed(self, data: bytes) -> None:
        """Parse what has come, now or later."""
        self._left += data
        if self._next is not None or self.read_paused:
            return
        if self._num_bytes < FREE_BYTES:
            self._go_on()
        else:
            self._transport.pause_reading()
            self._schedule()

    def begin_request(self) -> None:
        """The next one has its first bytes for itself."""
        self._num_bytes = 0

    def resume_reading(self) -> None:
        """As uvicorn's: what is left comes first."""
        if self.read_paused and self._left:
            self.read_paused = False
            self._schedule()
        else:
            super().resume_reading()

    def close(self) -> None:
        """Drop what is left."""
        self._left.clear()
        self._long.remove(self)
        if self._next is not None:
            self._next.cancel()

    def step(self) -> bool:
        """Parse a part of what has come, unless nobody reads it now; whether more is left."""
        if self.read_paused or not self._left:
            return False
        part = bytes(self._left[:TURN_BYTES])
        del self._left[:TURN_BYTES]
        self._num_bytes += len(part)
        self._take(part)
        if self._transport.is_closing():
            self.close()
        elif self._left:
            self._transport.pause_reading()
            return True
        elif not self.read_paused:
            self._transport.resume_reading()
        return False

    def _schedule(self) -> None:
        if self._num_bytes >= FREE_BYTES:
            self._long.add(self)
        elif self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._next = None
        if self.step():
            self._schedule()
