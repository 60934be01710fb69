"""What of a chat reaches its template, and what its client is told when the template refuses."""

from __future__ import annotations

from typing import Any

import pytest

from specc.errors import ConfigError
from specc.runtime.requests.chat_template import ChatTemplate
from specc.server.endpoints import render
from specc.server.errors import ApiError
from specc.server.protocol import ChatRequest

USER = {"role": "user", "content": "a"}


def rendered(
    source: str, *messages: dict[str, Any], defaults: dict[str, Any] | None = None, **more: Any
) -> str:
    wanted = ChatRequest.model_validate({"messages": list(messages), **more})
    return render(ChatTemplate(source, {}, defaults=defaults), wanted)


def test_the_fields_of_a_message() -> None:
    call = {"role": "assistant", "name": "ü"}
    source = "{{ messages[0] | tojson }}"
    # no content, as the client has sent none; templates ask for it
    for more in ({}, {"content": None, "refusal": None, "function_call": None}):
        assert rendered(source, call | more) == '{"role": "assistant", "name": "ü"}'
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "more": 1}]
    assert '"a\\nb"' in rendered(source, {"role": "user", "content": parts})


def test_null_is_absent() -> None:
    """What clients send back of an answer that calls: a template sees no content, and no null."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None,
              "audio": None, "function_call": None, "annotations": None}  # fmt: skip
    said = rendered("{{ messages[1] | tojson }}", USER, answer)
    assert said == '{"role": "assistant", "tool_calls": [{"id": "a", "type": "function",' + (
        ' "function": {"name": "f", "arguments": {}}}]}'
    )
    result = {"role": "tool", "tool_call_id": "a", "content": "1"}
    defined = "{% for m in messages %}{% if m.content is defined %}{{ m.content }}{% endif %}|"
    assert rendered(defined + "{% endfor %}", USER, answer, result) == "a||1|"
    assert rendered("{% for m in messages %}{{ 'x' in m.content }}{% endfor %}", answer) == "False"
    # a template that wants one gets an empty one
    assert rendered("{% for m in messages %}{{ m.role + m.content }}|{% endfor %}", answer) == (
        "assistant|"
    )


def test_the_effort() -> None:
    source = "{{ reasoning_effort | default('medium') }}{{ enable_thinking | default('') }}"
    assert rendered(source, USER) == rendered(source, USER, reasoning_effort=None) == "medium"
    assert rendered(source, USER, reasoning_effort="high") == "highTrue"
    # as with vLLM
    assert rendered(source, USER, reasoning_effort="none") == "noneFalse"
    kwargs = {"reasoning_effort": "low", "enable_thinking": 5}
    wins = rendered(source, USER, reasoning_effort="high", chat_template_kwargs=kwargs)
    assert wins == "low5"


def test_defaults_of_the_server() -> None:
    """They hold where a chat says nothing, or null, as with vLLM."""
    source = "{{ enable_thinking }}{{ reasoning_effort }}{{ messages[0].content }}{{ documents }}"
    defaults = {"enable_thinking": False, "reasoning_effort": "low", "documents": 3}
    assert rendered(source, USER, defaults=defaults) == "Falselowa3"
    for null in ({"reasoning_effort": None}, {"chat_template_kwargs": {"enable_thinking": None}}):
        assert rendered(source, USER, defaults=defaults, **null) == "Falselowa3"
    assert rendered(source, USER, defaults=defaults, reasoning_effort="high") == "Truehigha3"
    kwargs = {"enable_thinking": 0, "reasoning_effort": ""}
    assert rendered(source, USER, defaults=defaults, chat_template_kwargs=kwargs) == "0a3"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert rendered("{{ tools | length }}", USER, defaults={"tools": []}, tools=tools) == "1"
    for name in ("messages", "add_generation_prompt", "chat_template"):
        with pytest.raises(ConfigError, match=f"{name} among"):
            ChatTemplate(source, {}, defaults={name: ""})


def test_thinking_of_earlier_messages() -> None:
    source = "{% for m in messages %}{{ m.thinking }}{{ m.reasoning_content }}{{ m.reasoning }}|"
    for name in ("thinking", "reasoning_content", "reasoning"):
        message = {"role": "assistant", "content": "x", name: "so"}
        assert rendered(source + "{% endfor %}", message) == "sososo|"


def test_a_prompt_that_ends_within_the_last_message() -> None:
    source = "{% for m in messages %}<{{ m.content }}>{% endfor %}{{ add_generation_prompt }}"
    answer = {"role": "assistant", "content": "It is"}
    assert rendered(source, USER, answer, continue_final_message=True) == "<a><It is"
    more = {"continue_final_message": True, "add_generation_prompt": False}
    assert rendered(source, USER, answer, **more) == "<a><It is"
    assert rendered(source, USER, answer, continue_final_message=False) == "<a><It is>True"
    for messages, more, param in (
        ([USER, answer], {"add_generation_prompt": True}, "continue_final_message"),
        ([answer | {"content": None}], {}, "continue_final_message"),
    ):
        with pytest.raises(ApiError) as caught:
            rendered(source, *messages, continue_final_message=True, **more)
        assert (caught.value.status, caught.value.param) == (400, param)


def test_what_the_request_says() -> None:
    source = "{{ add_generation_prompt }}{{ thinking }}"
    assert rendered(source, USER, chat_template_kwargs={"thinking": 1}) == "True1"
    assert rendered(source, USER, add_generation_prompt=False) == "False"


@pytest.mark.parametrize(
    ("source", "content", "param", "words"),
    [
        ("a", [{"type": "image_url"}], "messages.1.content", "image_url"),
        ("{{ raise_exception('no') }}", "a", "messages", "refuses: no"),
        ("{{ raise_exception('a=b') }}", "a", "messages", "refuses: a=b"),
        ("{{ 1 / 0 }}", "a", "messages", "fails on"),
    ],
)
def test_whose_fault_it_is(source: str, content: Any, param: str, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        rendered(source, USER, {"role": "user", "content": content})
    assert caught.value.status == 400
    assert caught.value.param == param
    assert words in caught.value.message
