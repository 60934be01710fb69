"""A load's way to an engine in this process: the service that every server stands on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from specc.load.request import LoadRequest
from specc.load.run import Reply
from specc.runtime.service.service import Service, Update
from specc.runtime.service.stream import UpdateStream
from specc.sampling.params import SamplingParams
from specc.speculation.metrics import SpecStats


class ServiceClient:
    """Requests of a service.

    Args:
        service: that serves.
        temperature: 0 is greedy.
        seed: of sampling; each request has its own.
    """

    def __init__(self, service: Service, temperature: float = 0.0, seed: int = 0) -> None:
        self._service = service
        self._temperature = temperature
        self._seed = seed

    async def send(self, request: LoadRequest, on_tokens: Callable[[int], object]) -> Reply:
        params = SamplingParams(
            temperature=self._temperature,
            max_tokens=request.num_output_tokens,
            ignore_eos=True,
            seed=self._seed + request.index,
        )

        def observe(update: Update) -> None:
            on_tokens(len(update.token_ids))

        begin_s = time.perf_counter()
        stream = UpdateStream(self._service, request.prompt, params, observe=observe)
        last: Update | None = None
        async with contextlib.aclosing(aiter(stream)) as updates:  # type: ignore[type-var]
            async for update in updates:
                last = update
        assert last is not None, "a stream ends with an update"
        if last.error is not None:
            raise last.error
        stats = last.metrics or SpecStats()
        waited_s = time.perf_counter() - begin_s - stats.elapsed_s
        return Reply(
            finish_reason=last.finish_reason or "",
            num_prompt_tokens=stream.ticket.num_prompt_tokens,
            queue_s=max(0.0, waited_s),
            stats=stats,
        )

    async def counters(self) -> None:
        return None
