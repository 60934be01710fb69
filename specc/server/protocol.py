"""What clients may send: the requests of OpenAI's API, with the further fields of vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, PrivateAttr, WithJsonSchema

from specc.runtime.requests.salt import MAX_CHARACTERS
from specc.sampling.logit_controls import MAX_BAD_WORDS, MAX_BIAS
from specc.sampling.params import MAX_LOGPROBS
from specc.sampling.rows import RULES
from specc.server.chat_fields import ChatMessage, FunctionCall, Tool, ToolChoice, ToolFunction
from specc.server.config import MAX_CHOICES, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from specc.server.fields import (
    Fields,
    Int,
    Ints,
    UnknownFields,
    known_fields,
    parse_fields,
    without_nulls,
)

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


# read where prompts are: it can be long
_PREDICTION = WithJsonSchema(
    {
        "anyOf": [
            {
                "type": "object",
                "required": ["type", "content"],
                "properties": {
                    "type": {"const": "content"},
                    "content": {
                        "anyOf": [
                            {"type": "string"},
                            {
                                "type": "array",
                                "items": {
                                    "type": "object",
                                    "required": ["type", "text"],
                                    "properties": {
                                        "type": {"const": "text"},
                                        "text": {"type": "string"},
                                    },
                                },
                            },
                        ]
                    },
                },
            },
            {"type": "null"},
        ]
    }
)
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


def _bias(value: Any) -> Any:
    return without_nulls(value) if isinstance(value, Mapping) else value


_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
# what may be long and is read before anything is generated
_LONG = (
    "prompt", "messages", "tools", "functions", "documents", "chat_template", "structured_outputs",
    "response_format", "prediction", *_GUIDED,
)  # fmt: skip
# fields of OpenAI's API and of vLLM's that change no output here
IGNORED = frozenset(
    (
        "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "parallel_tool_calls", "verbosity",
        "length_penalty", "guided_decoding_backend", "session_id",
        "spaces_between_special_tokens",
    )
)  # fmt: skip
# fields that would change the output and that this server has not got → values that ask for nothing
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "suffix": ("",),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "use_beam_search": (False,),
    "return_tokens_as_token_ids": (False,),
    "logprob_token_ids": ([],),
}


class StreamOptions(Fields):
    """What comes with a stream besides the text; `include_usage` as in `has_usage`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None

    @property
    def has_usage(self) -> bool:
        """A last chunk has the usage; whoever wants it in every chunk need not say both."""
        if self.include_usage is None:
            return bool(self.continuous_usage_stats)
        return self.include_usage

    @property
    def has_all_usage(self) -> bool:
        """Every chunk has it, too."""
        return self.has_usage and bool(self.continuous_usage_stats)


class JSONSchema(Fields):
    """A schema, as OpenAI wraps it."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Fields):
    """`text`, `json_object`, or `json_schema` with its schema.

    `json_object` may have a schema of its own, as llama.cpp's has.
    """

    type: str
    json_schema: JSONSchema | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class StructuredOutputs(Fields):
    """As vLLM's: one of the first five, unless another field says the form, and its options."""

    json_: Annotated[Any, Field(alias="json"), _SCHEMA] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None
    lenient: bool | None = None


class GenerationRequest(Fields):
    """What both kinds of requests share; null is the default of a field."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[Int | None, _number(-1)] = None
    temperature: Annotated[float | None, _number(0, 1e6)] = None
    top_p: Annotated[
        float | None, Field(json_schema_extra={"exclusiveMinimum": 0, "maximum": 1})
    ] = None
    n: Annotated[Int | None, Field(ge=1, le=MAX_CHOICES)] = None
    stop: Stop = None
    seed: Annotated[Int | None, _number(-(1 << 63), (1 << 63) - 1)] = None
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(_bias), _BIAS] = None
    presence_penalty: Annotated[float | None, _number(-2, 2)] = None
    frequency_penalty: Annotated[float | None, _number(-2, 2)] = None
    response_format: ResponseFormat | None = None
    # further ones, named as vLLM's
    top_k: Annotated[Int | None, _number(-1, (1 << 31) - 1)] = None
    min_p: Annotated[float | None, _number(0, 1)] = None
    repetition_penalty: Annotated[
        float | None, Field(json_schema_extra={"exclusiveMinimum": 0})
    ] = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[Ints | None, Field(max_length=MAX_STOP_TOKEN_IDS)] = None
    min_tokens: Annotated[Int | None, _number(0)] = None
    allowed_token_ids: Annotated[Ints | None, Field(min_length=1)] = None
    bad_words: Annotated[list[str] | None, Field(max_length=MAX_BAD_WORDS)] = None
    prompt_logprobs: Annotated[Int | None, _number(0, MAX_LOGPROBS)] = None
    return_token_ids: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[Int | None, _number(-1)] = None
    truncation_side: Literal["left", "right"] | None = None
    priority: Annotated[Int | None, Field(ge=-(1 << 31), lt=1 << 31)] = None
    request_id: Annotated[str | None, Field(pattern=r"^[ -~]{1,256}$")] = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Annotated[Any, _SCHEMA] = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    cache_salt: Annotated[str | None, Field(min_length=1, max_length=MAX_CHARACTERS)] = None
    # OpenAI's, of chats
    prediction: Annotated[Any, _PREDICTION] = None
    # and of specc
    rule: Annotated[str | None, Field(json_schema_extra={"enum": [*RULES, None]})] = None
    speculative: bool | None = None
    return_spec_metrics: bool | None = None
    # token ids of the prediction, where the engine has steps for it
    _predicted: list[int] | None = PrivateAttr(default=None)


class CompletionRequest(GenerationRequest):
    """Of /v1/completions."""

    prompt: Prompts
    best_of: Annotated[Int | None, Field(ge=1, le=MAX_CHOICES)] = None
    echo: bool | None = None
    logprobs: Annotated[Int | None, _number(0, MAX_LOGPROBS)] = None


class ChatRequest(GenerationRequest):
    """Of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[Int | None, _number(-1)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Int | None, _number(0, MAX_LOGPROBS)] = None
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
    # what tools and tool_choice were before; see `tools.with_tools`
    functions: list[ToolFunction] | None = None
    function_call: FunctionCall = None
    documents: list[dict[str, Any]] | None = None
    # calls are answered as the client asked for them
    _has_functions: bool = PrivateAttr(default=False)


AnyRequest = TypeVar("AnyRequest", CompletionRequest, ChatRequest)


def parse(
    kind: type[AnyRequest], data: Mapping[str, Any], unknown: UnknownFields | None = None
) -> AnyRequest:
    """Check a request's fields and their types.

    Args:
        kind: of request.
        data: its body.
        unknown: what becomes of fields that this server does not know.
    Raises:
        ApiError: a field that would change the output and that this server has not got, a value of
            another type, or an unknown field where they are refused.
    """
    own = kind.model_fields
    return parse_fields(kind, known_fields(data, UNSUPPORTED, IGNORED, own), unknown)


def forget_long(request: GenerationRequest) -> None:
    """Drop what may be long and was read: the request stays while its outputs are made."""
    for name in _LONG:
        if name in type(request).model_fields:
            setattr(request, name, None)
