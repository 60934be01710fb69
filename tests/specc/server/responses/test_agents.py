"""Conversations as agents have them, with OpenAI's client and steps of 1 to 8 tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from specc.runtime.requests.chat_template import ChatTemplate
from tests.specc.server.responses.rig import check_events, events_of
from tests.specc.server.scripted import AGENT, Script, serve_scripted
from tests.specc.server.serving import MODEL, Server

# everything that a prompt can differ in, once
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}|{{ m.reasoning_content or '' }}|{{ m.content }}|"
    "{% for c in m.tool_calls or [] %}{{ c.id }} {{ c.function.name }}"
    " {{ c.function.arguments | tojson }}{% endfor %}|{{ m.tool_call_id or '' }}>{% endfor %}"
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{{ reasoning_effort or '' }}"
)
SHELL = {
    "type": "function", "name": "shell", "description": "Runs.", "strict": False,
    "parameters": {"type": "object", "properties": {"command": {"type": "array"}}},
}  # fmt: skip
# what Codex sends with each request
CODEX = {
    "model": MODEL, "instructions": "Be brief.", "tools": [SHELL], "tool_choice": "auto",
    "parallel_tool_calls": False, "reasoning": {"effort": "low", "summary": "auto"},
    "store": False, "stream": True, "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "a1", "text": {"verbosity": "low"},
}  # fmt: skip
FIRST = [
    {"type": "message", "role": "developer",
     "content": [{"type": "input_text", "text": "No network."}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Files?"}]},
]  # fmt: skip
CALL = '<tool_call>\n{"name": "shell", "arguments": {"command": ["ls"]}}\n</tool_call>'
TEXTS = (f"<think>\nLook.\n</think>\n\n{CALL}", "<think>So.</think>One file.", "Bye.")
# as a client of chats would send it
SYSTEM = {"role": "system", "content": "Be brief.\n\nNo network."}
USER = {"role": "user", "content": "Files?"}


def thought(text: str, call_id: str) -> dict[str, Any]:
    function = {"name": "shell", "arguments": {"command": ["ls"]}}
    call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "reasoning_content": text, "tool_calls": [call]}


class Rig:
    """A server, what its model says next, and the prompts that it got."""

    def __init__(self, server: Server, script: Script) -> None:
        self.server = server
        self.prompts: list[list[int]] = []
        self._script = script
        endpoints = server.app.state.endpoints
        answer = endpoints.answer_chat

        async def noting(request: Any, chat: Any, *others: Any) -> Any:
            self.prompts.append(chat.token_ids)
            return await answer(request, chat, *others)

        endpoints.answer_chat = noting

    def say(self, text: str, messages: list[Any], **options: Any) -> list[int]:
        """The model says it after the prompt of these messages; returns the prompt."""
        functions = {"tools": [{"type": "function", "function": {"name": "shell"}}]}
        options = functions | {"reasoning_effort": "low"} | options
        prompt = ChatTemplate(TEMPLATE, {}).render(messages, options=options)
        self._script.set(text, prompt)
        ids = self.server.engine.tokenizer.encode(prompt).ids
        return list(ids)

    def stream(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = self.server.post("/v1/responses", {"temperature": 0} | body)
        assert answer.status_code == 200, answer.text
        return check_events(events_of(answer.text))


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with serve_scripted(TEMPLATE, **AGENT) as made:
        yield Rig(*made)


def as_codex(item: dict[str, Any]) -> dict[str, Any]:
    """An item as Codex sends it again: without ids of messages and thinking, and all states."""
    gone = {"status", "id", "logprobs", "annotations"}
    own = {name: value for name, value in item.items() if name not in gone}
    if isinstance(own.get("content"), list):
        own["content"] = [as_codex(part) for part in own["content"]]
    return own


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_turn_with_a_call_and_its_output(rig: Rig, is_kept: bool) -> None:
    """With all items sent again, and with the responses before: the prompts of a plain chat."""
    body = CODEX | {"store": is_kept}
    wanted = rig.say(TEXTS[0], [SYSTEM, USER])
    first = rig.stream(body | {"input": FIRST})
    assert rig.prompts[-1] == wanted
    assert [item["type"] for item in first["output"]] == ["reasoning", "function_call"]
    call = first["output"][1]
    assert json.loads(call["arguments"]) == {"command": ["ls"]}
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "a.py"}
    turn = [thought("\nLook.\n", call["call_id"]),
            {"role": "tool", "tool_call_id": call["call_id"], "content": "a.py"}]  # fmt: skip

    def more(response: dict[str, Any], items: list[Any], new: list[Any]) -> dict[str, Any]:
        if is_kept:
            return {"previous_response_id": response["id"], "input": new}
        return {"input": [*items, *map(as_codex, response["output"]), *new]}

    # instructions are those of each request, and a developer's words before any user stay there
    wanted = rig.say(TEXTS[1], [SYSTEM, USER, *turn])
    asked = more(first, FIRST, [result])
    second = rig.stream(body | asked)
    assert rig.prompts[-1] == wanted
    assert [item["type"] for item in second["output"]] == ["reasoning", "message"]
    assert second["output"][1]["content"][0]["text"] == "One file."
    assert second["usage"]["output_tokens_details"]["reasoning_tokens"] == len("So.")
    thanks = [{"role": "user", "content": "Thanks."}]
    said = {"role": "assistant", "reasoning_content": "So.", "content": "One file."}
    wanted = rig.say(TEXTS[2], [SYSTEM, USER, *turn, said, *thanks])
    third = rig.stream(body | more(second, asked["input"], thanks))
    assert rig.prompts[-1] == wanted
    assert third["output"][0]["content"][0]["text"] == "Bye."
    assert third["previous_response_id"] == (second["id"] if is_kept else None)
    for response in (first, second, third):
        found = rig.server.get(f"/v1/responses/{response['id']}")
        assert found.status_code == (200 if is_kept else 404)
        assert not is_kept or found.json() == response


def test_the_clients_own_stream_and_whole_answers_agree(rig: Rig) -> None:
    client = rig.server.client
    body: Any = {"model": MODEL, "input": "Files?", "tools": [SHELL], "temperature": 0,
                 "reasoning": {"effort": "low"}}  # fmt: skip
    rig.say(f"<think>a</think>Well: {CALL}{CALL}", [USER])
    with client.responses.stream(**body) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type.removeprefix("response.") for event in events]
    # the client adds what it has put together to each of these
    texts = [e.snapshot for e in events if e.type == "response.output_text.delta"]
    arguments = [e.snapshot for e in events if e.type == "response.function_call_arguments.delta"]
    assert (texts[-1], json.loads(arguments[-1])) == ("Well: ", {"command": ["ls"]})
    assert kinds.count("output_item.done") == 4
    assert kinds[-1] == "completed"
    assert final.output_text == "Well: "
    assert [item.type for item in final.output] == [
        "reasoning", "message", "function_call", "function_call",
    ]  # fmt: skip
    same = client.responses.retrieve(final.id)
    assert [item.id for item in same.output] == [item.id for item in final.output]
    whole = client.responses.create(**body)

    def plain(items: Any) -> str:
        """Without ids, which are each response's own."""
        told = [json.loads(item.model_dump_json(exclude={"id", "call_id"})) for item in items]
        return json.dumps(told)

    assert plain(whole.output) == plain(same.output)
    assert whole.usage is not None
    assert same.usage is not None
    assert whole.usage.output_tokens == same.usage.output_tokens


def test_a_call_of_a_function_in_a_namespace(rig: Rig) -> None:
    """As Codex has them for what it adds to a shell."""
    agent = {"type": "function", "name": "stop", "parameters": {"type": "object"}}
    space = {"type": "namespace", "name": "agents", "description": "Of others.", "tools": [agent]}
    call = {"type": "function_call", "namespace": "agents", "name": "stop", "call_id": "c1",
            "arguments": "{}"}  # fmt: skip
    output = {"type": "function_call_output", "call_id": "c1", "output": "done"}
    named = {"id": "c1", "type": "function", "function": {"name": "agents__stop", "arguments": {}}}
    messages = [USER, {"role": "assistant", "tool_calls": [named]},
                {"role": "tool", "tool_call_id": "c1", "content": "done"}]  # fmt: skip
    tools = [{"type": "function", "function": {"name": "agents__stop"}}]
    said = '<tool_call>\n{"name": "agents__stop", "arguments": {}}\n</tool_call>'
    wanted = rig.say(said, messages, tools=tools, reasoning_effort=None)
    body = {"input": [{"role": "user", "content": "Files?"}, call, output], "tools": [space]}
    response = rig.stream(body | {"stream": True, "tool_choice": "auto"})
    assert rig.prompts[-1] == wanted
    (item,) = response["output"]
    assert (item["namespace"], item["name"], item["arguments"]) == ("agents", "stop", "{}")
    assert item["call_id"] != "c1"


class Pick(BaseModel):
    one: Literal["a", "b"]


def test_forms_and_calls_that_are_asked_for(rig: Rig) -> None:
    """The model says what it likes; it has no room for thinking."""
    pytest.importorskip("llguidance")
    client, body = rig.server.client, {"model": MODEL, "temperature": 0, "input": "Files?"}
    rig.say('{"one": "b"}', [USER], tools=None, reasoning_effort=None)
    more: Any = {"include": ["message.output_text.logprobs"]}
    parsed = client.responses.parse(text_format=Pick, **body, **more)
    assert parsed.output_parsed == Pick(one="b")
    part: Any = parsed.output[0].content[0]  # type: ignore[union-attr]
    assert "".join(entry.token for entry in part.logprobs) == part.text
    tool = SHELL | {"parameters": Pick.model_json_schema()}
    rig.say('{"one": "b"}', [USER], reasoning_effort=None)
    for choice in ({"type": "function", "name": "shell"}, "required"):
        if choice == "required":
            rig.say(
                '[{"name": "shell", "parameters": {"one": "b"}}]', [USER], reasoning_effort=None
            )
        with client.responses.stream(**body, tools=[tool], tool_choice=choice) as stream:
            (call,) = stream.get_final_response().output
        assert (call.type, call.name, call.status) == ("function_call", "shell", "completed")
        assert json.loads(call.arguments) == {"one": "b"}


def test_items_are_listed_and_named(rig: Rig) -> None:
    client = rig.server.client
    body: Any = {"model": MODEL, "temperature": 0, "tools": [SHELL], "reasoning": {"effort": "low"}}
    rig.say("One.", [USER])
    first = client.responses.create(input="Files?", metadata={"a": "b"}, **body)
    more = {"role": "user", "content": "More?"}
    said = {"role": "assistant", "content": "One."}
    wanted = rig.say("Two.", [USER, said, more])
    second = client.responses.create(input=[more], previous_response_id=first.id, **body)
    assert rig.prompts[-1] == wanted
    assert (first.metadata, second.metadata) == ({"a": "b"}, {})
    newest = list(client.responses.input_items.list(second.id, limit=1))
    assert [item.type for item in newest] == ["message"] * 3
    oldest = client.responses.input_items.list(second.id, order="asc").data
    assert [item.id for item in oldest] == [item.id for item in newest][::-1]
    assert oldest[1].id == first.output[0].id
    # an item is named instead of sent
    names: Any = [{"type": "item_reference", "id": item.id} for item in oldest]
    client.responses.create(input=names, **body)
    assert rig.prompts[-1] == wanted
    client.responses.delete(first.id)
    answer = rig.server.post("/v1/responses", {"input": "a", "previous_response_id": second.id})
    assert (answer.status_code, answer.json()["error"]["code"]) == (
        400, "previous_response_not_found",
    )  # fmt: skip
    answer = rig.server.post("/v1/responses", {"input": names})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "item_not_found")


def test_a_conversation_that_is_too_long_loses_its_first_turns(rig: Rig) -> None:
    turns = [{"role": "user", "content": f"{i}" * 90} for i in range(12)]
    tools = {"tools": [SHELL], "reasoning": {"effort": "low"}, "temperature": 0}
    body = {"input": turns, "instructions": "Be brief.", **tools}
    answer = rig.server.post("/v1/responses", body)
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    system = {"role": "system", "content": "Be brief."}
    # as many of the last ones as there is room for
    for begin in range(12):
        wanted = rig.say("Yes.", [system, *turns[begin:]])
        if len(wanted) < rig.server.engine.max_seq_len:
            break
    assert 0 < begin < 11
    response = rig.server.post("/v1/responses", body | {"truncation": "auto"}).json()
    assert rig.prompts[-1] == wanted
    assert response["truncation"] == "auto"


def test_messages_of_developers_stay_where_the_template_knows_them() -> None:
    template = TEMPLATE + "{# developer #}"
    with serve_scripted(template) as (server, script):
        own = Rig(server, script)
        developer = {"role": "developer", "content": "No network."}
        script.set("Yes.", ChatTemplate(template, {}).render([developer, USER]))
        response = server.post(
            "/v1/responses", {"input": [developer, USER], "temperature": 0}
        ).json()
        assert response["output"][0]["content"][0]["text"] == "Yes."
        text = server.engine.tokenizer.decode(own.prompts[-1], skip_special_tokens=False)
        assert text.startswith("<developer|")
