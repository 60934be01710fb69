"""Token ids of texts and of chats, and back, in vLLM's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from tokenizers import Tokenizer

from specc.artifact.special_tokens import of_engine
from specc.runtime.requests.chat_template import ChatTemplate
from specc.server.chat_fields import ChatMessage, Tool
from specc.server.config import MAX_VALUES
from specc.server.endpoints import Endpoints
from specc.server.errors import JSON, bad_request, to_bytes
from specc.server.fields import Fields, Ints, parse_fields
from specc.server.protocol import ChatRequest, parse


class TokenizeRequest(Fields):
    """Of /tokenize: a text, or a chat with what its template is given."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage] | None, Field(min_length=1)] = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None


class DetokenizeRequest(Fields):
    """Of /detokenize."""

    model: str | None = None
    tokens: Annotated[Ints, Field(max_length=MAX_VALUES)]


# values that are written at a time: a few milliseconds
_PART = 1 << 14
# not of chats
_OWN = ("prompt", "return_token_strs")


class Tokenizing:
    """Serves what generates nothing; handlers raise what those of `Endpoints` do.

    Args:
        endpoints: whose model and threads these are.
        template: of chats.
    """

    def __init__(self, endpoints: Endpoints, template: ChatTemplate | None) -> None:
        self._endpoints = endpoints
        self._service = endpoints.service
        self._template = template

    async def tokenize(self, request: Request) -> Response:
        """Handler of /tokenize."""

        def read(body: bytes) -> bytes:
            data = self._endpoints.parse_body(body)
            wanted = parse_fields(TokenizeRequest, data, self._endpoints.unknown)
            self._endpoints.check_model(wanted.model)
            if (wanted.prompt is None) == (wanted.messages is None):
                raise bad_request(
                    "neither prompt nor messages" if wanted.prompt is None else "two prompts",
                    "one of prompt and messages", "pass one of them", "prompt",
                )  # fmt: skip
            if wanted.prompt is None:
                names = TokenizeRequest.names() - {*_OWN}
                chat = {name: value for name, value in data.items() if name in names}
                text = self._endpoints.chat_text(parse(ChatRequest, chat, self._endpoints.unknown))
            else:
                text = wanted.prompt
            # a rendered chat has them already
            adds = wanted.add_special_tokens
            adds = wanted.prompt is not None if adds is None else adds
            token_ids = self._service.core.requests.tokenize(text, not adds, fits=False)
            return self._tokens(token_ids, bool(wanted.return_token_strs))

        # there may be a million of them
        found = await self._endpoints.in_thread(request, read, is_chat=True)
        return Response(found, media_type=JSON.media_type)

    async def detokenize(self, request: Request) -> Response:
        """Handler of /detokenize."""

        def read(body: bytes) -> str:
            data = self._endpoints.parse_body(body)
            wanted = parse_fields(DetokenizeRequest, data, self._endpoints.unknown)
            self._endpoints.check_model(wanted.model)
            end = self._service.engine.vocab_size
            if wrong := next((i for i in wanted.tokens if not 0 <= i < end), None):
                raise bad_request(f"token id {wrong}", f"0 … {end - 1}", "correct it", "tokens")
            # a batch is decoded without the lock of the interpreter
            return self._tokenizer.decode_batch([wanted.tokens], skip_special_tokens=False)[0]

        return JSON({"prompt": await self._endpoints.in_thread(request, read)})

    async def info(self) -> Response:
        """Handler of /tokenizer_info: special tokens by their names, and the chat template.

        Raises:
            ApiError: there is no tokenizer.
            ConfigError: a file of the engine that is no JSON.
        """
        engine, template = self._service.engine, self._template
        tokens: dict[str, Any] = {} if engine.directory is None else of_engine(engine.directory)
        eos = min(engine.eos_token_ids, default=None)
        ids = {"bos_token": engine.bos_token_id, "eos_token": eos}
        for name, token_id in ids.items():
            if name not in tokens and token_id is not None:
                tokens[name] = self._tokenizer.id_to_token(token_id)
        source = None if template is None else template.default_source
        kind = type(self._tokenizer).__name__
        # who reads one of these gets null where there is none
        absent = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"))
        return JSON({"tokenizer_class": kind} | absent | tokens | {"chat_template": source})

    def _tokens(self, token_ids: list[int], has_strings: bool) -> bytes:
        """The body of an answer, written in parts: a writer holds the interpreter's lock."""
        head = {"count": len(token_ids), "max_model_len": self._service.engine.max_seq_len}
        tokenizer = self._tokenizer
        strings = b"null"
        if has_strings:
            strings = _in_parts([tokenizer.id_to_token(token) for token in token_ids])
        ids = _in_parts(token_ids)
        return b'%s,"tokens":%s,"token_strs":%s}' % (to_bytes(head)[:-1], ids, strings)

    @property
    def _tokenizer(self) -> Tokenizer:
        tokenizer = self._service.engine.tokenizer
        if tokenizer is None:
            raise bad_request("an engine without a tokenizer", "one", "load another engine")
        return tokenizer


def _in_parts(values: Sequence[Any]) -> bytes:
    """A list as JSON."""
    parts = (values[at : at + _PART] for at in range(0, len(values), _PART))
    return b"[" + b",".join(to_bytes(part)[1:-1] for part in parts) + b"]"
