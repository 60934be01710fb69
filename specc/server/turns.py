"""Fair parsing: a long request does not block other connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from uvicorn.protocols.http.flow_control import FlowControl

# bytes parsed at a time: a few milliseconds at worst
TURN_BYTES = 16 << 10
# request size after which a connection takes turns with other long ones
FREE_BYTES = 64 << 10
# length of such a turn; the rest after it is as long, and at least the millisecond that event
# loops wait
_LONG_TURN_S = 1e-3


class LongTurns:
    """Round-robin turns of all connections with long requests, with rests in between.

    Without it, each iteration of the event loop would parse a chunk of every long request while the
    engine waits for the GIL. With it, other requests wait for at most one chunk, and half of the
    time is left to them and the engine.
    """

    def __init__(self) -> None:
        # queue of turns
        self._waiting: dict[Turns, None] = {}
        self._next: asyncio.Handle | None = None

    def add(self, turns: Turns) -> None:
        """Queue a turn of a connection."""
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
        # the next connection rests, too
        self._next = loop.call_later(now_s - begin_s, self._go_on)


class Turns(FlowControl):
    """uvicorn's protocol, which yields to the event loop between chunks of received data.

    asyncio delivers 256 KiB at a time; reading is paused until all of it is parsed.

    Args:
        long: turns of long requests, shared by all connections.
    """

    def __init__(
        self, transport: asyncio.Transport, take: Callable[[bytes], None], long: LongTurns
    ) -> None:
        super().__init__(transport)
        self._take = take
        self._long = long
        self._left = bytearray()
        # parsed bytes of the current request
        self._num_bytes = 0
        self._next: asyncio.Handle | None = None

    def feed(self, data: bytes) -> None:
        """Parse received data, now or later."""
        self._left += data
        if self._next is not None or self.read_paused:
            return
        if self._num_bytes < FREE_BYTES:
            self._go_on()
        else:
            self._transport.pause_reading()
            self._schedule()

    def begin_request(self) -> None:
        """Reset: the next request is short again."""
        self._num_bytes = 0

    def resume_reading(self) -> None:
        """See uvicorn; pending data is parsed first."""
        if self.read_paused and self._left:
            self.read_paused = False
            self._schedule()
        else:
            super().resume_reading()

    def close(self) -> None:
        """Drop pending data."""
        self._left.clear()
        self._long.remove(self)
        if self._next is not None:
            self._next.cancel()

    def step(self) -> bool:
        """Parse one chunk, unless reading is paused; returns whether data is left."""
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
