"""Anthropic's requests as bodies of chats, which then go the way of any chat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specc.server.errors import ApiError, bad_request
from specc.server.fields import UnknownFields, problem_error, whole
from specc.server.messages.conversation import Conversation
from specc.server.messages.shapes import check, check_field, missing, names, note, object_at

_CREATE, _COUNT = "message_create_params.MessageCreateParamsBase", "MessageCountTokensParams"
# of other versions of the API, and of chats: they mean the same there
_OF_CHATS = (
    "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "logit_bias", "bad_words",
    "rule", "speculative", "priority", "cache_salt", "chat_template",
    "chat_template_kwargs",
)  # fmt: skip
# what they ask for changes no answer of this server
_IGNORED = frozenset(
    (
        "cache_control", "diagnostics", "inference_geo", "metadata", "service_tier", "speed",
        "user_profile_id", "workspace_id",
    )
)  # fmt: skip
# field → what this server has not got
_MISSING = {"container": "containers", "mcp_servers": "servers of tools that it calls itself"}
# of what it says about earlier turns, what is left to the chat template here
_KEPT_BY_TEMPLATES = "clear_thinking_20251015"
_TOOL = {"name": "name", "description": "description", "input_schema": "parameters"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


@dataclass(frozen=True)
class MessagesBody:
    """What a request asks for.

    Args:
        chat: the body of a chat.
        hides_thinking: blocks of thinking have no text.
    """

    chat: dict[str, Any]
    hides_thinking: bool


def read_request(
    body: Mapping[str, Any], unknown: UnknownFields, is_count: bool = False
) -> MessagesBody:
    """Check a request, and say it as a chat's.

    Args:
        body: parsed.
        unknown: what becomes of fields that nobody knows.
        is_count: it asks for the length of its prompt alone.
    Raises:
        ApiError: it is malformed, or asks for something that this server has not got.
    """
    given = {name: value for name, value in body.items() if value is not None}
    kind = _COUNT if is_count else _CREATE
    _check_fields(given, kind, unknown)
    for name in ("model", "messages", *(() if is_count else ("max_tokens",))):
        if name not in given:
            raise missing(name)
    chat = {name: given[name] for name in _OF_CHATS if name in given}
    chat["model"] = given["model"]
    if not is_count:
        chat |= _of_answers(given)
    conversation = Conversation(unknown)
    conversation.add_system(given.get("system", ""))
    conversation.add_turns(given["messages"])
    chat["messages"] = conversation.messages
    if conversation.is_continued:
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    chat |= _tools(given, unknown)
    thinking = given.get("thinking") or {}
    chat |= _of_thinking(thinking, given.get("output_config") or {}, chat)
    return MessagesBody(chat, thinking.get("display") == "omitted")


def _check_fields(given: Mapping[str, Any], kind: str, unknown: UnknownFields) -> None:
    known = names(_CREATE)
    for name, value in given.items():
        if name in _MISSING:
            raise ApiError(
                400, f"This server has no {_MISSING[name]}. Please leave out {name!r}.",
                param=name, code="unsupported_parameter",
            )  # fmt: skip
        if name == "context_management":
            _check_edits(value)
        elif name == "stream":
            if not isinstance(value, bool):
                raise problem_error(name, {"type": "bool_type", "msg": "input should be a boolean"})
        elif name in names(kind):
            if name in ("messages", "system", "tools", "stop_sequences"):
                continue  # lists, of which each element is looked at
            if name == "thinking":
                value = _shown_thinking(object_at(value, name))
            check_field(kind, name, whole(value))
        elif name not in known and name not in _OF_CHATS and name not in _IGNORED:
            note(unknown, name)


def _shown_thinking(value: Mapping[str, Any]) -> dict[str, Any]:
    """What is said about thinking, checked but for the ways to show it, which become more."""
    if value.get("type") == "between_tools":
        raise bad_request(
            "thinking.type='between_tools'", "enabled, adaptive or disabled",
            "choose one of them", "thinking.type",
        )  # fmt: skip
    return {k: v for k, v in value.items() if k != "display" or not isinstance(v, str)}


def _check_edits(value: Any) -> None:
    """Edits of the conversation: thinking of earlier turns is what the chat template keeps."""
    edits = object_at(value, "context_management").get("edits", [])
    for edit in edits if isinstance(edits, list) else [edits]:
        kind = object_at(edit, "context_management.edits").get("type")
        if kind != _KEPT_BY_TEMPLATES:
            raise bad_request(
                f"context_management with the edit {kind!r}",
                f"none, or {_KEPT_BY_TEMPLATES}: this server takes conversations as they are",
                "leave it out",
                "context_management",
            )


def _of_answers(given: Mapping[str, Any]) -> dict[str, Any]:
    max_tokens, stop = whole(given["max_tokens"]), given.get("stop_sequences", [])
    if max_tokens < 1:
        raise bad_request(
            f"max_tokens={max_tokens}", "1 or more", "allow some tokens", "max_tokens"
        )
    if not isinstance(stop, list) or not all(isinstance(text, str) for text in stop):
        raise bad_request(
            "stop_sequences that are no list of strings", "one", "correct it", "stop_sequences"
        )
    return {"max_tokens": max_tokens, "stop": stop, "stream": given.get("stream", False)}


def _tools(given: Mapping[str, Any], unknown: UnknownFields) -> dict[str, Any]:
    """Tools, and the choice among them."""
    tools, chosen = given.get("tools", []), object_at(given.get("tool_choice", {}), "tool_choice")
    if not isinstance(tools, list):
        raise bad_request("tools that are no list", "a list of tools", "correct it", "tools")
    found: dict[str, Any] = {
        "tools": [_tool(tool, f"tools.{index}", unknown) for index, tool in enumerate(tools)]
    }
    if chosen.get("type") in ("any", "tool") and not tools:
        raise bad_request(
            f"tool_choice of type {chosen['type']!r} without tools", "tools to call", "pass tools",
            "tool_choice",
        )  # fmt: skip
    if chosen.get("type") == "tool":
        choice: Any = {"type": "function", "function": {"name": chosen["name"]}}
    else:
        choice = _CHOICES[chosen.get("type", "auto")]
    if tools:
        found["tool_choice"] = choice
    if chosen.get("disable_parallel_tool_use"):
        found["parallel_tool_calls"] = False
    return found if tools else {}


def _tool(tool: Any, place: str, unknown: UnknownFields) -> dict[str, Any]:
    fields = object_at(tool, place)
    kind = fields.get("type", "custom")
    if kind != "custom":
        raise bad_request(
            f"{place} of type {str(kind)[:80]!r}",
            "tools with an input_schema, which the client runs itself",
            "leave it out, or describe it with a schema",
            f"{place}.type",
        )
    check("ToolParam", fields, place, unknown)
    if fields.get("allowed_callers", ["direct"]) != ["direct"]:
        raise bad_request(
            f"{place} with allowed_callers", "tools that the model itself calls", "leave them out",
            place,
        )  # fmt: skip
    if "input_examples" in fields:
        note(unknown, "input_examples", place)
    function = {_TOOL[name]: value for name, value in fields.items() if name in _TOOL}
    return {"type": "function", "function": function}


def _of_thinking(
    thinking: Mapping[str, Any], output: Mapping[str, Any], chat: Mapping[str, Any]
) -> dict[str, Any]:
    """Variables of the chat template, and the form of outputs."""
    found: dict[str, Any] = {}
    if thinking:
        kwargs = {"enable_thinking": thinking["type"] != "disabled"}
        found["chat_template_kwargs"] = kwargs | (chat.get("chat_template_kwargs") or {})
    if (effort := output.get("effort")) is not None:
        found["reasoning_effort"] = effort
    if (form := output.get("format")) is not None:
        schema = {"name": "answer", "schema": form["schema"]}
        found["response_format"] = {"type": "json_schema", "json_schema": schema}
    return found
