"""What chats are made of: messages, and the tools that their answers may call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema, model_validator

from specc.server.fields import OpenFields, without_nulls


class TextPart(OpenFields):
    """A part of a message; a text alone is one, too."""

    type: str
    text: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _with_type(cls, part: Any) -> Any:
        if isinstance(part, str):
            return {"type": "text", "text": part}
        if isinstance(part, Mapping) and isinstance(part.get("text"), str):
            return {"type": "text"} | without_nulls(part)
        return part


class ChatMessage(OpenFields):
    """A message; further fields go to the chat template.

    Calls may have the form from before there were tools, with a `function_call` and an answer of
    the role `function`.
    """

    role: Annotated[str, Field(min_length=1)]
    content: str | list[TextPart] | None = None

    @model_validator(mode="before")
    @classmethod
    def _as_of_today(cls, message: Any) -> Any:
        if not isinstance(message, Mapping):
            return message
        fields = dict(message)
        call, calls = fields.pop("function_call", None), fields.get("tool_calls")
        if isinstance(calls, list):
            fields["tool_calls"] = [_call_without_nulls(item) for item in calls]
        elif calls is None and isinstance(call, Mapping):
            function = without_nulls(call)
            name = f"call_{function.get('name')}"
            fields["tool_calls"] = [{"id": name, "type": "function", "function": function}]
        if fields.get("role") == "function":
            fields |= {"role": "tool", "tool_call_id": f"call_{fields.get('name')}"}
        return fields


def _call_without_nulls(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    fields = without_nulls(call)
    function = fields.get("function")
    if isinstance(function, Mapping):
        fields["function"] = without_nulls(function)
    return fields


class ToolFunction(OpenFields):
    """A function that a model may call; further fields go to the chat template."""

    # formats of calls have names between marks of their own
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(OpenFields):
    """Of type `function`."""

    type: str = "function"
    function: ToolFunction

    @model_validator(mode="before")
    @classmethod
    def _with_type(cls, tool: Any) -> Any:
        # templates read it
        return {"type": "function"} | without_nulls(tool) if isinstance(tool, Mapping) else tool


_NAMED = {
    "type": "object",
    "required": ["name"],
    "properties": {"name": {"type": "string"}},
}
_NAMED_CHOICE = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {"type": {"const": "function"}, "function": _NAMED},
}
ToolChoice = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["none", "auto", "required", None]},
                _NAMED_CHOICE,
                {
                    "type": "object",
                    "required": ["type", "allowed_tools"],
                    "properties": {
                        "type": {"const": "allowed_tools"},
                        "allowed_tools": {
                            "type": "object",
                            "required": ["mode", "tools"],
                            "properties": {
                                "mode": {"enum": ["auto", "required"]},
                                "tools": {"type": "array", "minItems": 1, "items": _NAMED_CHOICE},
                            },
                        },
                    },
                },
            ]
        }
    ),
]
FunctionCall = Annotated[Any, WithJsonSchema({"anyOf": [{"enum": ["none", "auto", None]}, _NAMED]})]
