"""Threads for what would hold up the event loop: few, of their own, and with few places to wait."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from specc.errors import OverloadError
from specc.runtime.thread_niceness import be_nice

# bytes of a body from which on its prompts are not for the event loop, and from which on they
# take seconds: those wait for each other, and for nobody else
LONG_BODY_BYTES, LARGE_BODY_BYTES = 8 << 10, 256 << 10
# of their threads: the engine's steps, which all requests wait for, go first
_NICENESS = 5

Result = TypeVar("Result")


@dataclass
class _Lane:
    """Work of similar size.

    Args:
        name: of its threads.
        num_threads: that do it.
        max_open: of it that runs or waits.
        niceness: of the threads, beside that of the process.
    """

    name: str
    num_threads: int
    max_open: int
    niceness: int = 0
    num_open: int = 0

    def __post_init__(self) -> None:
        self.threads = ThreadPoolExecutor(
            self.num_threads, f"specc-{self.name}-prompts", be_nice, (self.niceness,)
        )

    def leave(self) -> None:
        self.num_open -= 1


class PromptThreads:
    """Where requests become tokens; for one event loop."""

    def __init__(self) -> None:
        self._long = _Lane("long", 2, 256, _NICENESS)
        self._large = _Lane("large", 1, 16, _NICENESS)
        # these wait for the processes that render them
        self._chats = _Lane("chat", 16, 256)

    def wait(self) -> None:
        """Until nothing runs any more; what has not begun is dropped."""
        for lane in (self._long, self._large, self._chats):
            lane.threads.shutdown(wait=True, cancel_futures=True)

    async def run(self, size: int, work: Callable[[], Result], is_chat: bool = False) -> Result:
        """The result of some work; it is dropped, or not even begun, when the caller is cancelled.

        Args:
            size: bytes of the body that it is about.
            work: to do.
            is_chat: it waits for another process, whatever its size.
        Raises:
            OverloadError: too much of it waits.
            Exception: as the work raises.
        """
        if size < LONG_BODY_BYTES and not is_chat:
            return work()
        lane = self._chats if is_chat else self._long
        lane = lane if size < LARGE_BODY_BYTES else self._large
        if lane.num_open >= lane.max_open:
            raise OverloadError(
                f"{lane.num_open} {lane.name} prompts wait for their turn already",
                f"fewer than {lane.max_open}",
                "try again later, or send shorter prompts",
            )
        loop = asyncio.get_running_loop()
        try:
            doing = lane.threads.submit(work)
        except RuntimeError as error:  # closed
            raise OverloadError(
                "the server is about to stop",
                "a server that takes requests",
                "send the request to another server",
            ) from error
        lane.num_open += 1

        def end(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(lane.leave)

        # what runs keeps its place although nobody waits any more
        doing.add_done_callback(end)
        return await asyncio.wrap_future(doing)

    def close(self) -> None:
        """Begin nothing more; what runs goes on."""
        for lane in (self._long, self._large, self._chats):
            lane.threads.shutdown(wait=False, cancel_futures=True)
