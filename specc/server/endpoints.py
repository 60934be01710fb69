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
from specc.server.api_responses import Answer, ChatResponse, CompletionResponse, Options
from specc.server.body import parse_body, read_body
from specc.server.config import ServeConfig
from specc.server.errors import JSON, api_error_of, bad_request, unknown_model
from specc.server.fields import UnknownFields
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
    num_outputs,
    structure_field,
)
from specc.server.plain_requests import HEADER, request_id_of
from specc.server.predictions import read_prediction
from specc.server.prompts import Completion, PromptReader, check_count
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


@dataclasses.dataclass(frozen=True)
class Chat:
    """A chat that can be answered.

    Args:
        form: the field of its output format.
        token_ids: of its prompt.
        reader: of its outputs.
    """

    wanted: ChatRequest
    params: SamplingParams
    form: str | None
    token_ids: list[int]
    reader: MessageReader


class Endpoints:
    """Serves completions and chats.

    Handlers, and what reads and answers requests for them, raise ApiError, the error response,
    SpeccError, the same before `api_error_of`, or ClientGone: the client has disconnected.

    Args:
        config: names and limits.
    Attributes:
        prompts: reads those of completions.
        tokens: texts of single tokens.
        unknown: what becomes of fields that no request has.
    """

    def __init__(
        self,
        service: Service,
        config: ServeConfig,
        metrics: ServeMetrics,
        template: ChatTemplate | None,
    ) -> None:
        self.service = service
        self._config = config
        self._metrics = metrics
        self._template = template
        self._engine = service.engine
        self.tokens = TokenTexts(service.engine.tokenizer)
        self.prompts = PromptReader(service)
        self._threads = PromptThreads()
        self.unknown = UnknownFields(config.strict_fields)
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
        """Handler of /v1/completions."""

        def read(body: bytes) -> Completion:
            return self.read_completion(
                parse(CompletionRequest, self.parse_body(body), self.unknown)
            )

        with blaming("prompt"):
            found = await self.in_thread(request, read)
            options = self.options(found.wanted, found.wanted.logprobs, found.echo)
            answer = CompletionResponse(self.model_of(found.params), self.tokens, options)
            return await self.answer_completion(request, found, answer)

    def read_completion(self, wanted: CompletionRequest) -> Completion:
        """Check a completion and tokenize its prompts; in a thread, as `in_thread` has them."""
        self._check(wanted)
        params = self._with_adapter(wanted, completion_params(wanted, self.service.core.defaults))
        form = structure_field(wanted)
        prompts = self.prompts.read(wanted, self.prompts.cut(wanted, params))
        wanted._predicted = read_prediction(wanted.prediction, self._engine)
        forget_long(wanted)
        return Completion(wanted, params, form, *prompts)

    async def answer_completion(
        self, request: Request, found: Completion, answer: Answer
    ) -> Response:
        return await self._answer(
            request, found.wanted, found.token_ids, found.params, answer, found.form,
            is_prompt_alone=is_prompt_alone(found.wanted),
        )  # fmt: skip

    async def chat(self, request: Request) -> Response:
        """Handler of /v1/chat/completions."""

        def read(body: bytes) -> Chat:
            return self.read_chat(parse(ChatRequest, self.parse_body(body), self.unknown))

        with blaming("messages"):
            chat = await self.in_thread(request, read, is_chat=True)
            options = self.options(chat.wanted, chat.params.logprobs)
            model = self.model_of(chat.params)
            answer = ChatResponse(model, self.tokens, options, chat.reader)
            return await self.answer_chat(request, chat, answer)

    def read_chat(self, wanted: ChatRequest) -> Chat:
        """Check a chat and make its prompt; in a thread, as `in_thread` has them."""
        self._check(wanted)
        with_tools(wanted, self._config, self.unknown)
        params = chat_params(wanted, self._engine.max_seq_len, self.service.core.defaults)
        params = self._with_adapter(wanted, params)
        check_count(wanted.n or 1)
        self._check_template(wanted)
        use = read_tools(wanted, self._config, _reads_tools(self._template, wanted))
        form = structure_field(wanted)
        if use.grammar is not None:
            form, params = "tools", dataclasses.replace(params, structured_outputs=use.grammar)
        elif use.free_openings and params.structured_outputs is not None:
            free = dataclasses.replace(params.structured_outputs, free_openings=use.free_openings)
            params = dataclasses.replace(params, structured_outputs=free)
        text = render(self._template, wanted)
        requests = self.service.core.requests
        cut = self.prompts.cut(wanted, params)
        token_ids = requests.tokenize(text, not wanted.add_special_tokens, cut=cut)
        # how the prompt ends says what outputs begin with
        text = text if cut is None else self.prompts.text(token_ids)
        reader = MessageReader(self._config, wanted, text, use, self._metrics.tools)
        wanted._predicted = read_prediction(wanted.prediction, self._engine)
        forget_long(wanted)
        return Chat(wanted, params, form, token_ids, reader)

    async def answer_chat(self, request: Request, chat: Chat, answer: Answer) -> Response:
        shown = token_ids_of(self._engine.tokenizer, chat.reader.markers)
        return await self._answer(
            request, chat.wanted, [chat.token_ids], chat.params, answer, chat.form, shown=shown
        )

    async def in_thread(
        self, request: Request, read: Callable[[bytes], Read], is_chat: bool = False
    ) -> Read:
        """Read the body of a request; long ones off the event loop."""
        async with read_body(request, self._config) as body:
            work = self._threads.run(len(body), functools.partial(read, body), is_chat)
            return await unless_gone(request, work)

    def parse_body(self, body: bytes) -> dict[str, Any]:
        """The object in the body of a request; raises ApiError."""
        found = parse_body(body)
        check_grammar_size(found, self._config.max_grammar_chars)
        return found

    def options(
        self, wanted: GenerationRequest, logprobs: int | None, echo: tuple[str, ...] | None = None
    ) -> Options:
        """What an answer holds besides the text, as the request and the server's options say."""
        # without a tokenizer, responses have token ids only
        has_no_text = self._engine.tokenizer is None and wanted.return_token_ids is None
        return Options(
            logprobs,
            bool(wanted.return_spec_metrics) and self._config.tells_acceptance,
            echo,
            bool(wanted.return_token_ids) or has_no_text,
            wanted.prompt_logprobs,
            self._config.tells_cached_tokens,
            wanted.n or 1,
            wanted._predicted is not None,
        )

    async def _answer(
        self,
        request: Request,
        wanted: GenerationRequest,
        token_ids: Sequence[list[int]],
        params: SamplingParams,
        answer: Answer,
        form: str | None,
        is_prompt_alone: bool = False,
        shown: frozenset[int] = frozenset(),
    ) -> Response:
        jobs = [
            OutputJob(prompt, ids, own)
            for prompt, ids in enumerate(token_ids)
            for own in for_choices(params, num_outputs(wanted), bool(wanted.stream))
        ]
        # as in vLLM, the header takes precedence over the field
        sent_id = request_id_of(request)
        answer.name(sent_id or wanted.request_id)
        headers = {HEADER: sent_id or answer.id}
        generation = Generation(
            self.service,
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
                writer = answer.writer(wanted, generation.close)
                stream = await open_stream(request, generation, writer, headers)
                is_handed_on = True
                return stream
            outputs: list[Output] = await unless_gone(request, generation.collect())
            for output in outputs if is_prompt_alone else ():
                output.forget()
            return JSON(answer.whole(outputs), headers=headers)
        finally:
            if not is_handed_on:
                generation.close()

    def check_model(self, name: str | None) -> None:
        """Raises ApiError: there is no model, or adapter, of this name."""
        names = (*self._config.model_names, *self._engine.adapters)
        if name is not None and name not in names:
            raise unknown_model(name, names)

    def chat_text(self, wanted: ChatRequest) -> str:
        """The prompt of a chat, with special tokens.

        Raises:
            ApiError: there is no template, or this request cannot have it, or it refuses messages.
        """
        with_tools(wanted, self._config, self.unknown)
        self._check_template(wanted)
        return render(self._template, wanted)

    def _check(self, wanted: GenerationRequest) -> None:
        self.check_model(wanted.model)
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

    def model_of(self, params: SamplingParams) -> str:
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


@contextlib.contextmanager
def blaming(prompt: str) -> Iterator[None]:
    """Attribute engine errors to this field of the request."""
    try:
        yield
    except RequestError as error:
        raise api_error_of(error, prompt=prompt) from error


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
