"""Calls that a request requires: grammars of the tools' schemas, through the real steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from specc.server.errors import ApiError
from specc.server.forced_calls import arguments_schema, calls_grammar, calls_schema
from specc.server.parsers.formats import CALL_FORMATS
from tests.specc.server.scripted import TEMPLATE, Script, scripted_engine, serve_scripted
from tests.specc.server.serving import MODEL, Server, assert_error, serve
from tests.specc.server.test_tools import CHATS, NOW, USER, calls_of, say

pytest.importorskip("llguidance")
PICK = {
    "type": "function",
    "function": {
        "name": "pick",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"one": {"$ref": "#/$defs/One"}, "more": {"$ref": "#/$defs/One"}},
            "required": ["one"],
            "additionalProperties": False,
            "$defs": {"One": {"enum": ["a", "b"]}},
        },
    },
}
NAMED = {"type": "function", "function": {"name": "pick"}}


@pytest.fixture(scope="module")
def rig() -> Iterator[tuple[Server, Script]]:
    # no parser of calls is needed, and one of thinking does not matter
    with serve_scripted(reasoning_parser="deepseek_r1") as made:
        yield made


def both(server: Server, **options: Any) -> list[Any]:
    """The answer, and what OpenAI's client makes of its stream."""
    options = {"temperature": 0, "model": MODEL, "messages": [USER]} | options
    answer = server.client.chat.completions.create(**options).choices[0]
    with server.client.chat.completions.stream(**options) as stream:
        return [answer, stream.get_final_completion().choices[0]]


def test_a_list_of_calls(rig) -> None:
    server, script = rig
    text = (
        '[{"name": "pick", "parameters": {"one": "b", "more": "a"}},{"name":"now","parameters":{}}]'
    )
    say(script, text, tools=(PICK, NOW))
    for choice in both(server, tools=[PICK, NOW], tool_choice="required"):
        assert calls_of(choice.message) == [("pick", '{"one": "b", "more": "a"}'), ("now", "{}")]
        assert (choice.message.content or None, choice.finish_reason) == (None, "tool_calls")
        assert not getattr(choice.message, "reasoning", None)


def test_arguments_of_one_tool(rig) -> None:
    server, script = rig
    say(script, '{"one": "b"}', tools=(PICK, NOW))
    for choice in both(server, tools=[PICK, NOW], tool_choice=NAMED):
        assert calls_of(choice.message) == [("pick", '{"one": "b"}')]
        # as OpenAI's: who names the tool knows that it is called
        assert (choice.message.content or None, choice.finish_reason) == (None, "stop")


FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": {
    "type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}}}  # fmt: skip


def test_a_form_beside_calls_is_that_of_answers(rig) -> None:
    """As instructor sends it with OpenAI's Responses: an output of calls has no answer."""
    server, script = rig
    say(script, '{"one": "b"}', tools=(PICK, NOW))
    wanted = {"tools": [PICK, NOW], "tool_choice": NAMED, "response_format": FORM}
    for choice in both(server, **wanted):
        assert calls_of(choice.message) == [("pick", '{"one": "b"}')]


@pytest.mark.parametrize("parser", ["hermes", "internlm", "gigachat3"])
def test_an_answer_has_its_form_where_the_model_may_call(parser: str) -> None:
    """What calls begin with is one special token, two, and text with one in it."""
    engine, script = scripted_engine()
    engine.tokenizer.add_special_tokens(["<|action_start|>", "<|plugin|>", "<|role_sep|>"])
    engine.vocab_size = engine.tokenizer.get_vocab_size()
    options = {"enable_auto_tool_choice": True, "tool_call_parser": parser}
    call = json.dumps({"name": "pick", "arguments": {"one": "b"}})
    opening = CALL_FORMATS[parser].opening
    wanted: dict[str, Any] = {"tools": [PICK, NOW], "response_format": FORM}
    with serve(engine, TEMPLATE, plan="chain-8", **options) as server:
        say(script, '{"x": 5}', tools=(PICK, NOW))
        for choice in both(server, **wanted):
            assert (choice.message.content, choice.finish_reason) == ('{"x": 5}', "stop")
            assert not choice.message.tool_calls
        # anything may follow, another marker and text too
        say(script, f"{opening}{call}{CALL_FORMATS[parser].closing}<think> So.", tools=(PICK, NOW))
        for choice in both(server, **wanted):
            assert calls_of(choice.message) == [("pick", '{"one": "b"}')]
            assert choice.finish_reason == "tool_calls"
            assert "So." in choice.message.content
        say(script, f"I say: {opening}{call}", tools=(PICK, NOW))
        answer = server.client.chat.completions.create(
            model=MODEL, messages=[USER], temperature=1e5, seed=1, n=6, max_tokens=20,
            logprobs=True, **wanted,
        )  # fmt: skip
        firsts = {choice.logprobs.content[0].token for choice in answer.choices}
        begin = engine.tokenizer.encode(opening).ids[:1]
        assert firsts <= {"{", engine.tokenizer.decode(begin, skip_special_tokens=False)}, firsts


def test_whatever_the_model_would_rather_say(rig) -> None:
    """A model that knows nothing of all this, at a temperature at which it says anything."""
    server, script = rig
    say(script, "I would rather not. " * 9, tools=(PICK, NOW))
    wanted = {"temperature": 1e5, "seed": 1, "tools": [PICK, NOW], "max_tokens": 150}
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in (PICK, NOW)}
    answer = server.client.chat.completions.create(
        model=MODEL, messages=[USER], n=2, tool_choice="required", parallel_tool_calls=False,
        **wanted,
    )  # fmt: skip
    for choice in answer.choices:
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls"
        jsonschema.validate(
            json.loads(call.function.arguments), schemas[call.function.name] or {"maxProperties": 0}
        )
    answer = server.client.chat.completions.create(
        model=MODEL, messages=[USER], tool_choice=NAMED, **wanted
    )
    (call,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(call.function.arguments), schemas["pick"])


@pytest.mark.slow
def test_an_output_that_is_cut(rig) -> None:
    server, script = rig
    text = '[{"name": "pick", "parameters": {"one": "b"}}, {"name": "now", "parameters": {}}]'
    options = {"tools": [PICK, NOW], "tool_choice": "required", "temperature": 0}
    say(script, text, tools=(PICK, NOW))
    pick = ("pick", '{"one": "b"}')
    for end, calls, content in (
        ('"b"', [("pick", '{"one": ')], None),
        (', {"name"', [pick], None),
        ('{}}]', [pick], ', {"name": "now", "parameters": '),
        ('rameters', [], '[{"name": "pick", "pa'),
    ):  # fmt: skip
        choice = server.client.chat.completions.create(
            model=MODEL, messages=[USER], max_tokens=text.index(end), **options
        ).choices[0]
        assert (calls_of(choice.message), choice.message.content or None) == (calls, content)
        assert choice.finish_reason == "length"
    # a stop string ends an output as it always does
    with server.client.chat.completions.stream(
        model=MODEL, messages=[USER], stop=["now"], **options
    ) as stream:
        choice = stream.get_final_completion().choices[0]
    assert (calls_of(choice.message), choice.finish_reason) == ([pick], "tool_calls")


@pytest.mark.parametrize(("parallel", "count"), [(False, 1), (None, 4), (True, 9)])
def test_a_model_that_repeats_its_call_ends(rig, parallel: bool | None, count: int) -> None:
    server, script = rig
    text = "[" + ", ".join(['{"name": "now", "parameters": {}}'] * 9) + "]"
    say(script, text, tools=(PICK, NOW))
    body = {"messages": [USER], "tools": [PICK, NOW], "tool_choice": "required", "temperature": 0}
    answer = server.post(CHATS, body | {"parallel_tool_calls": parallel}).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert len(choice["message"]["tool_calls"]) == count


OPEN = {"type": "object", "properties": {"one": {"enum": ["a", "b"]}}, "required": ["one"]}


@pytest.mark.default(
    '{}-{"one": "b"}', "{'structured_outputs': {'whitespace_pattern': ' *'}}-{  \"one\": \"b\"}"
)
@pytest.mark.parametrize(
    ("options", "content"),
    [
        ({}, '{"one": "b"}'),
        ({"structured_outputs": {"disable_any_whitespace": True}}, '{"one":"b"}'),
        ({"structured_outputs": {"whitespace_pattern": " *"}}, '{  "one": "b"}'),
        ({"guided_whitespace_pattern": " *"}, '{  "one": "b"}'),
        (
            {"structured_outputs": {"disable_additional_properties": False}},
            '{"one": "b", "x": null}',
        ),
    ],
    ids=str,
)
def test_a_schema_ends_where_it_names_no_more(rig, options: Any, content: str) -> None:
    """With `strict` or without; its options may come beside it, and by every name."""
    server, script = rig
    own = {"json_schema": {"name": "one", "schema": OPEN, "strict": True}, "type": "json_schema"}
    says = content if "  " in content else content.replace('"b"}', '"b", "x": null}')
    say(script, says, True, ())
    body = {"messages": [USER], "temperature": 0, "max_tokens": 40}
    forms: list[dict[str, Any]] = [{"response_format": own}]
    if "guided_whitespace_pattern" not in options:
        given = options.get("structured_outputs", {})
        forms.append({"structured_outputs": {"json": OPEN} | given})
    for form in forms:
        answer = server.post(CHATS, body | options | form).json()
        (choice,) = answer["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (content, "stop"), form


def test_keywords_that_the_library_lacks(rig) -> None:
    server, script = rig
    schema = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "maxItems": 2}
    say(script, "[1, 2]", True, ())
    form = {"type": "json_schema", "json_schema": {"name": "one", "schema": schema}}
    body = {"messages": [USER], "temperature": 0, "response_format": form}
    assert_error(server.post(CHATS, body), 400, "uniqueItems")
    answer = server.post(CHATS, body | {"structured_outputs": {"lenient": True}}).json()
    assert answer["choices"][0]["message"]["content"] == "[1, 2]"
    # options say no form
    del body["response_format"]
    error = server.post(CHATS, body | {"structured_outputs": {"lenient": True}})
    assert_error(error, 400, "without a form")


def test_references_follow_the_schemas_to_their_place() -> None:
    tools = {"pick": PICK["function"]["parameters"], "now": None, "any": {"$schema": "x"}}
    schema = calls_schema(tools, 4)
    good = [{"name": "pick", "parameters": {"one": "a"}}, {"name": "now", "parameters": {}}]
    jsonschema.validate(good, schema)
    for bad in (
        [],
        [{"name": "pick", "parameters": {"one": "c"}}],
        [{"name": "pick", "parameters": {}}],
        [{"name": "sub", "parameters": {}}],
        [{"name": "now", "parameters": {"x": 1}}],
        [{"name": "any", "parameters": {"x": 1}}],
        [{"name": "now"}],
        good[0],
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(good, calls_schema(tools, 1))
    # names of properties, and data, are no references
    odd = {"properties": {"$ref": {"const": {"$ref": "#/a"}}}, "$defs": {"enum": {"$ref": "#/b"}}}
    moved = calls_schema({"odd": odd}, 4)["$defs"]["tool_0"]
    assert moved["properties"] == odd["properties"]
    assert moved["$defs"] == {"enum": {"$ref": "#/$defs/tool_0/b"}}
    assert moved["type"] == "object"


def test_schemas_that_are_too_long() -> None:
    schema = arguments_schema({"a": {"const": "b" * 500}}, "a")
    assert calls_grammar(schema, 1000, {}).kind == "json"
    with pytest.raises(ApiError, match="more than 500 characters") as caught:
        calls_grammar(schema, 500, {})
    assert caught.value.param == "tools"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"guided_regex": "(", "guided_choice": ["a"]}, "guided_choice", ["different"]),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": 5}}}]},
         None, ["llguidance"]),
    ],
)  # fmt: skip
def test_bad_requests(rig, body: Any, param: str | None, words: list[str]) -> None:
    server, _ = rig
    wanted = {"messages": [USER], "tools": [PICK], "tool_choice": "required"}
    assert_error(server.post(CHATS, wanted | body), 400, *words, param=param)
