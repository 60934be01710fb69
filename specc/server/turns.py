"""Reading in turns: what one connection brings holds no other one up for long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from uvicorn.protocols.http.flow_control import FlowControl

# bytes that are parsed at a time: a few milliseconds, whatever they are
TURN_BYTES = 16 << 10


class Turns(FlowControl):
    """uvicorn's, and between two parts of what has come the event loop does its other work.

    asyncio hands out 256 KiB at a time. Nothing more is read while something of them is left.

    Args:
        transport: that is read from.
        take: parses what it is given.
    """

    def __init__(self, transport: asyncio.Transport, take: Callable[[bytes], None]) -> None:
        super().__init__(transport)
        self._take = take
        self._left = bytearray()
        self._next: asyncio.Handle | None = None

    def feed(self, data: bytes) -> None:
        """Parse what has come, now or later."""
        self._left += data
        if self._next is None and not self.read_paused:
            self._go_on()

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
        if self._next is not None:
            self._next.cancel()

    def _schedule(self) -> None:
        if self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._next = None
        part = bytes(self._left[:TURN_BYTES])
        del self._left[:TURN_BYTES]
        self._take(part)
        if self._transport.is_closing():
            self.close()
        elif self._left:
            self._transport.pause_reading()
            if not self.read_paused:
                self._schedule()
        elif not self.read_paused:
            self._transport.resume_reading()
