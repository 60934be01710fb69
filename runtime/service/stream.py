"""A service's updates for asyncio: an iterator that never blocks the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from specc.runtime.requests.request_maker import Prompt
from specc.runtime.service.service import Service, Ticket, Update
from specc.sampling.params import SamplingParams


class UpdateStream:
    """Updates of one request, to be read in the event loop that made it.

    What a slow reader has not read yet is merged into one update: it costs no more memory than the
    request's own output.

    Args:
        prompt: see `Service.submit`.
        observe: called in the loop with each update as it comes, before any merging.
        loop: of the reader, for a stream that is made in another thread; None is the running one.
        options: further ones of `Service.submit`.
    Raises:
        SpeccError: as `Service.submit`.
    """

    def __init__(
        self,
        service: Service,
        prompt: Prompt,
        params: SamplingParams,
        *,
        observe: Callable[[Update], object] | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        **options: Any,
    ) -> None:
        self._service = service
        self._loop = loop or asyncio.get_running_loop()
        self._observe = observe
        self._unread: Update | None = None
        self._has_news = asyncio.Event()
        self.ticket: Ticket = service.submit(prompt, params, self._receive, **options)

    def __aiter__(self) -> AsyncIterator[Update]:
        return self._updates()

    def cancel(self) -> None:
        self._service.cancel(self.ticket)

    async def _updates(self) -> AsyncIterator[Update]:
        """Ends after the last update; closing it earlier cancels the request."""
        is_last = False
        try:
            while not is_last:
                await self._has_news.wait()
                self._has_news.clear()
                update, self._unread = self._unread, None
                assert update is not None
                is_last = update.is_last
                yield update
        finally:
            if not is_last:
                self.cancel()

    def _receive(self, update: Update) -> None:
        """In the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self._put, update)
        except RuntimeError:
            # the loop is closed, and with it whoever would read this
            self._service.cancel(self.ticket)

    def _put(self, update: Update) -> None:
        if self._observe is not None:
            self._observe(update)
        self._unread = update if self._unread is None else self._unread.followed_by(update)
        self._has_news.set()
