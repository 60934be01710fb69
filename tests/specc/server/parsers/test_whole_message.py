"""`specc.read_message`: outputs of `LLM.chat(tools=…)`, read as the server reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specc import read_message
from specc.errors import ConfigError, RequestError
from specc.runtime.requests.chat_messages import plain_messages
from specc.server.parsers.whole_message import Message

TOOLS: Any = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "now"}},
]
ADD = '<tool_call>{"name": "add", "arguments": {"x": 5}}</tool_call>'


def test_calls_and_what_stands_beside_them() -> None:
    text = f'Let me see.{ADD}\n<tool_call>{{"name": "now", "arguments": {{}}}}</tool_call>'
    found = read_message(text, TOOLS, tool_call_parser="hermes")
    assert (found.content, found.reasoning, found.is_whole) == ("Let me see.", None, True)
    calls = [(call.function.name, call.function.arguments) for call in found.tool_calls]
    assert calls == [("add", '{"x": 5}'), ("now", "{}")]
    first, second = (call.id for call in found.tool_calls)
    assert first.startswith("call_")
    assert first != second


def test_the_message_goes_back_into_a_conversation() -> None:
    found = read_message(ADD, TOOLS, tool_call_parser="hermes")
    fields = json.loads(json.dumps(found.to_json()))
    (call,) = found.tool_calls
    assert fields == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": "add", "arguments": '{"x": 5}'},
            }
        ],
    }
    assert plain_messages([fields])[0]["tool_calls"][0]["function"]["arguments"] == {"x": 5}
    assert read_message("a").to_json() == {"role": "assistant", "content": "a"}


def test_thinking_that_the_prompt_has_begun() -> None:
    def read(prompt: str) -> Message:
        options = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
        return read_message(f"hm</think>{ADD}", TOOLS, prompt=prompt, **options)

    found = read("user: hi\n<think>\n")
    assert (found.reasoning, found.content, len(found.tool_calls)) == ("hm", None, 1)
    assert read("user: hi\n").reasoning is None


def test_a_form_of_thinking_and_calls_in_one() -> None:
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary"
        " to=functions.add<|message|>{}<|call|>"
    )
    found = read_message(text, TOOLS, tool_call_parser="openai")
    assert (found.reasoning, found.content) == ("hm", None)
    assert [call.function.name for call in found.tool_calls] == ["add"]


def test_calls_of_kimi_k3_in_the_middle() -> None:
    """Of an answer that nothing has closed, and of thinking that nothing has closed."""
    end = "<|close|>tools<|sep|><|close|>message<|sep|>"
    call = '<|open|>tools<|sep|><|open|>call tool="now" index="1"<|sep|><|close|>call<|sep|>'
    for text, prompt, reasoning, content in (
        (f"<|open|>response<|sep|>a{call}", None, None, "a"),
        (f"a{call}", "user: hi<|open|>think<|sep|>", "a", None),
        (f"a{call}{end}", "<|open|>response<|sep|>", None, "a"),
    ):
        found = read_message(text, TOOLS, tool_call_parser="kimi_k3", prompt=prompt)
        assert (found.reasoning, found.content) == (reasoning, content)
        assert [one.function.name for one in found.tool_calls] == ["now"]


def test_an_output_that_was_cut() -> None:
    found = read_message(ADD[:46], TOOLS, tool_call_parser="hermes")
    assert not found.is_whole
    assert found.tool_calls[0].function.arguments == '{"x": '


@pytest.mark.parametrize("tools", [None, [], TOOLS[1:]])
def test_what_is_no_call_is_content(tools: Any) -> None:
    found = read_message(ADD, tools, tool_call_parser="hermes")
    assert found == Message(ADD)
    assert read_message("", tools, tool_call_parser="hermes") == Message("")


def test_ids_are_those_of_the_format() -> None:
    text = '[TOOL_CALLS][{"name": "add", "arguments": {}}]'
    (call,) = read_message(text, TOOLS, tool_call_parser="mistral").tool_calls
    assert len(call.id) == 9


@pytest.mark.parametrize(
    ("tools", "options", "error", "words"),
    [
        (TOOLS, {}, RequestError, "tools without tool_call_parser"),
        (TOOLS, {"tool_call_parser": "hermess"}, ConfigError, "tool_call_parser='hermess'"),
        (None, {"reasoning_parser": "r1"}, ConfigError, "reasoning_parser='r1'"),
        (
            TOOLS,
            {"tool_call_parser": "openai", "reasoning_parser": "qwen3"},
            ConfigError,
            "parts of one form",
        ),
        (TOOLS[0], {"tool_call_parser": "hermes"}, RequestError, "tools= of another form"),
        ("add", {"tool_call_parser": "hermes"}, RequestError, "tools= of another form"),
        ([{"name": "add"}], {"tool_call_parser": "hermes"}, RequestError, "of another form"),
        (TOOLS + TOOLS, {"tool_call_parser": "hermes"}, RequestError, "each name once"),
        (5, {"tool_call_parser": "hermes"}, RequestError, "tools= of another form"),
        (
            [{"type": "function", "function": {"name": "add", "parameters": 5}}],
            {"tool_call_parser": "qwen3_coder"},
            RequestError,
            "tools= of another form",
        ),
        (
            [{"type": "retrieval", "function": {"name": "add"}}],
            {"tool_call_parser": "hermes"},
            RequestError,
            "tools= of another form",
        ),
    ],
)
def test_what_is_refused(tools: Any, options: Any, error: Any, words: str) -> None:
    with pytest.raises(error) as caught:
        read_message("a", tools, **options)
    assert words in f"{caught.value.found} {caught.value.needed}"
    assert caught.value.do


def test_an_output_to_token_ids_has_no_prompt() -> None:
    said = read_message("hm</think>a", reasoning_parser="deepseek_r1", prompt=None)
    assert (said.content, said.reasoning) == ("a", "hm")


def test_a_call_that_is_cut_before_its_arguments_is_content() -> None:
    cut = '<tool_call>{"name": "add", "argu'
    said = read_message(cut, TOOLS, tool_call_parser="hermes")
    assert (said.content, said.tool_calls, said.is_whole) == (cut, (), True)
