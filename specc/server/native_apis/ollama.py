"""Ollama's API: /api/chat, /api/generate and /api/tags; its other paths are not built.

Options that would change an output, and that are not built, are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from specc.server.endpoints import Chat, Endpoints, blaming
from specc.server.errors import JSON, bad_request
from specc.server.fields import Fields
from specc.server.native_apis.ollama_answer import OllamaAnswer, now, said_fields
from specc.server.native_apis.options import (
    NEUTRAL,
    NO_EFFECT,
    Count,
    SamplingOptions,
    read_options,
    sampling_fields,
)
from specc.server.parsers.message import Delta
from specc.server.prompts import Completion
from specc.server.protocol import ChatRequest, CompletionRequest, parse

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": ("",), "images": ([],), "template": ("",), "context": ([],), "logprobs": (False,),
    "top_logprobs": (0,), "width": (), "height": (), "steps": (),
}  # fmt: skip
_NO_EFFECT = frozenset(("keep_alive", "truncate", "shift"))
# of how a model is run, which is settled here
_NO_EFFECT_OPTIONS = NO_EFFECT | {
    "numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "vocab_only", "use_mmap", "use_mlock",
    "num_thread", "num_keep", "f16_kv", "logits_all", "embedding_only",
}  # fmt: skip
_LATEST = ":latest"


class OllamaOptions(SamplingOptions):
    """`options` of a request."""

    num_predict: Count | None = None
    num_ctx: Count | None = None


class OllamaRequest(Fields):
    """What both kinds share."""

    model: str
    options: dict[str, Any] | None = None
    format: dict[str, Any] | Literal["", "json"] | None = None
    stream: bool | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    cache_salt: str | None = None


class OllamaChat(OllamaRequest):
    """Of /api/chat."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class OllamaGenerate(OllamaRequest):
    """Of /api/generate."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None


def tags(names: Sequence[str]) -> dict[str, Any]:
    """The body of /api/tags.

    Args:
        names: of models and adapters.
    """
    details = {"format": "specc", "family": "", "parameter_size": "", "quantization_level": ""}
    models = [{"name": n, "model": n, "modified_at": now(), "details": details} for n in names]
    return {"models": models}


class OllamaEndpoints:
    """Handlers, which raise what those of `Endpoints` do.

    Args:
        has_template: chats have one; without, prompts are read as they are.
    """

    def __init__(self, endpoints: Endpoints, has_template: bool) -> None:
        self._endpoints = endpoints
        self._has_template = has_template

    async def chat(self, request: Request) -> Response:
        """Of /api/chat."""
        return await self._answer(request, OllamaChat)

    async def generate(self, request: Request) -> Response:
        """Of /api/generate."""
        return await self._answer(request, OllamaGenerate)

    async def _answer(
        self, request: Request, kind: type[OllamaChat] | type[OllamaGenerate]
    ) -> Response:
        is_chat = kind is OllamaChat

        def read(body: bytes) -> tuple[str, Chat | Completion | None]:
            given = self._endpoints.parse_body(body)
            wanted = read_options(kind, given, _NEUTRAL, _NO_EFFECT, self._endpoints.unknown)
            fields = self._fields(wanted)
            self._endpoints.check_model(fields["model"])
            if isinstance(wanted, OllamaChat):
                messages = _messages(wanted.messages or [])
                fields |= {"tools": wanted.tools or None}
            elif wanted.prompt and (wanted.raw or not (wanted.system or self._has_template)):
                completion = {"prompt": wanted.prompt} | fields
                del completion["reasoning_effort"], completion["chat_template_kwargs"]
                found = parse(CompletionRequest, completion)
                return wanted.model, self._endpoints.read_completion(found)
            else:
                texts = {"system": wanted.system, "user": wanted.prompt}
                messages = [{"role": r, "content": text} for r, text in texts.items() if text]
            if not messages:
                return wanted.model, None
            chat = parse(ChatRequest, fields | {"messages": messages})
            return wanted.model, self._endpoints.read_chat(chat)

        with blaming("messages" if is_chat else "prompt"):
            model, found = await self._endpoints.in_thread(request, read, is_chat=True)
            if found is None:
                # asks for the model to be loaded, as it is
                end = {"created_at": now(), "done_reason": "load", "done": True}
                return JSON({"model": model} | said_fields(Delta(), is_chat) | end)
            if isinstance(found, Completion):
                answer = OllamaAnswer(model, None, is_chat)
                return await self._endpoints.answer_completion(request, found, answer)
            answer = OllamaAnswer(model, found.reader, is_chat)
            return await self._endpoints.answer_chat(request, found, answer)

    def _fields(self, wanted: OllamaRequest) -> dict[str, Any]:
        """Of a request to OpenAI's API, without its prompt."""
        given, unknown = wanted.options or {}, self._endpoints.unknown
        options = read_options(OllamaOptions, given, NEUTRAL, _NO_EFFECT_OPTIONS, unknown)
        most = self._endpoints.service.engine.max_seq_len
        if options.num_ctx is not None and options.num_ctx > most:
            raise bad_request(
                f"num_ctx={options.num_ctx}", f"at most {most}, for which the engine is compiled",
                "leave it out", "options.num_ctx",
            )  # fmt: skip
        form = {"json_object": True} if wanted.format == "json" else {"json": wanted.format}
        is_level = isinstance(wanted.think, str)
        return sampling_fields(options, options.num_predict) | {
            "model": wanted.model.removesuffix(_LATEST),
            "stream": wanted.stream is not False,
            "cache_salt": wanted.cache_salt,
            "structured_outputs": form if wanted.format else None,
            "reasoning_effort": wanted.think if is_level else None,
            "chat_template_kwargs": None
            if is_level or wanted.think is None
            else {"enable_thinking": wanted.think},
        }


def _messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """As OpenAI's API has them: calls and the answers to them have ids.

    Raises:
        ApiError: one with images.
    """
    found, open_calls = [], []
    for index, message in enumerate(messages):
        fields = dict(message)
        if fields.pop("images", None):
            raise bad_request(f"messages.{index} with images", "text", "leave them out", "messages")
        calls = fields.get("tool_calls")
        if isinstance(calls, list) and all(isinstance(call, Mapping) for call in calls):
            fields["tool_calls"] = [
                {"id": f"call_{index}_{i}", "type": "function"} | dict(call)
                for i, call in enumerate(calls)
            ]
            open_calls += [call["id"] for call in fields["tool_calls"]]
        if fields.get("role") == "tool" and "tool_call_id" not in fields and open_calls:
            # answers come in the order of the calls
            fields["tool_call_id"] = open_calls.pop(0)
        if (name := fields.pop("tool_name", None)) is not None:
            fields["name"] = name
        found.append(fields)
    return found
