"""The HTTP surface under requests that its own description makes up, valid ones and others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.specc.server.serving import MODEL, Server, serve

_CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
_QUIET = [*HealthCheck]
# fields of both kinds, with values that are served in any combination
_VALID: dict[str, list[Any]] = {
    "stream": [False, True, None],
    "max_tokens": [1, 2, 7, 10**30],
    "temperature": [0, 0.5, 1, 2.0, 1e-30, 100],
    "top_p": [1, 0.1, 1e-9],
    "n": [1, 2, None],
    "stop": [None, "a", [], ["b", "c"], ["é", "😀"], [" "] * 16],
    "seed": [0, 7, (1 << 63) - 1],
    "presence_penalty": [-2, 0, 2],
    "frequency_penalty": [-2, 0.5],
    "response_format": [None, {"type": "text"}],
    "top_k": [-1, 0, 1, 1000],
    "min_p": [0, 1],
    "repetition_penalty": [0.1, 1, 3],
    "ignore_eos": [True, False],
    "stop_token_ids": [[], [0, 5], [60]],
    "include_stop_str_in_output": [True, False],
    "skip_special_tokens": [True, False],
    "add_special_tokens": [True, False],
    "truncate_prompt_tokens": [None, -1, 50],
    "priority": [-5, 0, 5],
    "rule": [None, "coupled", "delta"],
    "speculative": [True, False],
    "return_spec_metrics": [True, False],
    "user": ["somebody"],
    "logit_bias": [{}, None, {"5": -100, "6": 3.5}],
    "min_tokens": [None, 0, 1],
    "allowed_token_ids": [None, [1, 2, 3, 60]],
    "bad_words": [None, [], ["a", "bc"]],
}
_COMPLETION = {
    "prompt": ["a", ["ab", "c"], [1, 2], [[1], [2, 3]], "ab\u0000cd", "a" * 90],
    "logprobs": [None, 0, 5],
    "suffix": [None, ""],
}
_CHAT = {
    "messages": [
        [{"role": "user", "content": "a"}],
        [{"role": "system", "content": "a"}, {"role": "user", "content": [], "name": "b"}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}], "other": {"x": 1}}],
    ],
    "max_completion_tokens": [1, 5],
    "logprobs": [True, False],
    "chat_template_kwargs": [{}, {"a": [1]}],
    "add_generation_prompt": [True, False],
    "tools": [None, []],
    "tool_choice": [None, "none", "auto"],
    "parallel_tool_calls": [None, True, False],
    "include_reasoning": [None, True, False],
    "documents": [None, [], [{"title": "a"}]],
}
_PATHS = {"completions": _COMPLETION, "chat/completions": _CHAT}
_ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def requests(draw: st.DrawFn, path: str) -> dict[str, Any]:
    """One that is served, with about half of the fields."""
    own = _PATHS[path]
    needed = next(iter(own))
    fields = _VALID | own
    chosen = {name for name in fields if draw(st.booleans())} | {needed}
    body = {name: draw(st.sampled_from(fields[name])) for name in sorted(chosen)}
    # what runs to the end of the context takes long
    body.setdefault("max_tokens", 4)
    if body.get("stream"):
        body["stream_options"] = {"include_usage": True}
    return body


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(request_timeout_s=2) as running:
        yield running


@pytest.fixture(scope="module")
def operations(server) -> list[Any]:
    schema = schemathesis.openapi.from_dict(server.get("/openapi.json").json())
    schema.config.update(base_url=server.base)
    schema.config.generation.update(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
    return [result.ok() for result in schema.get_all_operations()]


def test_the_description_names_every_path(operations) -> None:
    assert {(operation.method, operation.path) for operation in operations} == {
        *(("get", path) for path in ("/health", "/ping", "/version", "/load")),
        *(("get", path) for path in ("/metrics", "/stats", "/tokenizer_info")),
        *(("get", path) for path in ("/v1/models", "/v1/models/{model}")),
        *(("post", f"/v1/{path}") for path in ("completions", "chat/completions")),
        *(("post", f"/v1/{path}") for path in ("messages", "messages/count_tokens")),
        ("post", "/v1/responses"),
        *((method, "/v1/responses/{response_id}") for method in ("get", "delete")),
        ("post", "/v1/responses/{response_id}/cancel"),
        ("get", "/v1/responses/{response_id}/input_items"),
        *(("post", path) for path in ("/tokenize", "/detokenize")),
        ("post", "/v1/drafts/reload"),
        *(("post", path) for path in ("/sleep", "/wake_up")),
        ("get", "/is_sleeping"),
    }


def fuzz(operation: Any, max_examples: int) -> list[int]:
    """Call and check; returns the statuses."""
    statuses: list[int] = []

    @settings(quick(max_examples), phases=[Phase.explicit, Phase.generate])
    @given(case=operation.as_strategy())
    def run(case: Any) -> None:
        if operation.method == "post" and isinstance(case.body, dict):
            # any other name is answered before the rest is looked at
            case.body.pop("model", None)
            if operation.path.startswith("/v1/messages"):
                case.body["model"] = MODEL
        statuses.append(case.call_and_validate(checks=_CHECKS).status_code)

    run()
    return statuses


def quick(max_examples: int) -> Any:
    return settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        suppress_health_check=_QUIET,
        derandomize=True,
    )


def check_served(server: Server, path: str, max_examples: int) -> None:
    @quick(max_examples)
    @given(requests(path))
    def run(body: dict[str, Any]) -> None:
        answer = server.post(f"/v1/{path}", body)
        assert answer.status_code == 200, (body, answer.text)
        if not body.get("stream"):
            found = answer.json()
            choices, usage = found["choices"], found["usage"]
        else:
            *data, last = [line[6:] for line in answer.text.splitlines() if line]
            assert last == "[DONE]", (body, answer.text)
            chunks = [json.loads(item) for item in data]
            choices = [choice for chunk in chunks for choice in chunk["choices"]]
            choices = [choice for choice in choices if choice["finish_reason"]]
            usage = chunks[-1]["usage"]
        prompt = body.get("prompt")
        count = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
        indices = sorted(choice["index"] for choice in choices)
        assert indices == list(range(count * (body.get("n") or 1)))
        limit = body.get("max_completion_tokens") or body["max_tokens"]
        assert len(indices) <= usage["completion_tokens"] <= len(indices) * min(limit, 95)

    run()
    server.wait_until_idle()


def check_survives(server: Server, path: str, max_examples: int) -> None:
    names = [*_VALID, *_PATHS[path], "stream_options", "structured_outputs", "guided_json", "x"]

    @quick(max_examples)
    @given(requests(path), st.sampled_from(names), _ANYTHING)
    def run(body: dict[str, Any], name: str, value: Any) -> None:
        answer = server.post(f"/v1/{path}", body | {name: value})
        assert answer.status_code in (200, 400, 404), (body, name, value, answer.text)
        if answer.status_code != 200:
            assert list(answer.json()["error"]) == ["message", "type", "param", "code"]

    run()
    server.wait_until_idle()


@pytest.mark.parametrize("path", _PATHS)
def test_every_combination_is_served(server, path: str) -> None:
    check_served(server, path, 8)


@pytest.mark.slow
@pytest.mark.parametrize("path", _PATHS)
def test_every_combination_is_served_in_many(server, path: str) -> None:
    check_served(server, path, 200)


@pytest.mark.parametrize("path", _PATHS)
def test_anything_in_one_field(server, path: str) -> None:
    check_survives(server, path, 10)


@pytest.mark.slow
@pytest.mark.parametrize("path", _PATHS)
def test_anything_in_one_field_in_many(server, path: str) -> None:
    check_survives(server, path, 300)


@pytest.mark.default("0", "1", "4", "7", "8", "10", "12", "16", "17", "18")
@pytest.mark.parametrize("index", range(20))
def test_no_server_errors(server, operations, index: int) -> None:
    statuses = fuzz(operations[index], 10 if operations[index].method == "post" else 3)
    server.wait_until_idle()
    assert statuses


@pytest.mark.slow
@pytest.mark.parametrize("index", range(20))
def test_no_server_errors_in_many(server, operations, index: int) -> None:
    statuses = fuzz(operations[index], 300 if operations[index].method == "post" else 50)
    server.wait_until_idle()
    assert statuses
