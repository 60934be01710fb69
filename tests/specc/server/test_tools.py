"""Tools over HTTP, with the OpenAI client and steps of 1 to 8 tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specc.errors import ConfigError
from specc.runtime.requests.chat_template import ChatTemplate
from specc.runtime.service.service import Update
from specc.sampling.params import SamplingParams
from specc.server.api_responses import ChatResponse, Options
from specc.server.config import ServeConfig
from specc.server.generate import Output, OutputJob
from specc.server.logprobs import TokenTexts
from specc.server.message_reader import MessageReader
from specc.server.parsers.formats import CALL_FORMATS
from specc.server.protocol import ChatRequest
from specc.server.tool_counts import ToolCounts
from specc.server.tools import ToolUse
from tests.specc.server.scripted import TEMPLATE, Script, serve_scripted
from tests.specc.server.serving import MODEL, Server, assert_error, serve
from tests.tiers import only

USER = {"role": "user", "content": "hi"}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "x + y",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
            "required": ["x"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
ARGUMENTS = '{"x": 1, "y": 2}'
CALL = f'<tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
TEXT = f"<think>\nadd, 🙂\n</think>\n\nI add.\n{CALL}\n{OTHER}"
CHATS = "/v1/chat/completions"


def say(script: Script, text: str, whole: bool = True, tools: Any = (ADD, NOW)) -> None:
    """What the model answers to `ask`."""
    prompt = ChatTemplate(TEMPLATE, {}).render([USER], options={"tools": list(tools)})
    script.set(text, prompt, whole)


def ask(server: Server, **options: Any) -> Any:
    options = {"temperature": 0, "tools": [ADD, NOW]} | options
    return server.client.chat.completions.create(model=MODEL, messages=[USER], **options)


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


BOTH = [("add", ARGUMENTS), ("now", "{}")]


@pytest.mark.parametrize("whole", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_message_and_its_stream(rig, whole: bool) -> None:
    """Marks that are special tokens, and marks of many tokens, which steps cut anywhere."""
    server, script = rig
    say(script, TEXT, whole)
    answer = ask(server, extra_body={"return_spec_metrics": True})
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "\n\nI add.\n"
    assert choice.message.reasoning == "\nadd, 🙂\n"
    assert calls_of(choice.message) == BOTH
    assert {call.type for call in choice.message.tool_calls} == {"function"}
    ids = [call.id for call in choice.message.tool_calls]
    assert len(set(ids)) == 2
    histogram = answer.metrics["speculative_decoding"]["acceptance_histogram"]
    assert all(count >= 1 for count in histogram[:8])
    # the client's own way to put a stream together
    with server.client.chat.completions.stream(
        model=MODEL, messages=[USER], temperature=0, tools=[ADD, NOW]
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert (final.message.content, calls_of(final.message)) == ("\n\nI add.\n", BOTH)
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [(event.name, event.arguments) for event in done] == BOTH


def test_deltas_of_a_call(rig) -> None:
    """Index, id and name come once, and first; then pieces of arguments with the index alone."""
    server, script = rig
    say(script, CALL + OTHER, whole=False)
    chunks = list(ask(server, stream=True))
    deltas = [call for c in chunks for call in c.choices[0].delta.tool_calls or ()]
    begins = [at for at, call in enumerate(deltas) if call.id]
    assert [deltas[at].function.name for at in begins] == ["add", "now"]
    assert [call.index for call in deltas] == sorted(call.index for call in deltas)
    assert begins[0] == 0
    assert all(call.function.name is None for call in deltas if not call.id)
    assert all(call.type == ("function" if call.id else None) for call in deltas)
    pieces = [call.function.arguments for call in deltas[: begins[1]]]
    assert "".join(pieces) == ARGUMENTS
    assert len(pieces) > 2
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks][-2:] == [None, "tool_calls"]
    assert not any(c.choices[0].delta.content for c in chunks)


def test_an_end_stands_alone() -> None:
    """OpenAI's client takes no call for done that begins beside the finish reason."""
    wanted = ChatRequest.model_validate({"messages": [USER]})
    use = ToolUse({"now": None}, CALL_FORMATS["hermes"])
    answer = ChatResponse(
        MODEL,
        TokenTexts(None),
        Options(),
        MessageReader(ServeConfig(), wanted, "", use, ToolCounts()),
    )
    output = Output(OutputJob(0, [1], SamplingParams(temperature=0)), finish_reason="stop")
    update = Update([1, 2], f"a{OTHER}", None, "stop")
    assert answer.take(0, update)
    first, last = (c["choices"][0] for c in answer.chunks(0, output, update, is_first=True))
    assert (first["delta"]["content"], first["finish_reason"]) == ("a", None)
    assert first["delta"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
    assert (last["delta"], last["finish_reason"]) == ({}, "tool_calls")


def test_a_call_alone_has_null_for_content(rig) -> None:
    server, script = rig
    say(script, f"\n{CALL}\n")
    body = {"messages": [USER], "temperature": 0, "tools": [ADD, NOW]}
    (choice,) = server.post(CHATS, body).json()["choices"]
    call = choice["message"]["tool_calls"][0]
    assert list(choice["message"]) == [
        "role", "content", "tool_calls", "reasoning", "reasoning_content", "refusal",
        "annotations", "audio", "function_call",
    ]  # fmt: skip
    assert choice["message"]["content"] is None
    assert call["id"].startswith("call_")
    assert call == {
        "id": call["id"], "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}
    }  # fmt: skip


@pytest.mark.slow
def test_what_is_no_call_is_content(rig) -> None:
    server, script = rig
    for text in (
        '<tool_call>{"name": "sub", "arguments": {}}</tool_call>',
        "<tool_call>add(1, 2)</tool_call>",
        'a <tool_call>{"name": "add"',
        "no call",
    ):
        say(script, text)
        choice = ask(server).choices[0]
        assert (choice.message.content, choice.message.tool_calls) == (text, None)
        assert choice.finish_reason == "stop"
        streamed = "".join(c.choices[0].delta.content or "" for c in ask(server, stream=True))
        assert streamed == text


def test_a_call_that_is_cut(rig) -> None:
    server, script = rig
    say(script, CALL + OTHER, whole=False)
    for max_tokens, calls, reason in (
        (CALL.index("2}"), [("add", '{"x": 1, "y": ')], "length"),
        (CALL.index("2}") + 2, [("add", ARGUMENTS)], "tool_calls"),
        (CALL.index("ments"), [], "length"),
        (len(CALL + OTHER), BOTH, "tool_calls"),
        (len(CALL) + OTHER.index("name"), BOTH[:1], "length"),
    ):
        choice = ask(server, max_tokens=max_tokens).choices[0]
        assert (calls_of(choice.message), choice.finish_reason) == (calls, reason), max_tokens
    chunks = list(ask(server, max_tokens=max_tokens, stream=True))
    assert chunks[-1].choices[0].finish_reason == reason
    content = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert content == (choice.message.content or "")
    stopped = ask(server, stop=['"y"']).choices[0]
    assert calls_of(stopped.message) == [("add", '{"x": 1, ')]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", '"y"')


@pytest.mark.slow
def test_what_is_asked_for_beside_it(rig) -> None:
    server, script = rig
    say(script, TEXT)
    answer = ask(server, n=2, logprobs=True)
    assert [calls_of(choice.message) for choice in answer.choices] == [BOTH, BOTH]
    ids = {call.id for choice in answer.choices for call in choice.message.tool_calls}
    assert len(ids) == 4
    num_tokens = len(script.token_ids) + 1
    assert answer.usage.completion_tokens == 2 * num_tokens
    assert [len(choice.logprobs.content) for choice in answer.choices] == [num_tokens] * 2
    chunks = list(ask(server, n=2, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens == 2 * num_tokens
    for index in range(2):
        choices = [o for c in chunks for o in c.choices if o.index == index]
        found = [call for o in choices for call in o.delta.tool_calls or ()]
        assert [call.function.name for call in found if call.id] == ["add", "now"]
    one = ask(server, parallel_tool_calls=False).choices[0]
    assert (calls_of(one.message), one.finish_reason) == (BOTH[:1], "tool_calls")


def test_without_tools_nothing_is_looked_for(rig) -> None:
    server, script = rig
    for tools, more in (((ADD, NOW), {"tool_choice": "none"}), ((), {"tools": []})):
        say(script, CALL, whole=False, tools=tools)
        choice = ask(server, **more).choices[0]
        assert (choice.message.content, choice.finish_reason) == (CALL, "stop")


def test_what_a_template_gets(rig) -> None:
    """Tools as they were sent; arguments of earlier calls as objects; what tools have said."""
    server, script = rig
    call = {"id": "call_1", "type": "function", "function": {"name": "add"}}
    sent = [
        USER,
        {"role": "assistant", "content": None, "reasoning": "so", "tool_calls": [
            {**call, "function": {"name": "add", "arguments": '{"x": [1, "ü"]}'}},
            {**call, "function": {"name": "now", "arguments": ""}},
            {**call, "function": {"name": "now", "arguments": {"y": 1}}},
        ]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
        {"role": "assistant", "content": "3", "tool_calls": None},
    ]  # fmt: skip
    want = [
        USER,
        {"role": "assistant", "reasoning": "so", "reasoning_content": "so",
         "tool_calls": [
            {**call, "function": {"name": "add", "arguments": {"x": [1, "ü"]}}},
            {**call, "function": {"name": "now", "arguments": {}}},
            {**call, "function": {"name": "now", "arguments": {"y": 1}}},
        ]},
        sent[2],
        {"role": "assistant", "content": "3"},
    ]  # fmt: skip
    prompt = ChatTemplate(TEMPLATE, {}).render(want, options={"tools": [ADD, NOW]})
    assert json.dumps(ADD) in prompt
    script.set("yes", prompt)
    answer = server.client.chat.completions.create(
        model=MODEL, messages=sent, tools=[ADD, NOW], temperature=0
    )
    assert answer.choices[0].message.content == "yes"
    assert answer.usage.prompt_tokens == len(server.engine.tokenizer.encode(prompt).ids)


def test_the_description_has_them(rig) -> None:
    server, _ = rig
    schemas = server.get("/openapi.json").json()["components"]["schemas"]
    fields = schemas["ChatRequest"]["properties"]
    assert fields["tools"]["anyOf"][0] == {
        "type": "array", "items": {"$ref": "#/components/schemas/Tool"}
    }  # fmt: skip
    assert {"tool_choice", "parallel_tool_calls", "include_reasoning"} <= set(fields)
    assert schemas["Tool"]["properties"]["function"] == {
        "$ref": "#/components/schemas/ToolFunction"
    }
    assert "tools" not in schemas["CompletionRequest"]["properties"]


AUTO = {"tools": [ADD]}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"tools": [{"type": "web_search", "function": {"name": "a"}}]}, "tools.0.type",
         ["web_search"]),
        ({"tools": [{"type": "function"}]}, "tools.0.function", ["Missing", "'tools.0.function'"]),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name",
         ["pattern"]),
        ({"tools": [NOW, NOW]}, "tools", ["Two tools", "now"]),
        ({"tools": 5}, "tools", []),
        (AUTO | {"tool_choice": "any"}, "tool_choice", ['"required"']),
        (AUTO | {"tool_choice": 5}, "tool_choice", ["5"]),
        (AUTO | {"tool_choice": {"type": "function"}}, "tool_choice", ["function"]),
        (AUTO | {"tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice",
         ["'sub'", "one of add"]),
        ({"tool_choice": "required"}, "tool_choice", ["without tools"]),
        (AUTO | {"parallel_tool_calls": 1}, "parallel_tool_calls", []),
        ({"documents": ["a"]}, "documents.0", []),
    ],
)  # fmt: skip
def test_bad_requests(rig, body: Any, param: str, words: list[str]) -> None:
    server, _ = rig
    assert_error(server.post(CHATS, {"messages": [USER]} | body), 400, *words, param=param)


@pytest.mark.parametrize(
    ("calls", "place", "words"),
    [
        (5, "", "list of calls"),
        (["a"], ".0", "function"),
        ([{"function": {"arguments": "{}"}}], ".0", "name"),
    ],
)
def test_bad_calls_of_earlier_messages(rig, calls: Any, place: str, words: str) -> None:
    server, _ = rig
    body = {"messages": [USER, {"role": "assistant", "tool_calls": calls}]}
    assert_error(server.post(CHATS, body), 400, words, param=f"messages.1.tool_calls{place}")


def test_a_server_that_does_not_look_for_calls() -> None:
    with serve() as server:
        body = {"messages": [USER]} | AUTO
        words = ["--enable-auto-tool-choice", "--tool-call-parser"]
        assert_error(server.post(CHATS, body), 400, *words, param="tool_choice")
        # as elsewhere, unless one has to be called
        body = {"messages": [USER], "functions": [ADD["function"]], "max_tokens": 2}
        (choice,) = server.post(CHATS, body).json()["choices"]
        assert choice["message"]["function_call"] is None
    body = {"messages": [USER]} | AUTO
    options = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    with serve(template=TEMPLATE, **options | {"tool_call_parser": "llama3_json"}) as server:
        # nothing tells a call without a marker from an answer
        form = {"response_format": {"type": "json_object"}}
        assert_error(server.post(CHATS, body | form), 400, "llama3_json", param="tools")
    with serve(template="{{ messages[0].content }}", **options) as server:
        assert_error(server.post(CHATS, body), 400, "does not read them", param="tools")
        assert_error(server.post("/v1/completions", {"prompt": "a"} | AUTO), 400, param="tools")


def test_options_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="hermes"):
        ServeConfig(tool_call_parser="json")
    with pytest.raises(ConfigError, match="without tool_call_parser"):
        ServeConfig(enable_auto_tool_choice=True)


FORMS = {
    "llama3_json": '<|python_tag|>{"name": "add", "parameters": {"x": 1, "y": 2}}; {"name": "now",'
    ' "parameters": {}}',
    "mistral": '[TOOL_CALLS]add[ARGS]{"x": 1, "y": 2}[TOOL_CALLS][{"name": "now"}]',
    "qwen3_coder": "<tool_call><function=add><parameter=x>\n1\n</parameter><parameter=y>2"
    "</parameter></function></tool_call>\n<tool_call>\n<function=now></function></tool_call>",
}


@pytest.mark.slow
@pytest.mark.parametrize("form", only(("llama3_json",), FORMS))
def test_other_formats(form: str) -> None:
    options = {"enable_auto_tool_choice": True, "tool_call_parser": form}
    with serve_scripted(**options) as (server, script):
        for whole in (True, False):
            say(script, f"So:{FORMS[form]}" if form != "llama3_json" else FORMS[form], whole)
            choice = ask(server).choices[0]
            assert (calls_of(choice.message), choice.finish_reason) == (BOTH, "tool_calls")
            with server.client.chat.completions.stream(
                model=MODEL, messages=[USER], temperature=0, tools=[ADD, NOW]
            ) as stream:
                final = stream.get_final_completion().choices[0]
            assert (calls_of(final.message), final.finish_reason) == (BOTH, "tool_calls")
            assert (final.message.content or None) == choice.message.content
