"""What the two endpoints that generate do, from the body to the answer."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from specc.runtime.chat_template import ChatTemplate
from specc.runtime.service import Service
from specc.sampling_params import SamplingParams
from specc.serve_answers import Answer, ChatAnswer, CompletionAnswer, Options
from specc.serve_body import LONG_BODY_BYTES, read_json
from specc.serve_chat import render
from specc.serve_config import MAX_CHOICES, ServeConfig
from specc.serve_errors import JSON, bad_request, unknown_model
from specc.serve_generate import Generation, Job, Output, in_thread, unless_gone
from specc.serve_logprobs import TokenTexts
from specc.serve_metrics import ServeMetrics
from specc.serve_params import chat_params, completion_params, for_choices
from specc.serve_protocol import ChatRequest, CompletionRequest, GenerationRequest, parse
from specc.serve_stream import open_stream

# bytes of a body whose prompts are tokenized in the event loop
_SHORT_BODY_BYTES = LONG_BODY_BYTES // 8


class Endpoints:
    """Serves completions and chats.

    Args:
        service: that generates.
        config: names and limits.
        metrics: that count.
        template: of chats.
    """

    def __init__(
        self,
        service: Service,
        config: ServeConfig,
        metrics: ServeMetrics,
        template: ChatTemplate | None,
    ) -> None:
        self._service = service
        self._config = config
        self._metrics = metrics
        self._template = template
        self._engine = service.engine
        self._tokens = TokenTexts(service.engine.tokenizer)

    async def complete(self, request: Request) -> Response:
        """Of /v1/completions.

        Raises:
            ApiError: what the client is told.
            SpeccError: the same, before `api_error_of`.
            ClientGone: nobody waits for the answer.
        """
        data, size = await read_json(request, self._config)
        wanted = parse(CompletionRequest, data)
        self._check(wanted)
        params = completion_params(wanted)
        prompts = _prompts(wanted.prompt)
        self._check_count(len(prompts) * (wanted.n or 1))
        has_special = wanted.add_special_tokens is False
        tokenize = functools.partial(self._tokenize, prompts, has_special)
        token_ids = await self._off_loop(request, size, tokenize)
        echo = None
        if wanted.echo:
            texts = zip(prompts, token_ids, strict=True)
            echo = tuple(p if isinstance(p, str) else self._text(ids) for p, ids in texts)
        options = Options(wanted.logprobs, bool(wanted.return_spec_metrics), echo)
        answer = CompletionAnswer(self._config.model_names[0], self._tokens, options)
        return await self._answer(request, wanted, token_ids, params, answer)

    async def chat(self, request: Request) -> Response:
        """Of /v1/chat/completions.

        Raises:
            ApiError: what the client is told.
            SpeccError: the same, before `api_error_of`.
            ClientGone: nobody waits for the answer.
        """
        data, size = await read_json(request, self._config)
        wanted = parse(ChatRequest, data)
        self._check(wanted)
        params = chat_params(wanted, self._engine.max_seq_len)
        self._check_count(wanted.n or 1)
        to_tokens = functools.partial(self._render, wanted)
        token_ids = [await self._off_loop(request, size, to_tokens)]
        options = Options(params.logprobs, bool(wanted.return_spec_metrics))
        answer = ChatAnswer(self._config.model_names[0], self._tokens, options)
        return await self._answer(request, wanted, token_ids, params, answer)

    async def _answer(
        self,
        request: Request,
        wanted: GenerationRequest,
        token_ids: Sequence[list[int]],
        params: SamplingParams,
        answer: Answer,
    ) -> Response:
        jobs = [
            Job(prompt, ids, own)
            for prompt, ids in enumerate(token_ids)
            for own in for_choices(params, wanted.n or 1)
        ]
        generation = Generation(
            self._service,
            jobs,
            self._metrics.observer,
            priority=wanted.priority or 0,
            timeout_s=self._config.request_timeout_s,
        )
        is_handed_on = False
        try:
            await unless_gone(request, generation.start())
            if wanted.stream:
                also = wanted.stream_options
                stream = await open_stream(
                    request,
                    generation,
                    answer,
                    has_usage=bool(also and also.include_usage),
                    has_all_usage=bool(also and also.continuous_usage_stats),
                )
                is_handed_on = True
                return stream
            outputs: list[Output] = await unless_gone(request, generation.collect())
            return JSON(answer.whole(outputs), headers={"X-Request-Id": answer.id})
        finally:
            if not is_handed_on:
                generation.close()

    def _check(self, wanted: GenerationRequest) -> None:
        names = self._config.model_names
        if wanted.model is not None and wanted.model not in names:
            raise unknown_model(wanted.model, names)
        if wanted.stream_options is not None and not wanted.stream:
            raise bad_request(
                "stream_options without stream", "stream=true beside it", "pass stream",
                "stream_options",
            )  # fmt: skip

    def _check_count(self, count: int) -> None:
        if count > MAX_CHOICES:
            raise bad_request(
                f"{count} outputs, prompts times n", f"at most {MAX_CHOICES}", "ask for fewer", "n"
            )

    async def _off_loop(self, request: Request, size: int, work: Any) -> Any:
        """Run what takes long for large bodies where it holds up no other request."""
        if size < _SHORT_BODY_BYTES:
            return work()
        return await unless_gone(request, in_thread(work))

    def _tokenize(self, prompts: Sequence[Any], has_special: bool) -> list[list[int]]:
        requests = self._service.core.requests
        return [
            requests.tokenize(prompt, has_special) if isinstance(prompt, str) else prompt
            for prompt in prompts
        ]

    def _render(self, wanted: ChatRequest) -> list[int]:
        text = render(self._template, wanted)
        return self._service.core.requests.tokenize(text, not wanted.add_special_tokens)

    def _text(self, token_ids: list[int]) -> str:
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            return ""
        # others are refused when the request is handed in
        known = [token for token in token_ids if 0 <= token < self._engine.vocab_size]
        return tokenizer.decode(known, skip_special_tokens=False)


def _prompts(prompt: Any) -> list[str | list[int]]:
    """The prompts of a request, in any of the four forms that OpenAI's API takes."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(type(item) is int for item in prompt):
            return [prompt]
        if all(isinstance(item, str) for item in prompt):
            return prompt
        lists = all(isinstance(item, list) for item in prompt)
        if lists and all(type(token) is int for item in prompt for token in item):
            return prompt
    raise bad_request(
        "prompt of another form, or empty",
        "a string, a list of token ids, or a list of either",
        "correct it",
        "prompt",
    )
