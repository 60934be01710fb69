"""What clients may send: the requests of OpenAI's API, with the further fields of vLLM's."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from specc.sampling.logit_controls import MAX_BAD_WORDS, MAX_BIAS
from specc.sampling.params import MAX_LOGPROBS
from specc.sampling.rows import RULES
from specc.server.config import MAX_CHOICES, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from specc.server.errors import ApiError

_STRINGS = {"type": "array", "items": {"type": "string"}}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
# checked where prompts are read: each of these can be long
Prompts = Annotated[
    Any,
    WithJsonSchema(
        {"anyOf": [{"type": "string"}, _STRINGS, _IDS, {"type": "array", "items": _IDS}]}
    ),
]
Stop = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                _STRINGS | {"maxItems": MAX_STOP_STRINGS},
                {"type": "null"},
            ]
        }
    ),
]


def _number(low: float, high: float | None = None) -> Any:
    """A range for the description; `SamplingParams` checks it."""
    limits: dict[str, Any] = {"minimum": low} | ({} if high is None else {"maximum": high})
    return Field(json_schema_extra=limits)


_SCHEMA = WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "null"}]})
_BIAS = WithJsonSchema(
    {
        "anyOf": [
            {
                "type": "object",
                "additionalProperties": {
                    "type": "number",
                    "minimum": -MAX_BIAS,
                    "maximum": MAX_BIAS,
                },
            },
            {"type": "null"},
        ]
    }
)

_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
# what may be long and is read before anything is generated
_LONG = (
    "prompt", "messages", "tools", "documents", "chat_template", "structured_outputs",
    "response_format", *_GUIDED,
)  # fmt: skip
# fields of OpenAI's API and of vLLM's that change no output here
IGNORED = frozenset(
    (
        "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "parallel_tool_calls", "verbosity",
        "request_id", "guided_decoding_backend", "spaces_between_special_tokens",
    )
)  # fmt: skip
# fields that would change the output and that this server has not got → values that ask for nothing
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "suffix": ("",),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "truncate_prompt_tokens": (),
}


class Strict(BaseModel):
    """No conversions, and no fields that nobody reads."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())


class StreamOptions(Strict):
    """What comes with a stream besides the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JSONSchema(Strict):
    """A schema, as OpenAI wraps it."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Strict):
    """`text`, `json_object`, or `json_schema` with its schema."""

    type: str
    json_schema: JSONSchema | None = None


class StructuredOutputs(Strict):
    """As vLLM's; exactly one of the first five."""

    json_: Annotated[Any, Field(alias="json"), _SCHEMA] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None


class GenerationRequest(Strict):
    """What both kinds of requests share; null is the default of a field."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int | None, _number(1)] = None
    temperature: Annotated[float | None, _number(0, 1e6)] = None
    top_p: Annotated[
        float | None, Field(json_schema_extra={"exclusiveMinimum": 0, "maximum": 1})
    ] = None
    n: Annotated[int | None, Field(ge=1, le=MAX_CHOICES)] = None
    stop: Stop = None
    seed: Annotated[int | None, _number(0, (1 << 63) - 1)] = None
    logit_bias: Annotated[dict[str, float] | None, _BIAS] = None
    presence_penalty: Annotated[float | None, _number(-2, 2)] = None
    frequency_penalty: Annotated[float | None, _number(-2, 2)] = None
    response_format: ResponseFormat | None = None
    # further ones, named as vLLM's
    top_k: Annotated[int | None, _number(-1, (1 << 31) - 1)] = None
    min_p: Annotated[float | None, _number(0, 1)] = None
    repetition_penalty: Annotated[
        float | None, Field(json_schema_extra={"exclusiveMinimum": 0})
    ] = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int] | None, Field(max_length=MAX_STOP_TOKEN_IDS)] = None
    min_tokens: Annotated[int | None, _number(0)] = None
    allowed_token_ids: Annotated[list[int] | None, Field(min_length=1)] = None
    bad_words: Annotated[list[str] | None, Field(max_length=MAX_BAD_WORDS)] = None
    prompt_logprobs: Annotated[int | None, _number(0, MAX_LOGPROBS)] = None
    return_token_ids: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    priority: Annotated[int | None, Field(ge=-(1 << 31), lt=1 << 31)] = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Annotated[Any, _SCHEMA] = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    # and of specc
    rule: Annotated[str | None, Field(json_schema_extra={"enum": [*RULES, None]})] = None
    speculative: bool | None = None
    return_spec_metrics: bool | None = None


class CompletionRequest(GenerationRequest):
    """Of /v1/completions."""

    prompt: Prompts
    best_of: Annotated[int | None, Field(ge=1)] = None
    echo: bool | None = None
    logprobs: Annotated[int | None, _number(0, MAX_LOGPROBS)] = None


class TextPart(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: str
    text: str | None = None


class ChatMessage(BaseModel):
    """A message; further fields go to the chat template."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Annotated[str, Field(min_length=1)]
    content: str | list[TextPart] | None = None


class ToolFunction(BaseModel):
    """A function that a model may call; further fields go to the chat template."""

    model_config = ConfigDict(strict=True, extra="allow")

    # formats of calls have names between marks of their own
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """Of type `function`."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: str
    function: ToolFunction


ToolChoice = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["none", "auto", "required", None]},
                {
                    "type": "object",
                    "required": ["type", "function"],
                    "properties": {
                        "type": {"const": "function"},
                        "function": {
                            "type": "object",
                            "required": ["name"],
                            "properties": {"name": {"type": "string"}},
                        },
                    },
                },
            ]
        }
    ),
]


class ChatRequest(GenerationRequest):
    """Of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int | None, _number(1)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, _number(0, MAX_LOGPROBS)] = None
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    documents: list[dict[str, Any]] | None = None


AnyRequest = TypeVar("AnyRequest", CompletionRequest, ChatRequest)


def parse(kind: type[AnyRequest], data: Mapping[str, Any]) -> AnyRequest:
    """Check a request's fields and their types.

    Raises:
        ApiError: an unknown field, one that this server has not got, or a value of another type.
    """
    known = {}
    for name, value in data.items():
        if name in kind.model_fields:
            known[name] = value
        elif name in UNSUPPORTED:
            if value is not None and not any(_same(value, other) for other in UNSUPPORTED[name]):
                raise ApiError(
                    400,
                    f"found: {name}; needed: a request without it: this server has not got it; do:"
                    " leave it out",
                    param=name,
                    code="unsupported_parameter",
                )
        elif name not in IGNORED:
            known[name] = value
    try:
        return kind.model_validate(known)
    except ValidationError as error:
        raise _error_of(kind, error) from error


def forget_long(request: GenerationRequest) -> None:
    """Drop what may be long and was read: the request stays while its outputs are made."""
    for name in _LONG:
        if name in type(request).model_fields:
            setattr(request, name, None)


def _same(value: Any, other: Any) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _error_of(kind: type[BaseModel], error: ValidationError) -> ApiError:
    """The first thing that is wrong; an unknown field before any of its consequences."""
    problems = error.errors(include_url=False, include_input=False, include_context=False)
    first = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    param = ".".join(str(part)[:80] for part in first["loc"])
    if first["type"] == "extra_forbidden":
        fields = {field.alias or name for name, field in kind.model_fields.items()}
        close = difflib.get_close_matches(param[:80], sorted(fields), n=1)
        do = f"{close[0]}?" if close else "leave it out"
        text = f"found: the unknown field {param!r}; needed: fields of this API; do: {do}"
        return ApiError(400, text, param=param, code="unknown_parameter")
    is_missing = first["type"] == "missing"
    found = f"no {param}" if is_missing else f"{param} of another form"
    message = first["msg"][:1].lower() + first["msg"][1:]
    return ApiError(
        400,
        f"found: {found}; needed: {message}; do: correct the request",
        param=param,
        code="missing_required_parameter" if is_missing else "invalid_type",
    )
