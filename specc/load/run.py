"""Serves a load: hands every request to a client when it is due, and takes down what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from specc.errors import SpeccError
from specc.load.request import LoadRequest
from specc.load.result import Chunk, LoadRun, RequestResult
from specc.speculation.metrics import SpecStats

# what ends a request as it was asked for
_REGULAR = ("stop", "length")


@dataclass(frozen=True)
class Reply:
    """What a client knows about a request that has ended.

    Args:
        finish_reason: as the server says.
        num_prompt_tokens: 0 where the server does not say.
        num_output_tokens: None is as many as came in chunks.
        queue_s: that it waited for a slot; None where the server does not say.
        stats: counters of this request; None where the server does not say.
    """

    finish_reason: str
    num_prompt_tokens: int = 0
    num_output_tokens: int | None = None
    queue_s: float | None = None
    stats: SpecStats | None = None


class LoadClient(Protocol):
    """Brings requests to what serves them."""

    async def send(self, request: LoadRequest, on_tokens: Callable[[int], object]) -> Reply:
        """Serve one request; a cancelled one is ended there, too.

        Args:
            on_tokens: called with their number as tokens come.
        Raises:
            SpeccError, OSError: it failed.
        """
        ...

    async def counters(self) -> SpecStats | None:
        """Of speculation so far, of all requests; None where they come with each reply."""
        ...


@dataclass(frozen=True)
class ClientLimits:
    """What a load may take; `TrafficOptions` says the ranges.

    Args:
        max_concurrency: requests that are open at a time, 1 or more; None is any number.
        timeout_s: of each request, above 0, after which it has failed; None is never.
    """

    max_concurrency: int | None = None
    timeout_s: float | None = None


async def run_load(
    requests: Sequence[LoadRequest],
    client: LoadClient,
    limits: ClientLimits | None = None,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> LoadRun:
    """Serve a load, in order of arrival.

    Args:
        requests: one or more, in order of arrival.
        progress: called with the requests that have ended, and of all.
    """
    run = _Run(client, limits or ClientLimits(), progress, len(requests))
    before = await client.counters()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run.serve(request)) for request in requests]
    results = [task.result() for task in tasks]
    after = await client.counters()
    stats = difference(after, before) if after is not None else run.stats
    return LoadRun(results, max(result.end_s for result in results), stats)


class _Run:
    """One load in progress."""

    def __init__(
        self,
        client: LoadClient,
        limits: ClientLimits,
        progress: Callable[[int, int], object],
        total: int,
    ) -> None:
        self.stats: SpecStats | None = None
        self._client = client
        self._timeout_s = limits.timeout_s
        self._places = limits.max_concurrency and asyncio.Semaphore(limits.max_concurrency)
        self._progress = progress
        self._done, self._total = 0, total
        self._begin_s = time.perf_counter()

    @property
    def _now_s(self) -> float:
        return time.perf_counter() - self._begin_s

    async def serve(self, request: LoadRequest) -> RequestResult:
        # timers may fire early by the clock's resolution
        while (left_s := request.arrival_s - self._now_s) > 0:
            await asyncio.sleep(left_s)
        async with self._place() as has_waited:
            # a loop that is late does not make the server look fast
            start_s = self._now_s if has_waited else request.arrival_s
            result = await self._timed(request, start_s)
        self._done += 1
        self._progress(self._done, self._total)
        return result

    @contextlib.asynccontextmanager
    async def _place(self) -> AsyncIterator[bool]:
        """Wait until one more request may be open; whether that took any time."""
        if not self._places:
            yield False
            return
        has_waited = self._places.locked()
        async with self._places:
            yield has_waited

    async def _timed(self, request: LoadRequest, start_s: float) -> RequestResult:
        chunks: list[Chunk] = []

        def on_tokens(count: int) -> None:
            if count:
                chunks.append(Chunk(self._now_s, count))

        reply, error = None, None
        late_s = self._now_s - start_s
        try:
            async with asyncio.timeout(self._timeout_s):
                reply = await self._client.send(request, on_tokens)
        except TimeoutError:
            error = "timeout" if self._timeout_s else "the connection timed out"
        except SpeccError as failure:
            error = failure.found
        except OSError as failure:
            error = failure.strerror or str(failure) or type(failure).__name__
        end_s = self._now_s
        if reply is not None and reply.finish_reason not in _REGULAR:
            error = f"ended by {reply.finish_reason}"
        if reply is not None and reply.stats is not None:
            self.stats = self.stats or SpecStats()
            self.stats.merge(reply.stats)
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        if reply is not None and reply.num_output_tokens is not None:
            num_tokens = reply.num_output_tokens
        if error is None and not chunks:
            error = "no output"
        return RequestResult(
            index=request.index,
            arrival_s=request.arrival_s,
            start_s=start_s,
            # what follows the last token says nothing about it
            end_s=end_s if error is not None else chunks[-1].time_s,
            chunks=chunks,
            first_s=chunks[0].time_s if chunks else None,
            num_prompt_tokens=(reply and reply.num_prompt_tokens) or request.num_prompt_tokens or 0,
            num_output_tokens=num_tokens,
            finish_reason=reply.finish_reason if reply else None,
            queue_s=reply.queue_s if reply else None,
            late_s=late_s,
            error=error,
        )


def difference(after: SpecStats, before: SpecStats | None) -> SpecStats:
    """What speculation did between two looks at its counters."""
    if before is None:
        return after
    depths = [*before.accepted_at_depth, *[0] * len(after.accepted_at_depth)]
    return SpecStats(
        num_spec_steps=after.num_spec_steps - before.num_spec_steps,
        num_draft_tokens=after.num_draft_tokens - before.num_draft_tokens,
        num_accepted_tokens=after.num_accepted_tokens - before.num_accepted_tokens,
        accepted_at_depth=[
            new - old for new, old in zip(after.accepted_at_depth, depths, strict=False)
        ],
    )
