"""Messages over HTTP, with Anthropic's client and steps of 1 to 8 tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from specc.runtime.requests.chat_template import ChatTemplate
from tests.specc.server.messages.events import check_order, events_of
from tests.specc.server.scripted import AGENT, TEMPLATE, Script, serve_scripted
from tests.specc.server.serving import MODEL, Server, assert_error
from tests.specc.server.test_tools import ADD, ARGUMENTS, CALL, OTHER, TEXT, USER

PATH = "/v1/messages"
TOOL = {
    "name": "add",
    "description": "x + y",
    "input_schema": ADD["function"]["parameters"],  # type: ignore[index]
}
# all that a template may read of a conversation, in few bytes
SHORT = (
    "{% for t in tools %}{{ t.function.name }}{% endfor %}{% for m in messages %}[{{ m.role }}]"
    "{{ m.reasoning_content }}|{{ m.content }}|{% for c in m.tool_calls %}{{ c.id }}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{{ m.tool_call_id }}"
    "{% endfor %}>"
)


STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and loop.index0 %}"
    "{{ raise_exception('no system there') }}{% endif %}{{ m | tojson }}{% endfor %}>"
)


def client(server: Server, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        **({"base_url": server.base, "api_key": "key", "max_retries": 0} | options)
    )


def say(
    script: Script,
    text: str,
    *messages: dict[str, Any],
    tools: Any = (ADD,),
    whole: bool = True,
    source: str = TEMPLATE,
) -> int:
    """What the model answers to a chat of OpenAI's form; returns the tokens of its prompt."""
    template = ChatTemplate(source, {})
    variables = {"tools": list(tools)} if tools else {}
    prompt = template.render(list(messages) or [USER], options=variables)
    script.set(text, prompt, whole)
    return script._begin


def plain(message: Any) -> dict[str, Any]:
    """Without what is another one each time, or depends on earlier requests."""
    found = message.to_dict(mode="json")
    ids = [block.pop("id", None) for block in found["content"]]
    assert len({one for one in ids if one}) == sum(one is not None for one in ids)
    usage = found["usage"]
    usage["input_tokens"] += usage.pop("cache_read_input_tokens")
    return {name: value for name, value in found.items() if name != "id"}


@pytest.mark.parametrize("whole", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_message_and_its_stream(rig, whole: bool) -> None:
    server, script = rig
    length = say(script, TEXT, whole=whole)
    options: Any = {"model": MODEL, "messages": [USER], "tools": [TOOL], "max_tokens": 600}
    text = TEXT.removesuffix(OTHER)
    say(script, text, whole=whole)
    messages = client(server).messages
    answer = messages.create(**options)
    found = plain(answer)
    assert [block["type"] for block in found["content"]] == ["thinking", "text", "tool_use"]
    thinking, said, call = found["content"]
    assert (thinking["thinking"], said["text"]) == ("\nadd, 🙂\n", "\n\nI add.\n")
    assert (call["name"], call["input"]) == ("add", json.loads(ARGUMENTS))
    assert found["stop_reason"] == "tool_use"
    # the prompt is that of the chat
    assert (
        messages.count_tokens(model=MODEL, messages=[USER], tools=[TOOL]).input_tokens
        == length
        == found["usage"]["input_tokens"]
    )
    # the client's own way to put a stream together
    with messages.stream(**options) as stream:
        kinds = [event.type for event in stream]
        assert plain(stream.get_final_message()) == found
    assert {"text", "thinking", "signature", "input_json"} <= set(kinds)
    data = server.post(PATH, options | {"stream": True})
    assert data.headers["content-type"].startswith("text/event-stream")
    check_order(events_of(data.content))
    answer = messages.create(**options | {"max_tokens": 12})
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 12)


@pytest.fixture
def agent() -> Iterator[tuple[Server, Script]]:
    with serve_scripted(SHORT, **AGENT) as made:
        yield made


def test_an_agent_goes_on_with_what_it_got(agent) -> None:
    """Thinking, text and calls go back as blocks, as Claude Code sends them, and tools answer."""
    server, script = agent
    messages = client(server).messages
    options: Any = {"model": MODEL, "tools": [TOOL], "max_tokens": 600}
    options["system"] = [
        {"type": "text", "text": f"x-anthropic-billing-header: cch={script!r};"},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
    ]
    chat: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, USER]
    turns: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    for turn in range(3):
        say(script, f"<think>{turn}</think>I add.{CALL}", *chat, source=SHORT)
        with messages.stream(messages=turns, **options) as stream:
            answer = stream.get_final_message()
        call = answer.content[-1]
        assert (answer.stop_reason, call.type) == ("tool_use", "tool_use")
        turns.append({"role": "assistant", "content": answer.content})
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": f"r{turn}"}]
        turns.append({"role": "user", "content": [*results, {"type": "text", "text": "more"}]})
        chat += [
            {"role": "assistant", "content": "I add.", "reasoning_content": str(turn),
             "tool_calls": [{"id": call.id, "type": "function",
                             "function": {"name": "add", "arguments": ARGUMENTS}}]},
            {"role": "tool", "tool_call_id": call.id, "content": f"r{turn}"},
            {"role": "user", "content": "more"},
        ]  # fmt: skip
        length = say(script, "Done.", *chat, source=SHORT)
        counted = messages.count_tokens(
            messages=turns, **{name: options[name] for name in ("model", "tools", "system")}
        )
        assert counted.input_tokens == length
    answer = messages.create(messages=turns, **options)
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "Done."}]
    assert answer.stop_reason == "end_turn"
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == length
    # all but the end of the conversation was there already
    assert usage.cache_read_input_tokens > length // 2


def test_an_answer_that_was_begun(rig) -> None:
    begun = {"role": "assistant", "content": "The"}
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    with serve_scripted(template) as (other, script):
        script.set(" end", "[user]hi[assistant]The")
        answer = client(other).messages.create(model=MODEL, messages=[USER, begun], max_tokens=9)  # type: ignore[list-item]
        assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": " end"}]


def test_instructions_where_the_template_refuses_them(rig) -> None:
    """As Claude Code has them, behind the first question: a user's words then."""
    turns: list[Any] = [USER, {"role": "system", "content": "Be brief."}]
    merged = [{"type": "text", "text": turn["content"]} for turn in turns]
    with serve_scripted(STRICT) as (other, script):
        wanted = [{"role": "user", "content": merged}]
        say(script, "Yes.", *wanted, tools=(), source=STRICT)
        create: Any = client(other).messages.create
        answer = create(model=MODEL, messages=turns, max_tokens=9)
        assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "Yes."}]
        # a chat is rendered as transformers does it
        chat = other.post("/v1/chat/completions", {"messages": turns})
        assert_error(chat, 400, "refuses: no system there")


def test_stop_sequences(rig) -> None:
    server, script = rig
    say(script, "one two three", tools=())
    create: Any = client(server).messages.create
    options = {"model": MODEL, "messages": [USER], "max_tokens": 99}
    answer = create(stop_sequences=["x", "two"], **options)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "two")
    assert answer.content[0].text == "one "
    assert create(**options).stop_reason == "end_turn"


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ({"type": "any"}, f'[{{"name": "add", "parameters": {ARGUMENTS}}}]'),
        ({"type": "any", "disable_parallel_tool_use": True},
         f'[{{"name": "add", "parameters": {ARGUMENTS}}}]'),
        ({"type": "tool", "name": "add"}, ARGUMENTS),
    ],
)  # fmt: skip
def test_calls_that_are_required(rig, choice: dict[str, Any], text: str) -> None:
    pytest.importorskip("llguidance")
    server, script = rig
    say(script, text)
    options: Any = {"model": MODEL, "messages": [USER], "tools": [TOOL], "max_tokens": 300}
    messages = client(server).messages
    answer = messages.create(tool_choice=choice, **options)
    with messages.stream(tool_choice=choice, **options) as stream:
        assert plain(stream.get_final_message()) == plain(answer)
    (call,) = answer.content
    assert (call.name, call.input) == ("add", json.loads(ARGUMENTS))
    # unlike OpenAI's, it says so of a call that the client named, too
    assert answer.stop_reason == "tool_use"


def test_one_call_where_the_client_runs_one_at_a_time(rig) -> None:
    server, script = rig
    say(script, CALL + CALL)
    options: Any = {"model": MODEL, "messages": [USER], "tools": [TOOL], "max_tokens": 300}
    create = client(server).messages.create
    assert len(create(**options).content) == 2
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(create(tool_choice=choice, **options).content) == 1


def test_a_schema(rig) -> None:
    pytest.importorskip("llguidance")
    server, script = rig
    say(script, '{"x": 1}', tools=())
    form = {"type": "json_schema", "schema": {"type": "object", "required": ["x"]}}
    answer = client(server).messages.create(
        model=MODEL,
        messages=[USER],
        max_tokens=99,
        output_config={"format": form},  # type: ignore[arg-type,list-item]
    )
    assert json.loads(answer.content[0].text) == {"x": 1}  # type: ignore[union-attr]
