"""Whatever fails on the way to a message is told in the form of Anthropic's errors."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import pytest
from anthropic.types.shared import ErrorResponse

from tests.api_attackers import Messages
from tests.attackers import ask
from tests.specc.server.messages.test_messages import client
from tests.specc.server.serving import (
    MODEL,
    Server,
    assert_error,
    assert_harmless,
    serve,
    slow_down,
    wait_for,
)

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
USER: Any = {"role": "user", "content": "hi"}
BODY: dict[str, Any] = {"model": MODEL, "messages": [USER], "max_tokens": 4}
ERRORS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
    404: "not_found_error", 405: "invalid_request_error", 413: "request_too_large",
    415: "invalid_request_error", 529: "overloaded_error",
}  # fmt: skip


def check(answer: Any, status: int, *words: str) -> None:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert list(body) == ["type", "error", "request_id"]
    assert list(body["error"]) == ["type", "message"]
    assert body["error"]["type"] == ERRORS[status]
    if status != 413:  # which the API's description has, and the package has not
        ErrorResponse.model_validate(body)
    assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    assert_harmless(body["error"]["message"].removeprefix("prompt is too long: "))
    for word in words:
        assert word in body["error"]["message"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(max_body_bytes=20_000, allowed_hosts=("localhost",)) as running:
        yield running


@pytest.mark.parametrize("path", [PATH, COUNT, PATH + "/"])
def test_bad_requests(server, path: str) -> None:
    check(server.post(path, BODY | {"model": "x"}), 404, "'x'", MODEL)
    check(server.post(path, {"model": MODEL}), 400, "'messages'")
    image = {"messages": [{"role": "user", "content": [{"type": "image"}]}]}
    check(server.post(path, BODY | image), 400, "'image'")
    headers = {"Content-Type": "application/json"}
    check(server.post(path, content=b"{", headers=headers), 400, "alformed JSON")
    check(server.post(path, content=b"[" * 5000, headers=headers), 400, "JSON")
    check(server.post(path, content=b"[1]", headers=headers), 400, "JSON array")
    check(server.post(path, content=b"\xff", headers=headers), 400, "UTF-8")
    check(
        server.post(path, content=b"{}", headers={"Content-Type": "text/plain"}),
        415,
        "application/json",
    )
    check(server.post(path, content=b" " * 30_000, headers=headers), 413, "20000 bytes")
    check(server.get(path), 405, "POST")
    old = {"Anthropic-Version": "2023-01-01"}
    check(server.post(path, BODY, headers=old), 400, "2023-06-01", "2023-01-01")
    check(server.post(path, BODY, headers={"Host": "evil.example"}), 403, "evil.example")
    # of the chat template, and of a prompt that is too long
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    check(server.post(path, BODY | {"tools": tools}), 400, "--enable-auto-tool-choice")
    long = {"messages": [{"role": "user", "content": "a" * 500}]}
    if not path.startswith(COUNT):
        check(server.post(path, BODY | long), 400, "prompt is too long: ", "tokens")


def test_paths_that_are_not_there(server) -> None:
    check(server.post(f"{PATH}/batches", {"requests": []}), 404, "batches")
    check(server.get(f"{PATH}/batches/1/results"), 404, "batches")
    # elsewhere, errors are OpenAI's
    assert_error(server.post("/v1/messages2", {}), 404)
    assert_error(server.post("/v1/chat/completions", BODY | {"model": "x"}), 404)


def test_the_client_knows_what_failed(server) -> None:
    create: Any = client(server).messages.create
    with pytest.raises(anthropic.NotFoundError, match="not_found_error") as caught:
        create(**BODY | {"model": "x"})
    assert caught.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="max_tokens=-1"):
        create(**BODY | {"max_tokens": -1})
    headers = {"X-Request-Id": "mine"}
    answer = create(**BODY, extra_headers=headers)
    assert (answer._request_id, answer.id) == ("mine", "msg_mine")
    assert answer.usage.output_tokens <= 4


def test_keys_as_both_kinds_of_clients_send_them() -> None:
    with serve(api_keys=("secret", "other")) as server:
        for headers in (
            {"X-Api-Key": "secret"},
            {"X-Api-Key": "other", "Authorization": "Bearer no"},
            {"Authorization": "Bearer secret", "X-Api-Key": "no"},
        ):
            assert server.post(PATH, BODY, headers=headers).status_code == 200
            assert server.get("/v1/models", headers=headers).status_code == 200
        for headers in (
            {},
            {"X-Api-Key": "secre"},
            {"X-Api-Key": ""},
            {"Authorization": "secret"},
            {"X-Api-Key": "Bearer secret"},
        ):
            check(server.post(PATH, BODY, headers=headers), 401, "X-Api-Key")
            assert_error(server.get("/v1/models", headers=headers), 401)
        assert client(server, api_key="secret").messages.create(**BODY).role == "assistant"
        with pytest.raises(anthropic.AuthenticationError):
            client(server, api_key="no").messages.create(**BODY)
        # of others' prompts nothing is told
        usage = server.post(PATH, BODY, headers={"X-Api-Key": "secret"}).json()["usage"]
        assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (5, 0)


def test_overload() -> None:
    with serve(max_waiting=1) as server:
        undo = slow_down(server, 1.0)
        with ThreadPoolExecutor(1) as thread:
            # it waits until the next step is over
            first = thread.submit(server.post, PATH, BODY)
            wait_for(lambda: server.service.num_open == 1, "it is not there")
            answer = server.post(PATH, BODY)
            undo()
            check(answer, 529, "wait already")
            assert answer.headers["retry-after"] == "1"
            assert first.result().status_code == 200
        server.wait_until_idle()


def test_what_breaks_in_a_stream_is_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve() as server:
        from specc.server.messages.answer import MessageWriter

        def fail(*_: Any) -> bytes:
            raise RuntimeError("/secret")

        monkeypatch.setattr(MessageWriter, "end", fail)
        answer = server.post(PATH, BODY | {"stream": True})
        name, data = answer.text.strip().split("\n\n")[-1].split("\n")
        assert name == "event: error"
        error = json.loads(data.removeprefix("data: "))
        assert error["error"]["type"] == "api_error"
        assert error["request_id"] == answer.headers["request-id"]
        assert "secret" not in answer.text
        server.wait_until_idle()


def test_a_client_that_goes_ends_its_message(server) -> None:
    body = BODY | {"max_tokens": 90, "ignore_eos": True, "stream": True}
    undo = slow_down(server, 0.02)
    with server.http.stream("POST", server.base + PATH, json=body) as answer:
        next(answer.iter_bytes())
    undo()
    server.wait_until_idle()


def test_what_attackers_send_is_answered() -> None:
    """The attack itself, once: all of it is read and answered, and nothing is left of it."""
    with serve(request_timeout_s=2, model_names=("engine", MODEL)) as server:
        port = int(server.base.rpartition(":")[2])
        statuses = [
            asyncio.run(ask(port, data, 60))[0] for data in Messages(port, Counter()).payloads
        ]
        # prompts that are too long, or blocks and bodies that are refused
        assert set(statuses) == {400, 200}, statuses
        assert server.post(PATH, BODY).status_code == 200
        server.wait_until_idle()
