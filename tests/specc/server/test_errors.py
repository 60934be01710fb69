"""Bad input and overload: what clients are told, and that the server goes on."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from specc.server.body import parse_object
from tests.specc.server.serving import (
    GREEDY,
    MODEL,
    Server,
    assert_error,
    greedy_text,
    serve,
    slow_down,
)

pytestmark = pytest.mark.usefixtures("nothing_is_left")

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(max_body_bytes=4 << 20, body_timeout_s=0.2) as running:
        yield running
        # after all of it
        assert running.get("/health").status_code == 200
        assert running.complete(prompt="ab", **GREEDY)["choices"][0]["text"] == greedy_text(
            running.engine, "ab", 12
        )


BAD = {
    "temperature": (-0.1, "hot", 1e300, [1], True),
    "top_p": (0, 1.5, -1, "x"),
    "top_k": (-2, 1.5, 10**30, "all"),
    "min_p": (-0.5, 2),
    "max_tokens": (0, -5, 1.5, "5", True, {}),
    "n": (0, -1, 129, 10**30, "2", 1.5),
    "seed": (-(1 << 63) - 1, 1 << 63, "x", 0.5),
    "presence_penalty": (2.5, -3, "x"),
    "frequency_penalty": (2.5, -3),
    "repetition_penalty": (0, -1, 1e300),
    "stop": ("", [""], [1], 5, {"a": 1}, ["x"] * 17, "y" * 1025, ["z" * 400] * 3),
    "stop_token_ids": ([-1], [61], [1 << 70], ["a"], 5, [1.5], [1] * 257),
    "ignore_eos": (1, "yes"),
    "rule": ("best", 3),
    "priority": (1 << 31, 1.5, "high"),
    "stream": (1, "true"),
    "stream_options": ({"include_usage": True}, {"include_usage": 1}, [], True),
    "response_format": ({"type": "xml"}, {"type": "json_schema"}, {}, "json", {"type": 5}),
    "structured_outputs": ({}, {"regex": "a", "choice": ["b"]}, {"regex": 5}, {"other": 1}, 5),
    "guided_choice": ([], [1], "a"),
    "logit_bias": ({"1": 101}, {"x": 1}, {"61": 1}, {"-1": 1}, {"1": "a"}, [1]),
    "allowed_token_ids": ([], [-1], [61], ["a"], [1.5], 5),
    "bad_words": ([" "], [""], [1], "a", ["a" * 16385], ["a"] * 1025, ["é"]),
    "tools": ([{"type": "function"}],),
    "min_tokens": (-1, 17, 1.5, "a"),
    "model": (5, ["tiny"]),
}


@pytest.mark.parametrize("field", BAD)
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_bad_values(server, path: str, field: str) -> None:
    # both kinds share these fields: one value shows that the second has them
    for value in BAD[field] if path == COMPLETIONS else BAD[field][:1]:
        body = {"prompt": "ab"} if path == COMPLETIONS else {"messages": USER}
        error = assert_error(server.post(path, body | {field: value}), 400)
        assert error["type"] == "invalid_request_error"
        known = {"response_format", "structured_outputs", "guided_choice", "stream_options"}
        if field not in known:
            assert (error["param"] or "").startswith(field), (value, error)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, ["prompt"]),
        ({"prompt": None}, ["prompt"]),
        ({"prompt": []}, ["prompt"]),
        ({"prompt": ""}, ["no tokens"]),
        ({"prompt": [[]]}, ["no tokens"]),
        ({"prompt": ["ab", ""]}, ["no tokens"]),
        ({"prompt": 5}, ["prompt"]),
        ({"prompt": {"a": 1}}, ["prompt"]),
        ({"prompt": [1, "a"]}, ["prompt"]),
        ({"prompt": [True]}, ["prompt"]),
        ({"prompt": [1.5]}, ["prompt"]),
        ({"prompt": [-1]}, ["token id -1", "0 … 60"]),
        ({"prompt": [10**30], "echo": True}, ["token id"]),
        ({"prompt": [61]}, ["token id 61"]),
        ({"prompt": "a" * 96}, ["maximum context length is 96 tokens", "at most 95"]),
        ({"prompt": ["ab", "a" * 96]}, ["prompt 1 has 96 tokens"]),
        ({"prompt": ["ab", "", "c"]}, ["Prompt 1 has no tokens"]),
        ({"prompt": [[1], [1, 2], [61]]}, ["Prompt 2 holds token id 61"]),
        ({"prompt": "a" * 100_000}, ["100000 tokens"]),
        ({"prompt": ["ab"] * 129}, ["129 outputs"]),
        ({"prompt": ["ab"] * 65, "n": 2}, ["130 outputs"]),
        ({"prompt": "ab", "n": 3, "best_of": 2}, ["best_of=2"]),
        ({"prompt": ["ab"] * 65, "best_of": 2}, ["130 outputs"]),
        ({"prompt": "ab", "logprobs": 21}, ["logprobs=21"]),
        ({"prompt": "ab", "logprobs": -1}, ["logprobs=-1"]),
        ({"prompt": "ab", "suffix": "x"}, ["suffix"]),
    ],
)  # fmt: skip
def test_bad_completions(server, body: Any, words: list[str]) -> None:
    assert_error(server.post(COMPLETIONS, body), 400, *words)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": []},
        {"messages": "hi"},
        {"messages": [{"content": "hi"}]},
        {"messages": [{"role": "", "content": "hi"}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        # the template calls raise_exception
        {"messages": [{"role": "tool", "content": "hi"}]},
        {"messages": USER, "top_logprobs": 2},
        {"messages": USER, "function_call": {"name": "a"}},
        {"messages": USER, "function_call": "required", "functions": [{"name": "a"}]},
        {"messages": USER, "functions": [{}]},
        {"messages": USER, "logprobs": True, "top_logprobs": 21},
        {"messages": USER, "logprobs": 2},
        {"messages": USER, "max_completion_tokens": 0},
        {"messages": USER, "chat_template_kwargs": 5},
        {"messages": [{"role": "user", "content": "a" * 200}]},
    ],
)
def test_bad_chats(server, body: Any) -> None:
    assert_error(server.post(CHATS, body), 400)


def test_harmless_fields_change_nothing(server) -> None:
    more = {"user": "me", "logit_bias": {}, "tools": None, "store": False, "metadata": {"a": "b"}}
    null = {"stop": None, "n": None, "stream": None, "response_format": {"type": "text"}}
    answer = server.complete(prompt="ab", **GREEDY, **more, **null)
    assert answer["choices"][0]["text"] == greedy_text(server.engine, "ab", 12)


BODIES = {
    "no json": (b"{", "Malformed JSON"),
    "empty": (b"", "Malformed JSON"),
    "text": (b"hello", "Malformed JSON"),
    "trailing": (b'{"prompt": "ab"} x', "Malformed JSON"),
    "array": (b'["ab"]', "array"),
    "null": (b"null", "null"),
    "number": (b"5", "number"),
    "nan": (b'{"prompt": "ab", "temperature": NaN}', "NaN"),
    "a key twice": (b'{"prompt": "ab", "prompt": "abc", "temperature": 0}', "'prompt' twice"),
    "a key twice within": (b'{"prompt": "ab", "logit_bias": {"1": 1, "1": 2}}', "'1' twice"),
    "a key twice, escaped": (b'{"prompt": "ab", "\\u0070rompt": "abc"}', "'prompt' twice"),
    "a key twice in many": (
        b'{"prompt": "ab", "a": {%s}}' % b",".join(b'"%d":1' % (i % 9999) for i in range(10_000)),
        "'0' twice",
    ),
    "infinity": (b'{"prompt": "ab", "temperature": -Infinity}', "-Infinity"),
    "overflow": (b'{"prompt": "ab", "temperature": 1e999}', "temperature"),
    "long integer": (b'{"prompt": "ab", "seed": ' + b"9" * 5000 + b"}", "too long"),
    "latin-1": ('{"prompt": "caf\xe9"}'.encode("latin-1"), "no UTF-8 at byte 15"),
    "utf-16": ('{"prompt": "ab"}'.encode("utf-16"), "no UTF-8"),
    "surrogate": (b'{"prompt": "\\ud800"}', "lone surrogate"),
    "surrogate name": (b'{"prompt": "ab", "\\udc00x": 1}', "lone surrogate"),
    "deep": (b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", "levels"),
    "too deep to parse": (
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "16384 lists and objects",
    ),
    "deep object": (b'{"a":' * 70 + b"1" + b"}" * 70, "levels"),
    "many lists": (b'{"prompt": [' + b",".join([b"[]"] * 300_000) + b"]}", "A body of more"),
    "many fields": (
        b"{" + b",".join(b'"%d":1' % i for i in range(210_000)) + b"}", "A body of more"
    ),
    "many strings": (b'{"user": [' + b",".join([b'""'] * 510_000) + b"[[" * 200_000, "16384 lists"),
    "many numbers": (b'{"prompt": [' + b",".join([b"1"] * 1_050_000) + b"]}", "1048576 values"),
    "a string without end": (b'{"prompt": "' + b"[\\" * 300_000, "Malformed JSON"),
    "a million stop strings": (
        b'{"prompt": "ab", "stop": [' + b",".join([b'"x"'] * 250_000) + b"]}",
        "250000 stop strings",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_bad_bodies(server, name: str) -> None:
    body, word = BODIES[name]
    headers = {"content-type": "application/json"}
    assert_error(server.post(COMPLETIONS, content=body, headers=headers), 400, word)


def test_a_pair_of_surrogates_is_text(server) -> None:
    """As JSON writes characters beyond the first plane; the tiny tokenizer has none of it."""
    headers = {"content-type": "application/json"}
    body = b'{"prompt": "ab\\ud83d\\ude00", "max_tokens": 1}'
    assert server.post(COMPLETIONS, content=body, headers=headers).status_code == 200


def test_brackets_and_commas_of_a_text_are_no_values() -> None:
    text = 'x[0] = {"a": 1}, \\ "b"' * 30_000 + ":" * 300_000 + "," * 1_100_000
    assert parse_object(json.dumps({"prompt": text}).encode()) == {"prompt": text}
    numbers = list(range(150_000))
    assert parse_object(json.dumps({"prompt": [numbers] * 2}).encode())["prompt"][1] == numbers


def test_large_bodies(server) -> None:
    headers = {"content-type": "application/json"}
    large = b'{"prompt": "' + b"a" * (4 << 20) + b'"}'
    assert_error(server.post(COMPLETIONS, content=large, headers=headers), 413, "4194304 bytes")

    def parts() -> Iterator[bytes]:
        for _ in range(80):
            yield b" " * (64 << 10)

    # without a length, what comes is counted
    answer = server.post(COMPLETIONS, content=parts(), headers=headers)
    assert_error(answer, 413)


def test_a_body_that_does_not_come(server) -> None:
    with socket.create_connection(server.base.removeprefix("http://").split(":")) as client:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        client.sendall(f'{head}Content-Length: 100\r\n\r\n{{"prompt"'.encode())
        client.settimeout(10)
        assert client.recv(100).startswith(b"HTTP/1.1 408")


def test_other_types_paths_and_methods(server) -> None:
    headers = {"content-type": "text/plain"}
    answer = server.post(COMPLETIONS, content=b'{"prompt": "ab"}', headers=headers)
    assert_error(answer, 415, "application/json")
    assert_error(server.get("/v1/nothing"), 404)
    assert_error(server.get("/../../etc/passwd"), 404)
    assert_error(server.get("/v1/models/gpt"), 404, "gpt")
    answer = server.get(COMPLETIONS)
    assert_error(answer, 405, "POST")
    assert answer.headers["allow"] == "POST"
    assert_error(server.post("/health"), 405)
    error = assert_error(server.post(COMPLETIONS, {"prompt": "ab", "model": "gpt"}), 404, "gpt")
    assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_the_client_raises_its_own_errors(server) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.client.completions.create(model=MODEL, prompt="ab", max_tokens=0)
    assert caught.value.param == "max_tokens"
    assert "max_tokens=0; expected 1 or more" in caught.value.message
    with pytest.raises(openai.NotFoundError):
        server.client.chat.completions.create(model="gpt", messages=USER)


def test_no_template_no_chats() -> None:
    with serve(template=None) as server:
        assert_error(server.post(CHATS, {"messages": USER}), 400, "--chat-template")
        assert server.complete(prompt="ab", **GREEDY)


def test_too_many_requests() -> None:
    with serve(max_waiting=1) as server:
        undo = slow_down(server, 0.05)
        # two choices more than may wait, as long as none of them runs
        body = {"prompt": ["ab"] * 6, "max_tokens": 90, "ignore_eos": True}
        answer = server.post(COMPLETIONS, body)
        error = assert_error(answer, 503, "wait already")
        assert answer.headers["retry-after"] == "1"
        assert (error["type"], error["code"]) == ("overloaded_error", "overloaded")
        # those that were handed in before it are gone, too
        server.wait_until_idle()
        undo()
        assert server.service.core.scheduler.stats.num_output_tokens < 90
        assert server.complete(prompt="ab", **GREEDY)


def test_keys() -> None:
    with serve(api_keys=("one", "two")) as server:
        for key, status in (("one", 200), ("two", 200), ("three", 401), ("on", 401)):
            headers = {"authorization": f"Bearer {key}"}
            answer = server.get("/v1/models", headers=headers)
            assert answer.status_code == status
        for headers in ({}, {"authorization": "one"}, {"authorization": b"Bearer \xff\xfe"}):
            answer = server.post(COMPLETIONS, {"prompt": "ab"}, headers=headers)
            error = assert_error(answer, 401)
            assert error["type"] == "authentication_error"
        for path in ("/health", "/metrics", "/stats", "/", "/ping", "/version", "/load"):
            assert server.get(path).status_code == 200
        # what the server can do is told to those who may use it
        assert_error(server.get("/openapi.json"), 401)
        headers = {"authorization": "Bearer one"}
        assert server.get("/openapi.json", headers=headers).json()["openapi"]
        server.key = "two"
        assert server.client.completions.create(model=MODEL, prompt="ab", max_tokens=1)
        server.client.api_key = "three"
        with pytest.raises(openai.AuthenticationError):
            server.client.models.list()
