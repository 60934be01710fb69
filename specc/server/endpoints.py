"""The completion and chat endpoints, from the request body to the response."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from specc.errors import RequestError
from specc.runtime.requests.chat_template import ChatTemplate
from specc.runtime.service.service import Service
from specc.sampling.params import SamplingParams
from specc.server.api_responses import ApiResponse, ChatResponse, CompletionResponse, Options
from specc.server.body import parse_body, read_body
from specc.server.config import MAX_CHOICES, ServeConfig
from specc.server.errors import JSON, ApiError, api_error_of, bad_request, unknown_model
from specc.server.fields import UnknownFields, whole_numbers
from specc.server.generate import Generation, Output, OutputJob, unless_gone
from specc.server.grammar import check_grammar_size
from specc.server.logprobs import TokenTexts
from specc.server.message_reader import MessageReader, token_ids_of
from specc.server.metrics import ServeMetrics
from specc.server.params import (
    chat_params,
    completion_params,
    for_choices,
    is_prompt_alone,
    structure_field,
)
from specc.server.plain_requests import HEADER, request_id_of
from specc.server.predictions import read_prediction
from specc.server.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    forget_long,
    parse,
)
from specc.server.stream import open_stream
from specc.server.tools import read_tools, with_tools
from specc.server.work import PromptThreads

Read = TypeVar("Read")
# a parsed request: the request, its options, the field of its output format, token ids of its
# prompts, texts to echo
_Completion = tuple[
    CompletionRequest, SamplingParams, str | None, list[list[int]], tuple[str, ...] | None
]
_Chat = tuple[ChatRequest, SamplingParams, str | None, list[int], MessageReader]


class Endpoints:
    """Serves completions and chats.

    Args:
        config: names and limits.
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
        self._threads = PromptThreads()
        self._unknown = UnknownFields(config.strict_fields)
        if config.max_unbounded_bytes is not None:
            service.core.requests.max_unbounded_bytes = config.max_unbounded_bytes

    def close(self) -> None:
        """Stop starting work for open requests."""
        if self._template is not None:
            self._template.close()
        self._threads.close()

    def wait(self) -> None:
        """After `close`: wait until no thread works on a request."""
        self._threads.wait()

    async def complete(self, request: Request) -> Response:
        """Handler of /v1/completions.

        Raises:
            ApiError: the error response.
            SpeccError: the same, before `api_error_of`.
            ClientGone: the client has disconnected.
        """

        def read(body: bytes) -> _Completion:
            wanted = parse(CompletionRequest, self._parse(body), self._unknown)
            self._check(wanted)
            params = self._with_adapter(
                wanted, completion_params(wanted, self._service.core.defaults)
            )
            form = structure_field(wanted)
            prompts = self._read_prompts(wanted)
            wanted._predicted = read_prediction(wanted.prediction, self._engine)
            forget_long(wanted)
            return wanted, params, form, *prompts

        with _blaming("prompt"):
            found = await self._in_thread(request, read)
            wanted, params, form, token_ids, echo = found
            options = self._options(wanted, wanted.logprobs, echo)
            answer = CompletionResponse(self._model_of(params), self._tokens, options)
            is_alone = is_prompt_alone(wanted)
            return await self._answer(
                request, wanted, token_ids, params, answer, form, is_prompt_alone=is_alone
            )

    async def chat(self, request: Request) -> Response:
        """Handler of /v1/chat/completions.

        Raises:
            ApiError: the error response.
            SpeccError: the same, before `api_error_of`.
            ClientGone: the client has disconnected.
        """

        def read(body: bytes) -> _Chat:
            wanted = parse(ChatRequest, self._parse(body), self._unknown)
            self._check(wanted)
            with_tools(wanted, self._config, self._unknown)
            defaults = self._service.core.defaults
            params = chat_params(wanted, self._engine.max_seq_len, defaults)
            params = self._with_adapter(wanted, params)
            self._check_count(wanted.n or 1)
            self._check_template(wanted)
            use = read_tools(wanted, self._config, _reads_tools(self._template, wanted))
            form = structure_field(wanted)
            if use.grammar is not None:
                form, params = "tools", dataclasses.replace(params, structured_outputs=use.grammar)
            text = render(self._template, wanted)
            requests = self._service.core.requests
            token_ids = requests.tokenize(text, not wanted.add_special_tokens)
            reader = MessageReader(self._config, wanted, text, use)
            wanted._predicted = read_prediction(wanted.prediction, self._engine)
            forget_long(wanted)
            return wanted, params, form, token_ids, reader

        with _blaming("messages"):
            found = await self._in_thread(request, read, is_chat=True)
            wanted, params, form, token_ids, reader = found
            options = self._options(wanted, params.logprobs)
            answer = ChatResponse(self._model_of(params), self._tokens, options, reader)
            shown = token_ids_of(self._engine.tokenizer, reader.markers)
            return await self._answer(
                request, wanted, [token_ids], params, answer, form, shown=shown
            )

    async def _in_thread(
        self, request: Request, read: Callable[[bytes], Read], is_chat: bool = False
    ) -> Read:
        """Parse the body of a request; long ones off the event loop."""
        async with read_body(request, self._config) as body:
            work = self._threads.run(len(body), functools.partial(read, body), is_chat)
            return await unless_gone(request, work)

    def _parse(self, body: bytes) -> dict[str, Any]:
        found = parse_body(body)
        check_grammar_size(found, self._config.max_grammar_chars)
        return found

    def _options(
        self, wanted: GenerationRequest, logprobs: int | None, echo: tuple[str, ...] | None = None
    ) -> Options:
        # without a tokenizer, responses have token ids only
        has_no_text = self._engine.tokenizer is None and wanted.return_token_ids is None
        return Options(
            logprobs,
            bool(wanted.return_spec_metrics) and self._config.tells_acceptance,
            echo,
            bool(wanted.return_token_ids) or has_no_text,
            wanted.prompt_logprobs,
            self._config.tells_cached_tokens,
            wanted._predicted is not None,
        )

    async def _answer(
        self,
        request: Request,
        wanted: GenerationRequest,
        token_ids: Sequence[list[int]],
        params: SamplingParams,
        answer: ApiResponse,
        form: str | None,
        is_prompt_alone: bool = False,
        shown: frozenset[int] = frozenset(),
    ) -> Response:
        jobs = [
            OutputJob(prompt, ids, own)
            for prompt, ids in enumerate(token_ids)
            for own in for_choices(params, wanted.n or 1, bool(wanted.stream))
        ]
        # as in vLLM, the header takes precedence over the field
        sent_id = request_id_of(request)
        answer.name(sent_id or wanted.request_id)
        headers = {HEADER: sent_id or answer.id}
        generation = Generation(
            self._service,
            jobs,
            self._metrics.observers([(job.prompt, job.params) for job in jobs]),
            form,
            priority=wanted.priority or 0,
            timeout_s=self._config.request_timeout_s,
            shown_token_ids=shown,
            prediction=wanted._predicted,
            cache_salt=wanted.cache_salt,
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
                    headers,
                    has_usage=also is not None and also.has_usage,
                    has_all_usage=also is not None and also.has_all_usage,
                )
                is_handed_on = True
                return stream
            outputs: list[Output] = await unless_gone(request, generation.collect())
            for output in outputs if is_prompt_alone else ():
                output.forget()
            return JSON(answer.whole(outputs), headers=headers)
        finally:
            if not is_handed_on:
                generation.close()

    def _check(self, wanted: GenerationRequest) -> None:
        names = (*self._config.model_names, *self._engine.adapters)
        if wanted.model is not None and wanted.model not in names:
            raise unknown_model(wanted.model, names)
        options = wanted.stream_options
        if options is not None and options.model_fields_set and not wanted.stream:
            raise bad_request(
                "stream_options without stream", "stream=true beside it", "pass stream",
                "stream_options",
            )  # fmt: skip

    def _with_adapter(self, wanted: GenerationRequest, params: SamplingParams) -> SamplingParams:
        """With the adapter that the request names as its model."""
        if wanted.model is None or wanted.model in self._config.model_names:
            return params
        return dataclasses.replace(params, lora=wanted.model)

    def _model_of(self, params: SamplingParams) -> str:
        """What a response calls the model."""
        return params.lora or self._config.model_names[0]

    def _check_template(self, wanted: ChatRequest) -> None:
        """Refuse templates of requests unless the operator trusts them: a template is a program."""
        if "chat_template" in (wanted.chat_template_kwargs or {}):
            raise bad_request(
                "chat_template among chat_template_kwargs", "a field of its own", "move it",
                "chat_template_kwargs",
            )  # fmt: skip
        source = wanted.chat_template
        if source is None or self._config.trust_request_chat_template:
            return
        if self._template is None or source not in self._template.template_names:
            raise bad_request(
                "a chat template passed with the request, but --trust-request-chat-template is not"
                " set",
                "a server that was started with it, or the name of one of the model's templates",
                "leave chat_template out",
                "chat_template",
            )

    def _check_count(self, count: int) -> None:
        if count > MAX_CHOICES:
            raise _too_many(count)

    def _read_prompts(
        self, wanted: CompletionRequest
    ) -> tuple[list[list[int]], tuple[str, ...] | None]:
        """Token ids of the prompts, and their texts if they are echoed."""
        requests = self._service.core.requests
        prompts = _prompts(wanted.prompt)
        self._check_count(len(prompts) * (wanted.n or 1))
        has_special = wanted.add_special_tokens is False
        token_ids = []
        for index, prompt in enumerate(prompts):
            if isinstance(prompt, str):
                token_ids.append(requests.tokenize(prompt, has_special, index))
            else:
                requests.check_length(len(prompt), index)
                token_ids.append(prompt)
        if not wanted.echo:
            return token_ids, None
        texts = zip(prompts, token_ids, strict=True)
        return token_ids, tuple(p if isinstance(p, str) else self._text(ids) for p, ids in texts)

    def _text(self, token_ids: list[int]) -> str:
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            return ""
        # the engine refuses others on submission
        known = [token for token in token_ids if 0 <= token < self._engine.vocab_size]
        # decoding a batch releases the GIL
        return tokenizer.decode_batch([known], skip_special_tokens=False)[0]


@contextlib.contextmanager
def _blaming(prompt: str) -> Iterator[None]:
    """Attribute engine errors to this field of the request."""
    try:
        yield
    except RequestError as error:
        raise api_error_of(error, prompt=prompt) from error


def _too_many(count: int) -> ApiError:
    return bad_request(
        f"{count} outputs, prompts times n", f"at most {MAX_CHOICES}", "ask for fewer", "n"
    )


def _prompts(prompt: Any) -> list[str | list[int]]:
    """The prompts of a request, in any of the four forms that OpenAI's API takes."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        # 5.0 is 5 here, too
        prompt = whole_numbers(prompt)
        if isinstance(prompt[0], list):
            prompt = [whole_numbers(item) for item in prompt]
        if type(prompt[0]) is not int and len(prompt) > MAX_CHOICES:
            # before checking each of them
            raise _too_many(len(prompt))
        if all(type(item) is int for item in prompt):
            return [prompt]
        if all(isinstance(item, str) for item in prompt):
            return prompt
        lists = all(isinstance(item, list) for item in prompt)
        if lists and all(type(token) is int for item in prompt for token in item):
            return prompt
    raise bad_request(
        "the prompt is empty, or of another form",
        "a string, a list of token ids, or a list of either",
        "correct it",
        "prompt",
    )


def render(template: ChatTemplate | None, wanted: ChatRequest) -> str:
    """Render the prompt of a chat, with special tokens.

    Raises:
        ApiError: there is no template, it refuses the messages, or they contain more than text.
    """
    if template is None:
        raise bad_request(
            "a chat, and a model without a chat template",
            "a chat template",
            "send the prompt to /v1/completions, or start the server with --chat-template FILE",
            "messages",
        )
    continues = bool(wanted.continue_final_message)
    begins = wanted.add_generation_prompt
    try:
        return template.render(
            [message.model_dump(exclude_unset=True) for message in wanted.messages],
            add_generation_prompt=not continues if begins is None else begins,
            options=_given(wanted) | (wanted.chat_template_kwargs or {}),
            template=wanted.chat_template,
            continue_final_message=continues,
        )
    except RequestError as error:
        raise api_error_of(error, "messages", "messages") from error


def _given(wanted: ChatRequest) -> dict[str, Any]:
    """Template variables of a request besides its messages."""
    tools = [tool.model_dump(exclude_unset=True) for tool in wanted.tools or ()]
    effort = wanted.reasoning_effort
    given = {
        "tools": tools or None,
        "documents": wanted.documents,
        "reasoning_effort": effort,
        # as in vLLM: some templates enable thinking only on request
        "enable_thinking": None if effort is None else effort != "none",
    }
    return {name: value for name, value in given.items() if value is not None}


def _reads_tools(template: ChatTemplate | None, wanted: ChatRequest) -> bool:
    try:
        return template is None or template.names("tools", wanted.chat_template)
    except RequestError:
        # a chat without a template is refused by `render`
        return True
