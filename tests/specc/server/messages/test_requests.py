"""Anthropic's requests as chats, and what is refused of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specc.server.errors import ApiError
from specc.server.fields import UnknownFields
from specc.server.messages.conversation import with_early_system
from specc.server.messages.request import read_request
from specc.server.protocol import ChatRequest, parse

USER = {"role": "user", "content": "hi"}
TOOL = {
    "name": "add",
    "description": "x + y",
    "input_schema": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
}


def text(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text} | more


def use(name: str = "add", call_id: str = "1", **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def result(content: Any = None, call_id: str = "1", **more: Any) -> dict[str, Any]:
    found = {"type": "tool_result", "tool_use_id": call_id} | more
    return found if content is None else found | {"content": content}


def chat(*turns: Any, is_strict: bool = True, **more: Any) -> dict[str, Any]:
    """The chat that a request becomes, which the chat's own fields admit."""
    body = {"model": "m", "max_tokens": 5, "messages": list(turns) or [USER]} | more
    unknown = UnknownFields(are_refused=is_strict)
    found = read_request(body, unknown).chat
    parse(ChatRequest, found, unknown)
    return found


def turns_of(*turns: Any, **more: Any) -> list[dict[str, Any]]:
    return chat(*turns, **more)["messages"]


def call(name: str = "add", call_id: str = "1", **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": call_id, "type": "function", "function": function}


def test_a_conversation_with_tools() -> None:
    """As an agent has it: instructions in blocks, several calls, answers beside a new text."""
    found = turns_of(
        {"role": "user", "content": [text("a", cache_control={"type": "ephemeral"}), text("b")]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            text("I "), text("add."), use(x=1), use("now", "2", é=["🙂"]),
        ]},
        {"role": "user", "content": [
            result("3"), result([text("4"), text("5")], "2", is_error=True), text("go on"),
        ]},
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": "thanks"},
        system=[text("x-anthropic-billing-header: cch=1;"), text("S"), text("T")],
    )  # fmt: skip
    assert found == [
        {"role": "system", "content": [text("S"), text("T")]},
        {"role": "user", "content": [text("a"), text("b")]},
        {"role": "assistant", "content": "I add.", "reasoning_content": "hm",
         "tool_calls": [call(x=1), call("now", "2", é=["🙂"])]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
        {"role": "tool", "tool_call_id": "2", "content": [text("4"), text("5")], "is_error": True},
        {"role": "user", "content": "go on"},
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": "thanks"},
    ]  # fmt: skip


def test_turns_of_one_role_are_one() -> None:
    assert turns_of(USER, {"role": "user", "content": [text("b")]}) == [
        {"role": "user", "content": [text("hi"), text("b")]}
    ]
    answers = [{"role": "assistant", "content": t} for t in ("a", [text("b"), use(x=1)])]
    found = turns_of(USER, *answers, {"role": "user", "content": [result()]})
    assert found[1:] == [
        {"role": "assistant", "content": "ab", "tool_calls": [call(x=1)]},
        {"role": "tool", "tool_call_id": "1", "content": ""},
    ]


def test_instructions() -> None:
    assert turns_of(USER, system="S")[0] == {"role": "system", "content": "S"}
    assert turns_of(USER, system="") == turns_of(USER, system=[]) == [USER]
    later = {"role": "system", "content": [text("T")]}
    turns = turns_of(USER, later, USER, system="S")
    assert turns[1:] == [USER, {"role": "system", "content": "T"}, USER]
    assert with_early_system(turns) == [
        turns[0], {"role": "user", "content": [text("hi"), text("T"), text("hi")]},
    ]  # fmt: skip
    answers = turns_of(USER, {"role": "assistant", "content": "a"}, later)
    assert with_early_system(answers) == [*answers[:2], {"role": "user", "content": "T"}]


def test_an_answer_that_was_begun_goes_on() -> None:
    found = chat(USER, {"role": "assistant", "content": "The"})
    assert found["messages"][-1] == {"role": "assistant", "content": "The"}
    assert (found["continue_final_message"], found["add_generation_prompt"]) == (True, False)
    assert "continue_final_message" not in chat(USER)


@pytest.mark.parametrize(
    ("choice", "want"),
    [
        (None, {"tool_choice": "auto"}),
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "add"},
         {"tool_choice": {"type": "function", "function": {"name": "add"}}}),
        ({"type": "any", "disable_parallel_tool_use": True},
         {"tool_choice": "required", "parallel_tool_calls": False}),
        ({"type": "auto", "disable_parallel_tool_use": False}, {"tool_choice": "auto"}),
        ({"type": "any", "disable_parallel_tool_use": None}, {"tool_choice": "required"}),
    ],
)  # fmt: skip
def test_tools_and_the_choice_among_them(choice: Any, want: dict[str, Any]) -> None:
    more = {} if choice is None else {"tool_choice": choice}
    found = chat(tools=[TOOL | {"cache_control": None, "type": "custom"}], **more)
    function = {
        "name": "add", "description": "x + y", "parameters": TOOL["input_schema"],
    }  # fmt: skip
    assert found["tools"] == [{"type": "function", "function": function}]
    names = ("tool_choice", "parallel_tool_calls")
    assert {name: found[name] for name in names if name in found} == want


def test_tools_that_a_search_has_found() -> None:
    """As Claude Code has it: those that a request has are all there, and an answer names some."""
    reference = {"type": "tool_reference", "tool_name": "add"}
    found = chat(
        USER,
        {"role": "assistant", "content": [use("search")]},
        {"role": "user", "content": [result([text("found"), reference])]},
        tools=[TOOL | {"defer_loading": True}],
    )
    assert [tool["function"]["name"] for tool in found["tools"]] == ["add"]
    assert found["messages"][-1]["content"] == [text("found"), text("add")]
    with pytest.raises(ApiError, match="'tool_reference'"):
        chat({"role": "user", "content": [reference]})


def test_what_a_chat_has_by_another_name() -> None:
    found = chat(
        max_tokens=7.0, stop_sequences=["a"], stream=True, temperature=0.5, top_k=3,
        metadata={"user_id": "u"}, service_tier="auto", speed=None,
        thinking={"type": "enabled", "budget_tokens": 1024}, output_config={"effort": "low"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    )  # fmt: skip
    assert found == {
        "model": "m", "max_tokens": 7, "stop": ["a"], "stream": True, "temperature": 0.5,
        "top_k": 3, "chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "low",
        "messages": [USER],
    }  # fmt: skip
    # Claude Code's `updates` is newer than the package
    thinks: list[dict[str, Any]] = [
        *({"type": "adaptive", "display": display} for display in ("omitted", "updates")),
        {"type": "disabled"},
    ]
    assert [chat(thinking=t)["chat_template_kwargs"]["enable_thinking"] for t in thinks] == [
        True, True, False,
    ]  # fmt: skip
    schema = {"type": "object"}
    found = chat(output_config={"format": {"type": "json_schema", "schema": schema}})
    assert found["response_format"]["json_schema"]["schema"] == schema


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"max_tokens": None}, "'max_tokens'"),
        ({"max_tokens": "5"}, "'max_tokens'"),
        ({"max_tokens": True}, "'max_tokens'"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_tokens": -1}, "max_tokens=-1"),
        ({"model": None}, "'model'"),
        ({"model": 5}, "'model'"),
        ({"messages": []}, "messages"),
        ({"messages": {}}, "messages"),
        ({"messages": ["a"]}, "messages.0"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "content.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": ["text"]}]}]}, "content.0"),
        ({"messages": [{"role": "user", "content": [text(5)]}]}, "content.0.text"),  # type: ignore[arg-type]
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "'document'"),
        ({"messages": [{"role": "user", "content": [use()]}]}, "'tool_use'"),
        ({"messages": [{"role": "user", "content": [result("a")]}]}, "tool_use_id='1'"),
        ({"messages": [USER, {"role": "assistant", "content": [use()]}]}, "no answers"),
        ({"messages": [{"role": "user", "content": [text("a", citations=[{}])]}]}, "citations"),
        ({"messages": [{"role": "assistant", "content": [
            {"type": "redacted_thinking", "data": "a"}]}]}, "'redacted_thinking'"),
        ({"messages": [{"role": "assistant", "content": [use() | {"input": "{}"}]}]}, ".input"),
        ({"system": [{"type": "image"}]}, "system.0"),
        ({"system": 5}, "system"),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"stop_sequences": [5]}, "stop_sequences"),
        ({"stream": "yes"}, "'stream'"),
        ({"container": "a"}, "containers"),
        ({"mcp_servers": []}, "servers of tools"),
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "compact"),
        ({"thinking": {"type": "between_tools"}}, "between_tools"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "x"}}, "thinking.type"),
        ({"thinking": {"type": "adaptive", "display": 5}}, "thinking.display"),
        ({"thinking": "on"}, "thinking"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"metadata": {"user_id": 5}}, "metadata.user_id"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "without tools"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"name": "a"}]}, "tools.0.input_schema"),
        ({"tools": [{"name": "a", "input_schema": []}]}, "tools.0.input_schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "web_search_20250305"),
        ({"tools": [TOOL | {"allowed_callers": ["code_execution_20260120"]}]}, "allowed_callers"),
        ({"tools": [TOOL | {"name": "a b"}]}, "tools.0"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(more: dict[str, Any], word: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(is_strict=False, **{name: value for name, value in more.items()})
    assert caught.value.status == 400
    assert word in caught.value.message.lower() or word in caught.value.message


def test_unknown_fields() -> None:
    """Left out and logged, or refused: of the request, of a block, of a tool."""
    places: tuple[dict[str, Any], ...] = (
        {"x_other": 1},
        {"messages": [{"role": "user", "content": [text("hi", x_other=1)]}]},
        {"tools": [TOOL | {"x_other": 1}]},
    )
    for more in places:
        turns = more.get("messages", [])
        rest = {name: value for name, value in more.items() if name != "messages"}
        assert chat(*turns, is_strict=False, **rest)["messages"] == [USER]
        with pytest.raises(ApiError, match="x_other"):
            chat(*turns, **rest)


def test_a_count_needs_no_limit() -> None:
    body = {"model": "m", "messages": [USER]}
    assert read_request(body, UnknownFields(), is_count=True).chat == {
        "model": "m", "messages": [USER],
    }  # fmt: skip
