"""What a client asks of /v1/responses, as a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from specc.server.errors import ApiError, bad_request
from specc.server.fields import UnknownFields, error_of, without_nulls
from specc.server.grammar import check_grammar_size
from specc.server.protocol import ChatRequest, parse
from specc.server.responses.items import Item
from specc.server.responses.package import check, request_type

# what is not built → values that ask for nothing, and what to do instead
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "background": ((False,), "read the stream, or wait for the answer"),
    "background_options": ((), "leave it out"),
    "conversation": ((), "pass previous_response_id, or all items as input"),
    "prompt": ((), "pass instructions and input: there are no templates of prompts here"),
    "context_management": (([],), "send less, or truncation=auto"),
    "moderation": ((), "leave it out"),
}
# of no effect here
_IGNORED = frozenset(
    ("access_programs", "image", "prompt_cache_options", "prompt_cache_retention", "stream_options")
)
# further fields of vLLM's and specc's, which mean what they mean in chats
_OF_CHATS = (
    "stop", "seed", "logit_bias", "presence_penalty", "frequency_penalty", "top_k", "min_p",
    "repetition_penalty", "ignore_eos", "stop_token_ids", "min_tokens", "allowed_token_ids",
    "bad_words", "include_stop_str_in_output", "skip_special_tokens", "add_special_tokens",
    "priority", "structured_outputs", "rule", "speculative", "chat_template",
    "chat_template_kwargs", "documents", "include_reasoning", "cache_salt", "prediction",
)  # fmt: skip
# names of chats → names here
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
LOGPROBS = "message.output_text.logprobs"
# of OpenAI's API
_MAX_PAIRS, _MAX_KEY, _MAX_VALUE = 16, 64, 512


@dataclass(frozen=True)
class Wanted:
    """A request that is checked, but for its items.

    Args:
        fields: with the types of the package; what is null is absent.
        more: fields that go to the chat as they are.
        tools: functions, complete.
    """

    fields: Mapping[str, Any]
    more: Mapping[str, Any]
    tools: Sequence[Item]

    @property
    def truncates(self) -> bool:
        return self.fields.get("truncation") == "auto"

    @property
    def logprobs(self) -> int | None:
        """Best tokens to name beside each."""
        has_logprobs = LOGPROBS in self.fields.get("include", ())
        return self.fields.get("top_logprobs", 0) if has_logprobs else None

    def asked(self, model: str, temperature: float, top_p: float, is_kept: bool) -> Item:
        """What a response repeats of its request."""
        given, text = self.fields, self.fields.get("text", {})
        reasoning = given.get("reasoning")
        return {
            "model": model,
            "instructions": given.get("instructions"),
            "max_output_tokens": given.get("max_output_tokens"),
            "max_tool_calls": given.get("max_tool_calls"),
            "metadata": given.get("metadata", {}),
            "parallel_tool_calls": given.get("parallel_tool_calls", True),
            "prompt_cache_key": given.get("prompt_cache_key"),
            # no summaries are made
            "reasoning": {"effort": None if reasoning is None else reasoning.effort,
                          "summary": None},
            "safety_identifier": given.get("safety_identifier"),
            "service_tier": "default",
            "store": is_kept,
            "temperature": temperature,
            "text": {"format": {"type": "text"}} | text,
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": list(self.tools),
            "top_logprobs": given.get("top_logprobs", 0),
            "top_p": top_p,
            "truncation": given.get("truncation", "disabled"),
            "user": given.get("user"),
        }  # fmt: skip

    def chat(
        self, messages: Sequence[Item], unknown: UnknownFields, max_grammar_chars: int
    ) -> ChatRequest:
        """Raises ApiError: a field that chats refuse."""
        given = self.fields
        reasoning = given.get("reasoning")
        body = {
            **self.more,
            "messages": list(messages),
            "model": given.get("model"),
            "stream": given.get("stream"),
            "max_completion_tokens": given.get("max_output_tokens"),
            "temperature": given.get("temperature"),
            "top_p": given.get("top_p"),
            "parallel_tool_calls": given.get("parallel_tool_calls"),
            "reasoning_effort": None if reasoning is None else reasoning.effort,
            "response_format": _chat_format(given.get("text", {}).get("format")),
            "tools": [_chat_tool(tool) for tool in self.tools] or None,
            # of no effect without tools
            "tool_choice": _choice(given.get("tool_choice"), bool(self.tools)),
            "logprobs": self.logprobs is not None or None,
            "top_logprobs": self.logprobs,
        }
        check_grammar_size(body, max_grammar_chars)
        return parse(ChatRequest, body, unknown)


def read_request(body: Mapping[str, Any], unknown: UnknownFields) -> Wanted:
    """Check the fields of a request.

    Args:
        unknown: what becomes of fields that nobody knows.
    Raises:
        ApiError: one that is malformed, or asks for what is not built.
    """
    kind = request_type()
    given = without_nulls(body)
    for name, (harmless, do) in _REFUSED.items():
        if name in given and given.pop(name) not in harmless:
            raise _unsupported(f"{name}={body[name]!r}"[:80], do, name)
    more = {name: given.pop(name) for name in _OF_CHATS if name in given}
    for name in _IGNORED:
        given.pop(name, None)
    try:
        read = kind.model_validate(given, context=unknown)
    except ValidationError as error:
        raise error_of(kind, error) from error
    fields = {name: value for name in read.model_fields_set
              if (value := getattr(read, name)) is not None}  # fmt: skip
    if "input" not in fields:
        text = "Missing required parameter: 'input'. Please add it."
        raise ApiError(400, text, param="input", code="missing_required_parameter")
    _check(fields)
    tools = [_tool(tool, f"tools.{i}") for i, tool in enumerate(fields.get("tools", ()))]
    return Wanted(fields, more, tools)


def _check(fields: Mapping[str, Any]) -> None:
    tokens = fields.get("max_output_tokens", 1)
    if tokens < 1:
        raise bad_request(
            f"max_output_tokens={tokens}", "1 or more", "correct it", "max_output_tokens"
        )
    if fields.get("top_logprobs") and LOGPROBS not in fields.get("include", ()):
        raise bad_request(
            "top_logprobs without log probabilities", f'include=["{LOGPROBS}"] beside it',
            "add it, or leave top_logprobs out", "top_logprobs",
        )  # fmt: skip
    metadata = fields.get("metadata", {})
    longest = max(map(len, metadata.values()), default=0)
    if (
        len(metadata) > _MAX_PAIRS
        or max(map(len, metadata), default=0) > _MAX_KEY
        or (longest > _MAX_VALUE)
    ):
        raise bad_request(
            "metadata of more than that", f"at most {_MAX_PAIRS} pairs, of {_MAX_KEY} and"
            f" {_MAX_VALUE} characters", "send less", "metadata",
        )  # fmt: skip
    _check_format(fields.get("text", {}).get("format"))


def _check_format(wanted: Any) -> None:
    place = "text.format"
    if wanted is None:
        return
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind not in ("text", "json_object", "json_schema"):
        raise bad_request(
            f"{place} of type {kind!r}", "text, json_object or json_schema", "choose one of them",
            f"{place}.type",
        )  # fmt: skip
    if kind == "json_schema":
        check("json_schema", without_nulls(wanted), place)


def _tool(tool: Any, place: str) -> Item:
    """A function, complete."""
    fields = without_nulls(tool) if isinstance(tool, Mapping) else {}
    kind = fields.get("type")
    if kind != "function":
        raise _unsupported(
            f"{place} of type {kind!r}",
            "leave it out: this server has no tools of its own, and calls functions alone",
            f"{place}.type",
        )
    check("function", fields, place)
    return {"parameters": None, "strict": None, "description": None} | fields


def _chat_tool(tool: Item) -> Item:
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _choice(choice: Any, has_tools: bool) -> Any:
    if choice in (None, "auto", "none") and not has_tools:
        return None
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind is not None and kind not in ("function", "allowed_tools"):
        raise _unsupported(
            f"tool_choice of type {kind!r}"[:80], "choose a function, auto, none or required",
            "tool_choice",
        )  # fmt: skip
    return choice


def _chat_format(wanted: Any) -> Any:
    if wanted is None or wanted["type"] != "json_schema":
        return wanted
    names = ("name", "description", "schema", "strict")
    schema = {name: wanted[name] for name in names if name in wanted}
    return {"type": "json_schema", "json_schema": schema}


def in_own_names(error: ApiError) -> ApiError:
    """An error of a chat with the names that fields have here."""
    first, dot, rest = (error.param or "").partition(".")
    if first in _NAMES:
        # places within messages are not those of items
        keeps = first != "messages" and dot
        error.param = f"{_NAMES[first]}.{rest}" if keeps else _NAMES[first]
    return error


def _unsupported(found: str, do: str, param: str) -> ApiError:
    text = f"Not supported here: {found}. Please {do}."
    return ApiError(400, text, param=param, code="unsupported_parameter")
