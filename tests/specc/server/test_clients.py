"""What clients of OpenAI, vLLM and llama.cpp send without being asked."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from specc.sampling.generation_config import SamplingDefaults
from specc.sampling.params import SamplingParams
from specc.server.fields import UnknownFields
from specc.server.params import completion_params
from specc.server.protocol import ChatRequest, CompletionRequest, parse
from tests.specc.server.serving import GREEDY, Server, assert_error, greedy_text, serve

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
BODIES = {COMPLETIONS: {"prompt": "ab"}, CHATS: {"messages": USER}}
REQUESTS = {COMPLETIONS: CompletionRequest, CHATS: ChatRequest}


@pytest.fixture(scope="module")
def strict() -> Iterator[Server]:
    with serve(strict_fields=True) as running:
        yield running


def text_of(answer: dict[str, Any]) -> str:
    (choice,) = answer["choices"]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def ask(server: Server, path: str, **more: Any) -> str:
    answer = server.post(path, BODIES[path] | GREEDY | more)
    assert answer.status_code == 200, answer.text
    return text_of(answer.json())


def params_of(**more: Any) -> SamplingParams:
    body = {"prompt": "a", "temperature": 1} | more
    return completion_params(parse(CompletionRequest, body), SamplingDefaults())


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_nulls_are_absent(strict, path: str) -> None:
    """Each known field, and any other: even where unknown fields are refused."""
    want = ask(strict, path)
    names = REQUESTS[path].names() - {"prompt", "messages", *GREEDY}
    unknown = ("kv_transfer_params", "tool_prompt", "vllm_xargs", "x", "suffix")
    assert ask(strict, path, **dict.fromkeys([*names, *unknown])) == want
    nested = {
        "stream_options": {"include_usage": None, "x": None},
        "response_format": {"type": "text", "json_schema": None, "x": None},
        "logit_bias": {"5": None},
    }
    assert ask(strict, path, **nested) == want
    error = assert_error(strict.post(path, {name: None for name in BODIES[path]}), 400)
    assert error["code"] == "missing_required_parameter"


def test_nulls_of_messages_and_tools_are_absent(server) -> None:
    function = {"name": "f", "description": None, "parameters": {"const": None}, "strict": None}
    call = {"id": "1", "type": "function", "index": None,
            "function": {"name": "f", "arguments": "{}", "x": None}}  # fmt: skip
    request = parse(ChatRequest, {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a", "x": None}], "name": None},
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        ],
        "tools": [{"type": None, "function": function, "x": None}],
    })  # fmt: skip
    found = request.model_dump(exclude_unset=True)
    assert found["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        ]},
    ]  # fmt: skip
    # what a schema says is no field
    assert found["tools"] == [
        {"type": "function", "function": {"name": "f", "parameters": {"const": None}}}
    ]


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_unknown_fields_are_left_out_and_logged_once(server, caplog, path: str) -> None:
    want = ask(server, path)
    name = f"unheard_of_{len(path)}"
    with caplog.at_level(logging.WARNING, "specc.serve"):
        for _ in range(3):
            more = {name: {"a": [1]}, "response_format": {"type": "text", f"{name}_too": 1}}
            assert ask(server, path, **more) == want
    messages = [record.getMessage() for record in caplog.records]
    assert [sum(f"'{found}'" in m for m in messages) for found in (name, f"{name}_too")] == [1, 1]
    # fields of OpenAI's API that change nothing here are known
    caplog.clear()
    ask(server, path, user="me", store=True, metadata={"a": "b"}, verbosity="low")
    assert not caplog.records


def test_clients_cannot_fill_the_log(caplog) -> None:
    unknown = UnknownFields()
    for i in range(1000):
        unknown.note(f"{i}\n" * 1000)
    assert len(caplog.records) == len(unknown._names) == 256
    assert "no further names" in caplog.records[-1].getMessage()
    assert len(caplog.text) < 256 * 300
    assert all("\n" not in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"max_token": 5}, "Did you mean max_tokens?"),
        ({"nonsense": 5}, "leave it out"),
        ({"x" * 100_000: 5}, "xxx"),
        ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
        ({"response_format": {"type": "text", "other": 1}}, "response_format.other"),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_strict_fields_refuse_them(strict, path: str, field: Any, words: str) -> None:
    error = assert_error(strict.post(path, BODIES[path] | field), 400, words)
    assert error["code"] == "unknown_parameter"


def test_the_description_says_which_fields_are_taken(server, strict) -> None:
    for running, is_open in ((server, True), (strict, False)):
        schemas = running.get("/openapi.json").json()["components"]["schemas"]
        for name in ("CompletionRequest", "ChatRequest", "StreamOptions", "StructuredOutputs"):
            assert ("additionalProperties" not in schemas[name]) is is_open
        assert {"functions", "function_call"} <= schemas["ChatRequest"]["properties"].keys()


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
GRAMMAR = "start: /[0-9]{3}/"


@pytest.mark.parametrize(
    "forms",
    [
        # guidance's client for vLLM sends both names
        {"guided_grammar": GRAMMAR, "structured_outputs": {"grammar": GRAMMAR},
         "guided_decoding_backend": "guidance"},
        {"guided_json": SCHEMA, "structured_outputs": {"json": SCHEMA}},
        {"guided_json": '{"type": "object", "properties": {"a": {"type": "integer"}}}',
         "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}, "guided_json": SCHEMA},
        {"response_format": {"type": "json_object"}, "structured_outputs": {"json_object": True}},
        {"guided_json": SCHEMA, "structured_outputs": {"whitespace_pattern": " ?"}},
        {"response_format": {"type": "json_object"}, "guided_whitespace_pattern": " ?"},
    ],
)  # fmt: skip
def test_two_forms_that_agree_are_one(forms: dict[str, Any]) -> None:
    params = params_of(**forms)
    has_pattern = "whitespace" in str(forms)
    assert params.structured_outputs.whitespace_pattern == (" ?" if has_pattern else None)
    alone = params_of(**dict([next(iter(forms.items()))]))
    assert params.structured_outputs.text == alone.structured_outputs.text


@pytest.mark.parametrize(
    ("forms", "words"),
    [
        ({"guided_grammar": GRAMMAR, "structured_outputs": {"grammar": "start: /a/"}},
         ["guided_grammar", "structured_outputs"]),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, ["guided_json", "guided_regex"]),
        ({"guided_choice": ["a"], "response_format": {"type": "json_object"}},
         ["guided_choice", "response_format"]),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": " ",
          "structured_outputs": {"whitespace_pattern": ""}}, ["whitespace", "structured_outputs"]),
        ({"structured_outputs": {"whitespace_pattern": " ?"}}, ["without a form"]),
        ({"guided_whitespace_pattern": " ?"}, ["without a form"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_two_forms_that_differ_are_refused(server, path: str, forms: Any, words: Any) -> None:
    error = assert_error(server.post(path, BODIES[path] | forms), 400, *words)
    assert error["param"] in forms


def test_a_form_that_cannot_be_compiled_is_blamed(server) -> None:
    pytest.importorskip("llguidance")
    for forms in (
        {"guided_regex": "("},
        {"structured_outputs": {"grammar": "start: ("}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
    ):
        for path in (COMPLETIONS, CHATS):
            error = assert_error(server.post(path, BODIES[path] | forms), 400)
            assert error["param"] in forms


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_whole_numbers_may_have_a_point(server, path: str) -> None:
    exact = {"max_tokens": 5, "n": 1, "top_k": 3, "seed": 7, "min_tokens": 2, "priority": 1}
    ids = {"stop_token_ids": [59, 60], "allowed_token_ids": [*range(61)]}
    more = {"temperature": 1.5}
    want = ask(server, path, **exact, **ids, **more)
    points = {name: float(value) for name, value in exact.items()}
    points |= {name: [*map(float, values)] for name, values in ids.items()}
    assert ask(server, path, **points, **more) == want
    if path == COMPLETIONS:
        for prompt in ([1, 2, 3], [[1, 2, 3]]):
            pointed = [1.0, 2.0, 3.0] if prompt[0] == 1 else [[1.0, 2, 3.0]]
            assert ask(server, path, prompt=pointed) == ask(server, path, prompt=prompt)
    assert_error(server.post(path, BODIES[path] | {"max_tokens": 5.5}), 400, param="max_tokens")
    assert_error(server.post(path, BODIES[path] | {"max_tokens": "5"}), 400, param="max_tokens")


def test_seeds_and_limits_below_zero(server) -> None:
    assert params_of(seed=-1).seed is None
    seeds = [params_of(seed=seed).seed for seed in (0, 1, -2, -3, -(1 << 63), (1 << 63) - 1)]
    assert len(set(seeds)) == len(seeds) - 1  # the lowest one is 0's
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    for path in (COMPLETIONS, CHATS):
        body = BODIES[path] | {"temperature": 1.5, "max_tokens": 12, "seed": -7}
        assert (
            server.post(path, body).json()["choices"] == server.post(path, body).json()["choices"]
        )
        # -1 fills the context, as at llama.cpp
        body = BODIES[path] | {"max_tokens": -1, "ignore_eos": True, "temperature": 0}
        assert server.post(path, body).json()["usage"]["total_tokens"] == 96
        assert_error(server.post(path, BODIES[path] | {"max_tokens": -2}), 400, param="max_tokens")
    body = {"messages": USER, "max_completion_tokens": -1, "max_tokens": 3, "ignore_eos": True}
    assert server.post(CHATS, body).json()["usage"]["total_tokens"] == 96


def test_no_best_tokens_need_no_logprobs(server) -> None:
    assert ask(server, CHATS, top_logprobs=0) == ask(server, CHATS)


def test_texts_by_other_names(server) -> None:
    """Of OpenAI's Responses, of a refusal, of Mistral's thinking, and without a name."""
    want = ask(server, CHATS, messages=[{"role": "user", "content": "hi"}])
    for part in (
        "hi",
        {"text": "hi"},
        {"type": "input_text", "text": "hi"},
        {"type": "output_text", "text": "hi", "annotations": []},
        {"type": "refusal", "refusal": "hi"},
        {"type": "thinking", "thinking": "hi"},
    ):
        assert ask(server, CHATS, messages=[{"role": "user", "content": [part]}]) == want
    for part in (5, {"type": "refusal", "text": "hi"}, {"type": 5, "text": "hi"}, {"a": "hi"}):
        body = {"messages": [{"role": "user", "content": [part]}]}
        assert_error(server.post(CHATS, body), 400)


def test_an_answer_is_the_targets_own_in_spite_of_it_all(server) -> None:
    """Everything at once, as a client of vLLM's may send it."""
    body = {
        "kv_transfer_params": None, "vllm_xargs": {"a": 1}, "mm_processor_kwargs": None,
        "seed": -1, "max_tokens": 12.0, "temperature": 0, "request_id": "r", "n": 1.0,
        "guided_json": None, "best_of": None, "logprobs": None, "stream_options": {},
        "truncate_prompt_tokens": None, "detokenize": True, "prompt": "ab",
    }  # fmt: skip
    answer = server.complete(**body)
    assert text_of(answer) == greedy_text(server.engine, "ab", 12)
    assert answer["id"] == "cmpl-r"
