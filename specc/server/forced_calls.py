"""Calls that a request requires: the output is JSON of a schema, without markers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specc.errors import RequestError
from specc.sampling.structured import StructuredOutputsParams
from specc.server.errors import ApiError, bad_request

# keywords whose values are no schemas, and those whose values are schemas by names
_DATA = ("const", "enum", "default", "examples")
_BY_NAME = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
# of a whole document, which the schema of a tool is no longer
_OF_DOCUMENTS = ("$schema", "$id")
# of a tool that names no arguments
_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


def arguments_schema(tools: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The schema of one tool's arguments; an object in any case."""
    found = {k: v for k, v in (tools[name] or {}).items() if k not in _OF_DOCUMENTS}
    if not found:
        return _NOTHING
    return found if "type" in found or "$ref" in found else {"type": "object"} | found


def calls_schema(tools: Mapping[str, Any], max_calls: int) -> dict[str, Any]:
    """The schema of a list of one call or more, as vLLM's: `[{"name": …, "parameters": {…}}]`.

    Args:
        tools: name → schema of the arguments.
    """
    definitions, calls = {}, []
    for index, name in enumerate(tools):
        # references of a schema are paths from its root, which is elsewhere now
        key = f"tool_{index}"
        definitions[key] = _moved(arguments_schema(tools, name), f"#/$defs/{key}")
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": name},
                    "parameters": {"$ref": f"#/$defs/{key}"},
                },
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    return {
        "type": "array",
        "minItems": 1,
        "maxItems": max_calls,
        "items": {"anyOf": calls},
        "$defs": definitions,
    }


def calls_grammar(
    schema: dict[str, Any], max_chars: int, options: Mapping[str, Any]
) -> StructuredOutputsParams:
    """What an output has to be.

    Args:
        options: of the request, for JSON.
    Raises:
        ApiError: it is none, or has more characters.
    """
    try:
        params = StructuredOutputsParams(json=schema, **options)
    except RequestError as error:
        raise _unfit(error.found, error.needed) from error
    if len(params.text) > max_chars:
        raise _unfit(
            f"more than {max_chars} characters", f"at most {max_chars} (--max-grammar-chars)"
        )
    return params


def _unfit(found: str, needed: str) -> ApiError:
    return bad_request(
        f"tools whose schemas together are a grammar of {found}",
        needed,
        'pass fewer of them, or tool_choice="auto"',
        "tools",
    )


def _moved(part: Any, place: str) -> Any:
    """A schema whose references into itself begin at another place."""
    if isinstance(part, list):
        return [_moved(item, place) for item in part]
    if not isinstance(part, dict):
        return part
    moved = {}
    for key, value in part.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            value = place + value[1:]
        elif key in _BY_NAME and isinstance(value, dict):
            value = {name: _moved(item, place) for name, item in value.items()}
        elif key not in _DATA:
            value = _moved(value, place)
        moved[key] = value
    return moved
