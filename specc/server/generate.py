"""The outputs of one HTTP request: handed in together, read together, ended together."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request

from specc.errors import RequestError
from specc.runtime.outputs.logprobs import PromptLogprobs, TokenLogprobs
from specc.runtime.service.service import Service, Ticket, Update
from specc.runtime.service.stream import UpdateStream
from specc.sampling.params import SamplingParams
from specc.server.body import ClientGone
from specc.server.errors import api_error_of, bad_request, stopping_error
from specc.server.grammar import start_grammar
from specc.speculation.metrics import SpecStats

# tokens of a prompt that are worth a thread
LONG_PROMPT = 4096
# finish reasons of the service → those of OpenAI's API
FINISH_REASONS = {"stop": "stop", "length": "length", "timeout": "length"}

Result = TypeVar("Result")


@dataclass(frozen=True)
class OutputJob:
    """One output to make.

    Args:
        prompt: index of the prompt in the request.
        token_ids: of the prompt.
    """

    prompt: int
    token_ids: list[int]
    params: SamplingParams


@dataclass
class Output:
    job: OutputJob
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    metrics: SpecStats | None = None
    # of `token_ids`; streams do not keep them
    num_tokens: int = 0
    # with the first update, where asked for
    prompt_logprobs: PromptLogprobs | None = None

    def forget(self) -> None:
        """Keep nothing but the prompt."""
        self.text, self.token_ids, self.logprobs, self.num_tokens = "", [], [], 0
        self.finish_reason, self.stop_reason = "length", None


class Generation:
    """Outputs that run at the same time.

    Args:
        observers: called with each update of one output, one for each job.
        form: the field that says which form outputs have, for errors.
        options: of `Service.submit`, the same for all.
    """

    def __init__(
        self,
        service: Service,
        jobs: Sequence[OutputJob],
        observers: Sequence[Callable[[Update], object]],
        form: str | None = None,
        **options: Any,
    ) -> None:
        self.outputs = [Output(job) for job in jobs]
        self._service = service
        self._observers = observers
        self._form = form
        self._options = options
        self._begin_s = time.monotonic()
        self._streams: list[UpdateStream] = []
        self._readers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Hand all of them in, or none.

        Raises:
            SpeccError: as `Service.submit`.
        """
        self._begin_s = time.monotonic()
        try:
            leaders: dict[int, UpdateStream] = {}
            for output, observe in zip(self.outputs, self._observers, strict=True):
                leader = leaders.get(output.job.prompt)
                ticket = leader.ticket if leader else None
                stream = await self._submit(output.job, observe, ticket)
                leaders.setdefault(output.job.prompt, stream)
                self._streams.append(stream)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End what is still open; its cache blocks are free soon."""
        for stream in self._streams:
            if not stream.ticket.is_done:
                stream.cancel()
        for reader in self._readers:
            reader.cancel()

    async def updates(self) -> AsyncIterator[tuple[int, Update]]:
        """(output, what is new about it), until all have ended.

        Raises:
            ApiError: one of them failed; the others are then of no use.
        """
        if len(self._streams) == 1:
            async for update in self._streams[0]:
                yield 0, self._take(0, update)
            return
        # of one place: a slow reader makes the streams merge, not this grow
        queue: asyncio.Queue[tuple[int, Update]] = asyncio.Queue(1)
        self._readers = [
            asyncio.create_task(_read(i, stream, queue)) for i, stream in enumerate(self._streams)
        ]
        num_open = len(self._streams)
        while num_open:
            index, update = await queue.get()
            num_open -= update.is_last
            yield index, self._take(index, update)

    async def collect(self) -> list[Output]:
        """All outputs, whole.

        Raises:
            ApiError: one of them failed.
        """
        async for index, update in self.updates():
            output = self.outputs[index]
            output.text += update.text
            output.token_ids += update.token_ids
            output.logprobs += update.logprobs or []
        # the first output of a prompt has looked at it for all
        by_prompt: dict[int, PromptLogprobs | None] = {}
        for output in self.outputs:
            by_prompt.setdefault(output.job.prompt, output.prompt_logprobs)
            output.prompt_logprobs = by_prompt[output.job.prompt]
        return self.outputs

    def _take(self, index: int, update: Update) -> Update:
        output = self.outputs[index]
        output.num_tokens += len(update.token_ids)
        if output.prompt_logprobs is None:
            output.prompt_logprobs = self._streams[index].ticket.prompt_logprobs
        if not update.is_last:
            return update
        if update.error is not None:
            raise api_error_of(update.error)
        if update.finish_reason == "error":
            raise bad_request(
                f"an output that cannot go on: {update.stop_reason}",
                "options that leave a token to follow, and a form that a grammar can follow",
                "allow more, or simplify the form",
            )
        if update.finish_reason not in FINISH_REASONS:
            raise stopping_error()
        output.finish_reason = FINISH_REASONS[update.finish_reason]
        is_late = update.finish_reason == "timeout"
        output.stop_reason = "timeout" if is_late else update.stop_reason
        output.metrics = update.metrics
        return update

    async def _submit(
        self, job: OutputJob, observe: Callable[[Update], object], leader: Ticket | None
    ) -> UpdateStream:
        options = dict(self._options)
        if job.params.structured_outputs is not None:
            try:
                options["grammar"] = await start_grammar(
                    self._service.engine.grammars,
                    job.params.structured_outputs,
                    options.get("timeout_s"),
                )
            except RequestError as error:
                raise api_error_of(error, self._form) from error
        if (timeout_s := options.get("timeout_s")) is not None:
            # what the outputs before this one took counts, too
            options["timeout_s"] = max(0.0, timeout_s - (time.monotonic() - self._begin_s))
        # ids alone: text would be kept for nobody
        submit = functools.partial(
            UpdateStream,
            self._service,
            job.token_ids,
            job.params,
            index=job.prompt,
            observe=observe,
            loop=asyncio.get_running_loop(),
            leader=leader,
            **options,
        )
        # bad words are tokenized
        if len(job.token_ids) < LONG_PROMPT and not job.params.bad_words:
            return submit()
        return await in_thread(submit, lambda stream: stream.cancel())


async def in_thread(
    call: Callable[[], Result], undo: Callable[[Result], object] | None = None
) -> Result:
    """Run something in another thread; `undo` takes its result where nobody waits any more."""
    future = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:

        def end(done: asyncio.Future[Result]) -> None:
            if not done.cancelled() and done.exception() is None and undo is not None:
                undo(done.result())

        future.add_done_callback(end)
        raise


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Do something for a client, and stop when the client has gone.

    Raises:
        ClientGone: it has; the work was cancelled and has ended.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        await end_tasks(task, gone)


async def disconnected(receive: Callable[[], Any]) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def end_tasks(*tasks: asyncio.Future[Any]) -> None:
    """Cancel what runs, and wait for it."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _read(index: int, stream: UpdateStream, queue: asyncio.Queue[tuple[int, Update]]) -> None:
    async with contextlib.aclosing(stream.__aiter__()) as updates:  # type: ignore[type-var]
        async for update in updates:
            await queue.put((index, update))
