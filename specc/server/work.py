"""Worker threads for jobs that would block the event loop, with bounded queues."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from specc.errors import OverloadError
from specc.runtime.processes.threads import be_nice

# body sizes from which on prompts are tokenized off the event loop, and from which on that takes
# seconds: such jobs have a lane of their own
LONG_BODY_BYTES, LARGE_BODY_BYTES = 8 << 10, 256 << 10
# a lane of large jobs idles after each as long as it took, up to this limit: parsing and
# tokenizing take a core and, partly, the GIL from the engine's steps
_MAX_REST_S = 1.0
# niceness of the threads: the engine's steps go first
_NICENESS = 5

Result = TypeVar("Result")


@dataclass
class _Lane:
    """A queue of jobs of similar size, with its threads.

    Args:
        max_open: jobs that run or wait at most.
        niceness: added to that of the process.
        rests: idle after each job for as long as it took.
    """

    name: str
    num_threads: int
    max_open: int
    niceness: int = 0
    rests: bool = False
    num_open: int = 0

    def __post_init__(self) -> None:
        self.threads = ThreadPoolExecutor(
            self.num_threads, f"specc-{self.name}-prompts", be_nice, (self.niceness,)
        )
        self._is_closed = threading.Event()

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Raises RuntimeError: the lane is closed."""
        if not self.rests:
            return self.threads.submit(work)
        doing: Future[Result] = Future()
        # jobs that have not begun when the lane closes are dropped
        self.threads.submit(self._work_and_rest, work, doing).add_done_callback(
            lambda begun: doing.cancel() if begun.cancelled() else None
        )
        return doing

    def close(self, wait: bool) -> None:
        """Stop accepting jobs; `wait` until running ones are done."""
        self._is_closed.set()
        self.threads.shutdown(wait=wait, cancel_futures=True)

    def _work_and_rest(self, work: Callable[[], Result], doing: Future[Result]) -> None:
        if not doing.set_running_or_notify_cancel():
            return
        begin_s = time.monotonic()
        try:
            doing.set_result(work())
        except BaseException as error:
            doing.set_exception(error)
        self._is_closed.wait(min(time.monotonic() - begin_s, _MAX_REST_S))

    def leave(self) -> None:
        self.num_open -= 1


class PromptThreads:
    """Lanes in which requests are tokenized; for one event loop."""

    def __init__(self) -> None:
        self._long = _Lane("long", 2, 256, _NICENESS)
        self._large = _Lane("large", 1, 16, _NICENESS, rests=True)
        # these jobs wait for the processes that render chats
        self._chats = _Lane("chat", 16, 256)

    def wait(self) -> None:
        """Drop queued jobs and wait for running ones."""
        for lane in (self._long, self._large, self._chats):
            lane.close(wait=True)

    async def run(self, size: int, work: Callable[[], Result], is_chat: bool = False) -> Result:
        """Run a job and return its result; dropped if the caller is cancelled.

        Args:
            size: bytes of the request body.
            is_chat: the job waits for another process, whatever its size.
        Raises:
            OverloadError: the queue is full.
            Exception: whatever the job raises.
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
            doing = lane.submit(work)
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

        # a running job keeps its slot after its caller has gone
        doing.add_done_callback(end)
        return await asyncio.wrap_future(doing)

    def close(self) -> None:
        """Stop accepting jobs; running ones go on."""
        for lane in (self._long, self._large, self._chats):
            lane.close(wait=False)
