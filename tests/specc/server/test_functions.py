"""Calls as clients asked for them before there were tools, and tools of which some are allowed."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from specc.runtime.requests.chat_template import ChatTemplate
from tests.specc.server.scripted import TEMPLATE, Script, serve_scripted
from tests.specc.server.serving import MODEL, Server, assert_error
from tests.specc.server.test_tools import ADD, ARGUMENTS, CALL, CHATS, NOW, USER, say


@pytest.fixture(scope="module")
def rig() -> Iterator[tuple[Server, Script]]:
    with serve_scripted(enable_auto_tool_choice=True, tool_call_parser="hermes") as made:
        yield made


FUNCTIONS = [ADD["function"], NOW["function"]]


@pytest.mark.slow
def test_functions_are_what_tools_were(rig) -> None:
    """One call, as `function_call`, whole and in a stream; a plain answer is as ever."""
    server, script = rig
    options = {"model": MODEL, "messages": [USER], "temperature": 0, "functions": FUNCTIONS}
    say(script, f"I see {CALL}{CALL}")
    (choice,) = server.client.chat.completions.create(**options).choices
    message = choice.message
    assert (choice.finish_reason, message.content, message.tool_calls) == (
        "function_call", "I see ", None
    )  # fmt: skip
    assert (message.function_call.name, message.function_call.arguments) == ("add", ARGUMENTS)
    chunks = [c.choices[0] for c in server.client.chat.completions.create(**options, stream=True)]
    calls = [c.delta.function_call for c in chunks if c.delta.function_call]
    assert [call.name for call in calls] == ["add"] + [None] * (len(calls) - 1)
    assert "".join(call.arguments for call in calls) == ARGUMENTS
    assert [c.finish_reason for c in chunks if c.finish_reason] == ["function_call"]
    assert not any(c.delta.tool_calls for c in chunks)
    say(script, "no")
    for call in (None, "auto", "none"):
        more = {} if call is None else {"function_call": call}
        (choice,) = server.client.chat.completions.create(**options, **more).choices
        assert (choice.message.content, choice.finish_reason) == ("no", "stop")
    # both names that say the same are the newer one
    say(script, CALL)
    (choice,) = server.client.chat.completions.create(**options, tools=[ADD, NOW]).choices
    assert choice.message.tool_calls[0].function.name == "add"
    body = options | {"tools": [ADD]}
    assert_error(server.post(CHATS, body), 400, "and tools that", param="functions")
    body = options | {"function_call": "none", "tool_choice": "auto"}
    assert_error(server.post(CHATS, body), 400, "tool_choice", param="function_call")


def test_the_template_gets_old_calls_as_calls(rig) -> None:
    server, script = rig
    old = [
        USER,
        {"role": "assistant", "content": None,
         "function_call": {"name": "add", "arguments": ARGUMENTS}},
        {"role": "function", "name": "add", "content": "3"},
    ]  # fmt: skip
    call = {"id": "call_add", "type": "function",
            "function": {"name": "add", "arguments": json.loads(ARGUMENTS)}}  # fmt: skip
    want = [
        USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "3", "tool_call_id": "call_add"},
    ]
    script.set("yes", ChatTemplate(TEMPLATE, {}).render(want))
    answer = server.post(CHATS, {"messages": old, "temperature": 0}).json()
    assert answer["choices"][0]["message"]["content"] == "yes"


def test_allowed_tools_are_those_that_are_called(rig) -> None:
    """The template gets all of them; what else the model calls is content."""
    server, script = rig
    body = {"messages": [USER], "temperature": 0, "tools": [ADD, NOW]}
    add, now = ({"type": "function", "function": {"name": name}} for name in ("add", "now"))
    script.set(CALL, ChatTemplate(TEMPLATE, {}).render([USER], options={"tools": [ADD, NOW]}))
    for allowed, is_call in (([add], True), ([add, now], True), ([now], False)):
        nested = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": allowed}}
        plain = [{"type": "function", **tool["function"]} for tool in allowed]
        flat = {"type": "allowed_tools", "mode": "auto", "tools": plain}
        for choice in (nested, flat):
            answer = server.post(CHATS, body | {"tool_choice": choice}).json()
            (found,) = answer["choices"]
            assert ("tool_calls" in found["message"]) is is_call
            assert found["finish_reason"] == ("tool_calls" if is_call else "stop")
    for allowed in (
        {"mode": "auto", "tools": []},
        {"mode": "none", "tools": [add]},
        {"mode": "auto", "tools": [{"type": "function", "function": {"name": "sub"}}]},
        {"mode": "auto", "tools": [5]},
        {"mode": "auto"},
        5,
    ):
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        assert_error(server.post(CHATS, body | {"tool_choice": choice}), 400, param="tool_choice")
