"""`AsyncLLM(engine).generate(prompt, params, request_id)`: outputs for asyncio, as vLLM's."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specc.errors import RequestError
from specc.runtime.draft_weights import DraftVersion
from specc.runtime.engine import Engine
from specc.runtime.engine_args import AsyncEngineArgs
from specc.runtime.outputs.logprobs import TokenLogprobs, TokenTexts
from specc.runtime.outputs.request_output import CompletionOutput, RequestOutput
from specc.runtime.requests.call_options import Seeds, with_adapter
from specc.runtime.requests.engine_tokenizer import Conversation, EngineTokenizer
from specc.runtime.requests.prompt_forms import Prompt
from specc.runtime.requests.tool_messages import render_chat
from specc.runtime.service.service import Service, Update
from specc.runtime.service.stream import UpdateStream
from specc.runtime.sleep import check_tags
from specc.sampling.params import RequestOutputKind, SamplingParams
from specc.speculation.metrics import SpecStats
from specc.vllm.answers import answer_names, refuses_calls
from specc.vllm.calls import ARGUMENTS, METHODS


@refuses_calls(METHODS)
class AsyncLLM:
    """A loaded engine that serves requests of any number of tasks.

    A thread of its own moves all requests on; `async with AsyncLLM(…) as llm:` closes it at the
    end. The options are those of `LLM`.

    Args:
        engine: engine directory, or an `Engine` that was loaded before and that nobody else uses.
        plan: see `LLM`.
        max_num_seqs: see `LLM`.
        max_waiting: requests that wait for a place at most; more are refused.
        options: further ones of `LLM`.
    Raises:
        SpeccError: as `LLM`.
    """

    def __init__(
        self,
        engine: str | Path | Engine | None = None,
        plan: str | None = None,
        max_num_seqs: int | None = None,
        *,
        max_waiting: int = 1024,
        **options: Any,
    ) -> None:
        args = AsyncEngineArgs.of_engine(
            engine=engine,
            plan=plan,
            max_num_seqs=max_num_seqs,
            max_waiting=max_waiting,
            **options,
        )
        self._start(args)

    @classmethod
    def from_engine_args(cls, args: AsyncEngineArgs) -> AsyncLLM:
        """Open the engine that the options name, as they say.

        Raises:
            SpeccError: as `AsyncLLM`.
        """
        llm = cls.__new__(cls)
        llm._start(args)
        return llm

    def _start(self, args: AsyncEngineArgs) -> None:
        self._seeds = Seeds(args.seed)
        core = args.make_core()
        self._texts = TokenTexts(core.engine.tokenizer)
        self._service: Service | None = Service(
            core, args.max_waiting, sleep_after_s=args.sleep_after_s
        )
        # request → its outputs
        self._open: dict[str, list[UpdateStream]] = {}
        # open requests that were aborted, perhaps before all of their outputs were handed in
        self._aborted: set[str] = set()

    @property
    def engine(self) -> Engine:
        """Raises RequestError: it is closed."""
        return self._running.engine

    def get_tokenizer(self) -> EngineTokenizer:
        """See `LLM.get_tokenizer`."""
        return EngineTokenizer(self._running.core)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        prediction: Any = None,
        **vllm: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Complete one prompt and yield what there is of it, whenever there is more.

        Each output holds all tokens so far, and the last one has `finished`. A slow reader
        gets fewer of them. Leaving the iteration, or the task being cancelled, ends the request.

        Args:
            prompt: in any form that `LLM.generate` takes for one.
            sampling_params: options; None is what `get_default_sampling_params` gives.
            request_id: name for `abort`; None makes one up.
            priority: lower ones are served first.
            timeout_s: seconds after which the request ends with what it has.
            prediction: what the output may be, see `LLM.generate`.
            vllm: `lora_request`, see `LLM.generate`, and further arguments of vLLM's that ask for
                nothing.
        Raises:
            RequestError: the prompt or its parameters are invalid, or the name is taken.
            OverloadError: too many requests wait.
            FaultError: the engine failed while it worked on this request.
        """
        known = answer_names(vllm, ("lora_request",), ARGUMENTS, RequestError)
        service = self._running
        name = request_id or f"request-{uuid.uuid4().hex[:16]}"
        if name in self._open:
            raise RequestError(
                f"request_id {name!r}, which an open request has",
                "a name of its own for each request",
                "choose another one, or leave it out",
            )
        streams: list[UpdateStream] = []
        self._open[name] = streams
        try:
            asked = sampling_params or service.core.defaults.params()
            asked = with_adapter(asked, known.get("lora_request"))
            kind, each = asked.output_kind, self._seeds.give(asked).each()
            for i, params in enumerate(each):
                # tokenizing and grammars can take long
                streams.append(
                    await _in_thread(
                        service,
                        prompt,
                        params,
                        request_id=name if len(each) == 1 else f"{name}/{i}",
                        priority=priority,
                        timeout_s=timeout_s,
                        leader=streams[0].ticket if streams else None,
                        prediction=prediction,
                    )
                )
                if name in self._aborted:
                    streams[-1].cancel()
            merged = _merged(name, streams, kind, self._texts)
            async with contextlib.aclosing(merged) as outputs:  # type: ignore[type-var]
                async for output in outputs:
                    if kind != RequestOutputKind.FINAL_ONLY or output.finished:
                        yield output
        finally:
            del self._open[name]
            self._aborted.discard(name)
            for stream in streams:
                if not stream.ticket.is_done:
                    stream.cancel()

    def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        chat_template: str | Path | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Answer a conversation, by the chat template of the engine; see `LLM.chat`, `generate`.

        Raises:
            RequestError: there is no template, or it refuses the messages, or does not read tools.
        """
        core = self._running.core
        text = render_chat(
            core.chat_template(),
            messages,
            add_generation_prompt,
            tools,
            chat_template_kwargs,
            chat_template=chat_template,
            continue_final_message=continue_final_message,
            content_format=chat_template_content_format,
        )
        token_ids = core.requests.tokenize(text, has_special_tokens=True)
        prompt = {"prompt": text, "prompt_token_ids": token_ids}
        return self.generate(prompt, sampling_params, request_id, **options)

    async def abort(self, request_id: str) -> None:
        """End a request with what it has, and `finish_reason` abort; one that ended is left."""
        if request_id in self._open:
            self._aborted.add(request_id)
        for stream in self._open.get(request_id, ()):
            stream.cancel()

    def get_default_sampling_params(self) -> SamplingParams:
        """See `LLM.get_default_sampling_params`."""
        return self._running.core.defaults.params()

    async def get_metrics(self) -> SpecStats:
        """Counters of all requests since the engine was loaded; at most a few iterations old."""
        return self._running.state().stats

    async def reload_draft(self, path: str | Path, draft: str | None = None) -> DraftVersion:
        """See `LLM.reload_draft`; requests go on meanwhile."""
        return await asyncio.to_thread(self._running.operator.reload_draft, path, draft)

    async def sleep(self, level: int = 1) -> None:
        """See `LLM.sleep`; it waits for open requests, and refuses others with OverloadError."""
        await asyncio.to_thread(self._running.operator.sleep, level)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """See `LLM.wake_up`."""
        check_tags(tags)
        await asyncio.to_thread(self._running.operator.wake_up)

    async def is_sleeping(self) -> bool:
        return self._running.operator.is_asleep

    def close(self) -> None:
        """End all requests, with `abort`, and release weights and caches. Twice does nothing."""
        service, self._service = self._service, None
        if service is not None:
            service.close()

    # as vLLM calls it
    shutdown = close

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    @property
    def _running(self) -> Service:
        if self._service is None:
            raise RequestError(
                "an AsyncLLM that was closed", "one that is open", "load the engine again"
            )
        return self._service


# as vLLM calls it, too
AsyncLLMEngine = AsyncLLM


@dataclass
class _Output:
    """Progress of one output of a request."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] | None = None
    last: Update | None = None

    def take(self, update: Update, texts: TokenTexts) -> None:
        self.token_ids = [*self.token_ids, *update.token_ids]
        self.text += update.text
        if update.logprobs is not None:
            self.logprobs = [*(self.logprobs or []), *(texts.named(update.logprobs) or [])]
        if update.is_last:
            self.last = update

    def forget(self) -> None:
        """Keep nothing of what has been yielded."""
        self.token_ids, self.text = [], ""
        self.logprobs = None if self.logprobs is None else []

    def completion(self, index: int) -> CompletionOutput:
        reasons = (self.last.finish_reason, self.last.stop_reason) if self.last else (None, None)
        return CompletionOutput(index, self.token_ids, self.text, *reasons, self.logprobs)


async def _merged(
    name: str, streams: list[UpdateStream], kind: RequestOutputKind, texts: TokenTexts
) -> AsyncIterator[RequestOutput]:
    """All outputs of a request, whenever one of them has more; or what is new of that one.

    Raises:
        SpeccError: one of them failed.
    """
    outputs = [_Output() for _ in streams]
    news: asyncio.Queue[tuple[int, Update]] = asyncio.Queue(1)
    readers = [asyncio.create_task(_read(i, stream, news)) for i, stream in enumerate(streams)]
    first = streams[0].ticket
    try:
        while any(output.last is None for output in outputs):
            index, update = await news.get()
            if update.error is not None:
                raise update.error
            outputs[index].take(update, texts)
            metrics = SpecStats()
            for output in outputs:
                metrics.merge(output.last.metrics or SpecStats() if output.last else SpecStats())
            is_delta = kind == RequestOutputKind.DELTA
            shown = [index] if is_delta else range(len(outputs))
            yield RequestOutput(
                name,
                first.prompt,
                first.prompt_token_ids,
                [outputs[i].completion(i) for i in shown],
                metrics,
                all(output.last is not None for output in outputs),
                texts.named(first.prompt_logprobs),
            )
            if is_delta:
                outputs[index].forget()
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def _read(index: int, stream: UpdateStream, news: asyncio.Queue[tuple[int, Update]]) -> None:
    async with contextlib.aclosing(stream.__aiter__()) as updates:  # type: ignore[type-var]
        async for update in updates:
            await news.put((index, update))


async def _in_thread(service: Service, *request: Any, **options: Any) -> UpdateStream:
    """Hand a request in from another thread; cancelled meanwhile, it is ended."""
    loop = asyncio.get_running_loop()

    def submit() -> UpdateStream:
        return UpdateStream(service, *request, loop=loop, **options)

    future = asyncio.ensure_future(asyncio.to_thread(submit))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        future.add_done_callback(_cancel)
        raise


def _cancel(done: asyncio.Future[UpdateStream]) -> None:
    if not done.cancelled() and done.exception() is None:
        done.result().cancel()
