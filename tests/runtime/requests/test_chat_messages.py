"""What of a message its template sees."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from specc.errors import RequestError
from specc.runtime.requests.chat_messages import plain_messages
from specc.runtime.requests.chat_template import ChatTemplate
from tests.template_matrix import transformers_tokenizer

CALL = {"id": None, "type": "function", "function": {"name": "f", "arguments": {}}}


def test_null_is_absent() -> None:
    """`None` in a prompt, or an error of the template's, comes of what clients send back."""
    message = {
        "role": "assistant", "content": None, "name": None, "refusal": None, "reasoning": None,
        "audio": None, "function_call": None, "more": 0, "tool_calls": [CALL],
    }  # fmt: skip
    (plain,) = plain_messages([message])
    assert plain == {"role": "assistant", "more": 0, "tool_calls": [CALL]}
    assert plain_messages([{"role": "a", "content": "", "tool_calls": None}]) == [
        {"role": "a", "content": ""}
    ]


@pytest.mark.parametrize("given", ["reasoning", "reasoning_content", "thinking"])
def test_thinking_goes_by_every_name(given: str) -> None:
    (plain,) = plain_messages([{"role": "assistant", "content": "x", given: "so"}])
    assert plain == {"role": "assistant", "content": "x"} | dict.fromkeys(
        ("reasoning", "reasoning_content", "thinking"), "so"
    )


@pytest.mark.parametrize(
    "given",
    [
        {"reasoning": "a", "thinking": "b"},
        {"reasoning": "a", "thinking": "b", "reasoning_content": "c"},
        {"reasoning": "a", "thinking": None, "reasoning_content": None},
        {"reasoning_content": "", "thinking": "b"},
    ],
)
def test_of_several_transformers_chooses(given: dict[str, Any]) -> None:
    source = "{% for m in messages %}{{ m.thinking }}|{{ m.reasoning_content }}{% endfor %}"
    messages = [{"role": "assistant", "content": "x"} | given]
    want = transformers_tokenizer().apply_chat_template(
        messages, chat_template=source, tokenize=False
    )
    with contextlib.closing(ChatTemplate(source, {})) as template:
        assert template.render(messages) == want


def test_kinds_of_parts_that_are_text() -> None:
    parts = [
        "a",
        {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}},
        {"type": "input_text", "text": "c"},
        {"type": "output_text", "text": "d", "annotations": []},
        {"type": "refusal", "refusal": "e"},
        {"type": "thinking", "thinking": "f"},
    ]
    (plain,) = plain_messages([{"role": "user", "content": parts}])
    assert [part["text"] for part in plain["content"]] == list("abcdef")
    assert {part["type"] for part in plain["content"]} == {"text"}
    assert plain["content"][1] == parts[1]
    for bad in (
        {"type": "refusal", "text": "a"},
        {"type": "image_url", "text": "a"},
        {"text": "a"},
    ):
        with pytest.raises(RequestError, match=r"messages\.0\.content="):
            plain_messages([{"role": "user", "content": [bad]}])
