"""What the package openai says of bodies; imported with the first request: it takes a second."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Annotated, Any, get_type_hints

from pydantic import BaseModel, BeforeValidator, ValidationError, create_model

from specc.server.errors import ApiError
from specc.server.fields import Fields, problem_error, whole
from specc.system.extras import install_command

# fields of a request that the package's `Response` has, too, and those that only its parameters
# have; others are read by hand: unions of dozens of types, of which errors would name every one
_SHOWN = (
    "max_output_tokens", "max_tool_calls", "metadata", "parallel_tool_calls",
    "previous_response_id", "prompt_cache_key", "reasoning", "safety_identifier", "service_tier",
    "temperature", "top_logprobs", "top_p", "truncation", "user",
)  # fmt: skip
_SENT = ("include", "instructions", "store")
_OTHERS: dict[str, Any] = {
    "model": str | None,
    "stream": bool | None,
    "stream_options": dict[str, Any] | None,
    "input": Any,
    "tools": list[Any] | None,
    "tool_choice": Any,
    "text": dict[str, Any] | None,
}
_NUMBERS = ("max_output_tokens", "max_tool_calls", "top_logprobs")
# models of the package, by what they are models of
_ITEMS = {
    "message": "ResponseInputMessageItem",
    "answer": "ResponseOutputMessage",
    "function_call": "ResponseFunctionToolCallItem",
    "function_call_output": "ResponseFunctionToolCallOutputItem",
    "reasoning": "ResponseReasoningItem",
    "function": "FunctionTool",
    "json_schema": "ResponseFormatTextJSONSchemaConfig",
}


@functools.cache
def _types() -> Any:
    try:
        return importlib.import_module("openai.types.responses")
    except ImportError as error:
        raise ApiError(
            501,
            "This server has no package openai, whose types /v1/responses is read with. Please"
            f" install it ({install_command('serve')}), or use /v1/chat/completions.",
            code="not_installed",
        ) from error


@functools.cache
def request_type() -> type[Fields]:
    """Fields of a request, with the package's types, read as strictly as those of all requests.

    Raises:
        ApiError: the package is not installed.
    """
    types = _types()
    params = importlib.import_module("openai.types.responses.response_create_params")
    sent = get_type_hints(params.ResponseCreateParamsBase)
    shown = {name: field.annotation for name, field in types.Response.model_fields.items()}
    found = {name: shown[name] for name in _SHOWN} | {name: sent[name] for name in _SENT}
    for name in _NUMBERS:
        found[name] = Annotated[found[name], BeforeValidator(whole)]
    fields: dict[str, Any] = {name: (kind, None) for name, kind in (found | _OTHERS).items()}
    made: type[Fields] = create_model("ResponseRequest", __base__=Fields, **fields)
    return made


def check(kind: str, fields: Mapping[str, Any], place: str) -> None:
    """Check an object by the package's model of it; further fields are allowed.

    Args:
        kind: of `_ITEMS`.
        place: of the object in the request.
    Raises:
        ApiError: a field is missing, or of another type; or the package is not installed.
    """
    model: type[BaseModel] = getattr(_types(), _ITEMS[kind])
    try:
        model.model_validate(fields, strict=True)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
        # names of types in unions are no places
        steps = [str(step)[:80] for step in problem["loc"] if not str(step)[:1].isupper()]
        raise problem_error(".".join([place, *steps]), problem) from error
