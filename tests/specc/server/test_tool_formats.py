"""Formats whose markers are special tokens, over HTTP, with steps of 1 to 8 tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from specc.errors import ConfigError
from specc.runtime.requests.chat_template import ChatTemplate
from specc.server.config import ServeConfig
from specc.server.message_reader import MessageReader
from specc.server.parsers.formats import CALL_FORMATS
from specc.server.protocol import ChatRequest
from specc.server.tool_counts import ToolCounts
from specc.server.tools import ToolUse
from tests.specc.server.scripted import TEMPLATE, Script, serve_scripted
from tests.specc.server.serving import MODEL, Server

USER = {"role": "user", "content": "hi"}
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("add", "now")]
HARMONY = (
    "<|channel|>analysis<|message|>add, 🙂<|end|><|start|>assistant<|channel|>commentary<|message|>"
    "I add.<|end|><|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json"
    '<|message|>{"x": 1}'
)
SECTION = (
    "I add.<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
    '<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|><|tool_calls_section_end|>'
)
GEMMA = (
    "<|channel>thought\nadd, 🙂<channel|>I add.<|tool_call>call:add"
    '{x:1,s:<|"|>🙂}<|"|>}<tool_call|>'
)
ACTION = '[\n    {"tool_call_id": "0", "tool_name": "add", "parameters": {"x": 1}}\n]'
COHERE = (
    "<|START_THINKING|>add, 🙂<|END_THINKING|><|START_RESPONSE|>I add.<|END_RESPONSE|>"
    f"<|START_ACTION|>{ACTION}<|END_ACTION|>"
)
K3_TOOLS = (
    '<|open|>tools<|sep|><|open|>call tool="add" index="1"<|sep|><|open|>argument key="x"'
    ' type="number"<|sep|>1<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
)
CHANNELS = (
    "<|open|>think<|sep|>add, 🙂<|close|>think<|sep|><|open|>response<|sep|>I add."
    f"<|close|>response<|sep|>{K3_TOOLS}<|close|>message<|sep|>"
)
# by the parser of calls: that of thinking, and what the model says
OUTPUTS = {
    "openai": (None, HARMONY),
    "kimi_k2": (None, SECTION),
    "kimi_k3": (None, CHANNELS),
    "gemma4": ("gemma4", GEMMA),
    "cohere_command3": ("cohere_command3", COHERE),
}
IDS = {"kimi_k2": "functions.add:0", "cohere_command3": "0"}


@pytest.fixture(scope="module", params=OUTPUTS)
def rig(request) -> Iterator[tuple[Server, Script, str]]:
    thinks, _ = OUTPUTS[request.param]
    options = {"tool_call_parser": request.param, "enable_auto_tool_choice": True}
    options |= {"reasoning_parser": thinks} if thinks else {}
    with serve_scripted(**options) as made:
        yield *made, request.param


def say(script: Script, text: str, whole: bool, tools: Any = TOOLS) -> None:
    prompt = ChatTemplate(TEMPLATE, {}).render([USER], options={"tools": tools})
    script.set(text, prompt, whole)


@pytest.mark.default("openai-True", "gemma4-True")
@pytest.mark.parametrize("whole", [True, False])
def test_a_message_and_its_stream(rig, whole: bool) -> None:
    """Marks that are special tokens, and marks of many tokens, which steps cut anywhere."""
    server, script, name = rig
    options: Any = {"model": MODEL, "messages": [USER], "temperature": 0, "tools": TOOLS}
    say(script, OUTPUTS[name][1], whole)
    choice = server.client.chat.completions.create(**options).choices[0]
    with server.client.chat.completions.stream(**options) as stream:
        final = stream.get_final_completion().choices[0]
    for one in (choice, final):
        assert (one.message.content, one.finish_reason) == ("I add.", "tool_calls")
        (call,) = one.message.tool_calls
        arguments = '{"x": 1, "s": "🙂}"}' if name == "gemma4" else '{"x": 1}'
        assert (call.function.name, call.function.arguments) == ("add", arguments)
        assert call.id == IDS[name] if name in IDS else call.id.startswith("call_")
    if name != "kimi_k2":
        assert choice.message.reasoning == "add, 🙂"


@pytest.mark.parametrize("name", IDS)
def test_an_id_that_the_conversation_has(name: str) -> None:
    """Models that give ids may give that of an earlier turn: its answer would be taken for ours."""
    function = {"name": "add", "arguments": "{}"}
    calls = [{"id": IDS[name], "type": "function", "function": function}, "no call", {}]
    for tool_calls, is_own in (([], True), (calls, False), ("no list", True)):
        earlier = [USER, {"role": "assistant", "content": "", "tool_calls": tool_calls}]
        wanted = ChatRequest.model_validate({"model": MODEL, "messages": earlier})
        use = ToolUse({"add": {}}, CALL_FORMATS[name], None)
        parser = MessageReader(ServeConfig((MODEL,)), wanted, "", use, ToolCounts()).parser()
        (call,) = parser.feed(OUTPUTS[name][1], is_last=True).calls
        assert call.name == "add"
        assert call.id is not None
        if is_own:
            assert call.id == IDS[name]
        elif name == "kimi_k2":
            # its template has such ids alone
            assert call.id == "functions.add:1"
        else:
            assert call.id.startswith("call_")


@pytest.mark.default("gemma4")
def test_without_tools_a_call_is_content(rig) -> None:
    """Of marks, those that are special tokens and that nothing looks for stay out of it."""
    server, script, name = rig
    say(script, OUTPUTS[name][1], whole=name != "kimi_k2", tools=[])
    choice = server.client.chat.completions.create(
        model=MODEL, messages=[USER], temperature=0
    ).choices[0]
    assert choice.finish_reason == "stop"
    if name == "openai":
        assert choice.message.reasoning == "add, 🙂"
        head = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
        assert choice.message.content == f'I add.\n{head}{{"x": 1}}'
    elif name == "kimi_k2":
        assert choice.message.content == SECTION
    elif name == "kimi_k3":
        assert choice.message.reasoning == "add, 🙂"
        assert choice.message.content == f"I add.{K3_TOOLS}"
    else:
        assert choice.message.reasoning == "add, 🙂"
        call = "call:add{x:1,s:🙂}}" if name == "gemma4" else ACTION
        assert choice.message.content == f"I add.{call}"


@pytest.mark.default("kimi_k3-choice1", "gemma4-required")
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_call_that_is_required(rig, choice: Any) -> None:
    """JSON of the tools' schemas, as with any format: no marks, whatever the model says."""
    server, script, _ = rig
    say(script, '[{"name": "now", "parameters": {}}]', whole=True)
    answer = server.client.chat.completions.create(
        model=MODEL, messages=[USER], temperature=0, tools=TOOLS, tool_choice=choice  # type: ignore[arg-type]
    )  # fmt: skip
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == ("now" if choice == "required" else "add")
    assert call.function.arguments == "{}"


@pytest.mark.parametrize(("calls", "thinks"), [("openai", "openai_gptoss"), ("kimi_k3", "kimi_k3")])
def test_both_are_one_form(calls: str, thinks: str) -> None:
    assert ServeConfig(tool_call_parser=calls).reasoning_parser == thinks
    assert ServeConfig(reasoning_parser=thinks).tool_call_parser is None
    for options in (
        {"tool_call_parser": calls, "reasoning_parser": "qwen3"},
        {"tool_call_parser": "hermes", "reasoning_parser": thinks},
    ):
        with pytest.raises(ConfigError, match="parts of one form"):
            ServeConfig(**options)
