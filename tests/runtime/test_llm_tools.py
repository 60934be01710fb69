"""`LLM.chat(tools=…)`: tools and calls as templates get them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from specc import LLM, AsyncLLM
from specc.errors import RequestError
from specc.runtime.requests.chat_messages import plain_messages
from specc.sampling.params import SamplingParams

USER = {"role": "user", "content": "hi"}
# as short as the tests' engine
TOOL = {"function": {"name": "add"}}
TEMPLATE = (
    "{% if tools is not none %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}{{ m.role }}"
    "{{ m.tool_calls[0].function.arguments.x if m.tool_calls is defined }}:{{ m.content }}\n"
    "{% endfor %}{{ extra }}"
)
TWO = SamplingParams(temperature=0, max_tokens=2)


@pytest.fixture
def template(tmp_path: Path) -> Path:
    file = tmp_path / "tools.jinja"
    file.write_text(TEMPLATE)
    return file


def called(arguments: Any) -> list[Any]:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return [USER, {"role": "assistant", "content": "a", "tool_calls": [call]}]


def test_tools_reach_the_template(tiny_engine: Path, template: Path) -> None:
    options: Any = {"chat_template": template}
    with LLM(tiny_engine) as llm:
        (output,) = llm.chat([USER], TWO, tools=[TOOL], **options)
        assert output.prompt == json.dumps([TOOL]) + "\nuser:hi\n"
        (same,) = llm.generate(output.prompt, TWO)
        assert output.outputs == same.outputs
        both = llm.chat(
            [[USER], called('{"x": 5}')], TWO, tools=(TOOL,), chat_template_kwargs={"extra": "!"},
            **options,
        )  # fmt: skip
        texts = ["user:hi\n!", "user:hi\nassistant5:a\n!"]
        assert [one.prompt for one in both] == [json.dumps([TOOL]) + f"\n{text}" for text in texts]
        # none are none
        for none in (None, []):
            assert llm.chat([USER], TWO, tools=none, **options)[0].prompt == "user:hi\n"
        # arguments are objects for templates, with tools or without
        for arguments in ('{"x": 5}', {"x": 5}):
            (output,) = llm.chat(called(arguments), TWO, **options)
            assert output.prompt == "user:hi\nassistant5:a\n"


def test_of_an_async_llm(tiny_engine: Path, template: Path) -> None:
    async def run() -> Any:
        async with AsyncLLM(tiny_engine) as llm:
            messages = called('{"x": 5}')
            outputs = llm.chat(messages, TWO, "a", tools=[TOOL], chat_template=template)
            return [output async for output in outputs][-1]

    prompt = asyncio.run(run()).prompt
    assert prompt == json.dumps([TOOL]) + "\nuser:hi\nassistant5:a\n"


@pytest.mark.parametrize(
    ("messages", "tools", "words"),
    [
        ([USER], TOOL, "a list of"),
        ([USER], ["add"], "a list of"),
        ([USER], "add", "a list of"),
        (
            [{"role": "assistant", "tool_calls": 5}],
            None,
            r"messages\.0\.tool_calls of another form",
        ),
    ],
)
def test_what_is_malformed(tiny_engine, template, messages: Any, tools: Any, words: str) -> None:
    with LLM(tiny_engine) as llm, pytest.raises(RequestError, match=words):
        llm.chat(messages, TWO, tools=tools, chat_template=template)


@pytest.mark.parametrize("arguments", ["{", '{"x": 5', "[]", "5", "", None, [], "[" * 100_000])
def test_arguments_that_are_no_object_are_none(arguments: Any) -> None:
    """A model's own, where max_tokens has cut it: refused, a conversation could never go on."""
    (_, message) = called(arguments)
    (plain,) = plain_messages([message])
    assert plain["tool_calls"][0]["function"] == {"name": "add", "arguments": {}}


def test_a_template_that_does_not_read_them(tiny_engine: Path, tmp_path: Path) -> None:
    file = tmp_path / "plain.jinja"
    file.write_text("{{ messages[0].content }}")
    with LLM(tiny_engine) as llm:
        with pytest.raises(RequestError, match="does not read them"):
            llm.chat([USER], TWO, tools=[TOOL], chat_template=file)
        with pytest.raises(RequestError, match="pass both to chat"):
            llm.generate("a", TWO, tools=[TOOL])


def test_a_message_is_left_as_it_is() -> None:
    """It is the caller's; and a field that is empty is none."""
    (_, message) = called('{"x": 5}')
    before = json.dumps(message)
    assert plain_messages([message])[0]["tool_calls"][0]["function"]["arguments"] == {"x": 5}
    assert json.dumps(message) == before
    assert plain_messages([{"role": "a", "tool_calls": []}]) == [{"role": "a"}]
