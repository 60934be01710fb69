"""Faults of the engine, clients that vanish, and readers that are slow: what ends, what goes on."""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from specc.errors import EngineError
from tests.specc.server.serving import (
    GREEDY,
    MODEL,
    Server,
    assert_error,
    assert_harmless,
    greedy_text,
    serve,
    slow_down,
    wait_for,
)

pytestmark = pytest.mark.usefixtures("nothing_is_left")

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve() as running:
        yield running
        # after all of it
        assert running.get("/health").status_code == 200
        assert running.complete(prompt="ab", **GREEDY)["choices"][0]["text"] == greedy_text(
            running.engine, "ab", 12
        )


class Fault:
    """Makes passes fail, `count` of them after `after` that do not."""

    def __init__(self, server: Server, count: int, after: int = 0) -> None:
        runner = server.service.core.runner
        self.run = runner.run
        self.count, self.after = count, after
        runner.run = self  # type: ignore[method-assign]

    def __call__(self, batch: Any) -> Any:
        if self.after:
            self.after -= 1
        elif self.count:
            self.count -= 1
            raise RuntimeError("secret of /some/engine: device lost")
        return self.run(batch)


@pytest.mark.parametrize("n", [1, 3])
def test_a_failed_step_is_an_error_of_its_requests(server, caplog, n: int) -> None:
    body = {"prompt": "ab", "n": n} | GREEDY
    Fault(server, 1)
    with caplog.at_level(logging.CRITICAL, "specc.service"):
        error = assert_error(server.post(COMPLETIONS, body), 500, "send the request again")
    assert (error["type"], error["code"]) == ("server_error", "engine_failure")
    server.wait_until_idle()
    answer = server.complete(**body)
    assert answer["choices"][0]["text"] == greedy_text(server.engine, "ab", 12)
    assert server.get("/health").status_code == 200


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_that_fails_says_so_and_ends(server, caplog, n: int) -> None:
    Fault(server, 1, after=3)
    with caplog.at_level(logging.CRITICAL, "specc.service"):
        body = {"prompt": "ab", "stream": True, "n": n, "ignore_eos": True, "max_tokens": 60}
        answer = server.post(COMPLETIONS, body | {"temperature": 0})
    assert answer.status_code == 200
    *chunks, last = [block for block in answer.text.split("\n\n") if block]
    assert chunks
    assert_harmless(json.loads(last.removeprefix("data: "))["error"]["message"])
    assert "[DONE]" not in answer.text
    server.wait_until_idle()
    Fault(server, 1, after=3)
    with pytest.raises(openai.APIError, match="The engine failed"):
        for _ in server.client.completions.create(
            model=MODEL, prompt="ab", stream=True, max_tokens=60, extra_body={"ignore_eos": True}
        ):
            pass


def test_a_stream_that_fails_at_once_has_the_status_of_its_error(server, caplog) -> None:
    Fault(server, 1)
    with caplog.at_level(logging.CRITICAL, "specc.service"):
        assert_error(server.post(COMPLETIONS, {"prompt": "ab", "stream": True} | GREEDY), 500)


def test_an_engine_that_fails_again_and_again_is_dead(caplog) -> None:
    with serve() as server, caplog.at_level(logging.CRITICAL, "specc.service"):
        Fault(server, 100)
        health = []
        for _ in range(3):
            assert_error(server.post(COMPLETIONS, {"prompt": "ab"} | GREEDY), 500)
            answer = server.get("/health")
            health.append((answer.status_code, answer.json()["status"]))
        assert health == [(503, "failing"), (503, "failing"), (503, "dead")]
        error = assert_error(server.post(COMPLETIONS, {"prompt": "ab"}), 500, "out of use")
        assert error["code"] == "engine_failure"
        wait_for(
            lambda: 'failures_total{model_name="tiny"} 3.0' in server.get("/metrics").text,
            "no metric says so",
        )


def _raise_in_thread(server: Server) -> None:
    """An exception out of nowhere, in whatever the engine's thread does."""
    number = server.service._thread.ident
    assert number is not None
    # it comes when the thread next runs Python
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(number), ctypes.py_object(SystemExit))


def _exit_in_a_step(server: Server) -> None:
    def leave(*_: Any) -> None:
        sys.exit(3)

    server.service.core.runner.run = leave  # type: ignore[method-assign]


def _return_from_the_thread(server: Server) -> None:
    server.service._take_orders = lambda: False  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "kill",
    [
        pytest.param(_raise_in_thread, marks=pytest.mark.slow),
        _exit_in_a_step,
        pytest.param(_return_from_the_thread, marks=pytest.mark.slow),
    ],
)
def test_a_dead_engine_thread_is_seen(kill: Any, caplog) -> None:
    with serve() as server, caplog.at_level(logging.CRITICAL, "specc.service"):
        assert server.get("/health").status_code == 200
        assert server.complete(prompt="ab", **GREEDY)
        kill(server)
        # the thread sleeps: the request wakes it, and is the one that it costs
        answer = server.post(COMPLETIONS, {"prompt": "ab"} | GREEDY, timeout=10)
        assert answer.status_code >= 500 or kill is _return_from_the_thread
        server.service._thread.join(10)
        assert not server.service._thread.is_alive()
        for _ in range(3):
            for path in ("/health", "/ping"):
                found = server.get(path)
                assert (found.status_code, found.json()["status"]) == (503, "dead")
            error = assert_error(server.post(COMPLETIONS, {"prompt": "ab"}), 500, "out of use")
            assert error["code"] == "engine_failure"
        assert 'specc:engine_healthy{model_name="tiny"} 0.0' in server.get("/metrics").text


def test_a_step_that_does_not_end_is_seen(monkeypatch) -> None:
    with serve() as server:
        core, advance = server.service.core, server.service.core.advance
        is_there, goes_on = threading.Event(), threading.Event()

        def stuck() -> bool:
            is_there.set()
            assert goes_on.wait(20)
            return advance()

        core.advance = stuck  # type: ignore[method-assign]
        answers: list[Any] = []
        body = {"prompt": "ab"} | GREEDY
        thread = threading.Thread(target=lambda: answers.append(server.post(COMPLETIONS, body)))
        thread.start()
        assert is_there.wait(10)
        assert server.get("/health").status_code == 200
        monkeypatch.setattr("specc.runtime.service.service.STALLED_S", 0.3)
        wait_for(lambda: server.get("/health").status_code == 503, "nobody sees it")
        assert server.get("/health").json() == {"status": "stalled"}
        goes_on.set()
        thread.join(10)
        assert answers[0].status_code == 200
        assert server.get("/health").status_code == 200


@pytest.mark.parametrize(
    "error",
    [
        ZeroDivisionError("secret of /some/engine"),
        EngineError("secret of /some/engine was cut", "a file", "copy /some/engine again"),
    ],
)
def test_an_unexpected_error_is_told_without_its_text(server, monkeypatch, caplog, error) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(server.service, "submit", fail)
    with caplog.at_level(logging.CRITICAL):
        for more in ({}, {"stream": True}):
            answer = server.post(COMPLETIONS, {"prompt": "ab"} | more)
            found = assert_error(answer, 500, "he server failed")
            assert found["code"] == "internal_error"


def test_clients_that_vanish_leave_nothing(server) -> None:
    """While they wait for the whole answer, mid-stream, and while they wait for a place."""
    before = server.service.core.scheduler.stats.num_output_tokens
    undo = slow_down(server, 0.02)
    long = {"max_tokens": 90, "ignore_eos": True, "temperature": 0}
    host, port = server.base.removeprefix("http://").split(":")
    clients = []
    for stream in (False, True):
        for prompt in ("ab", "hello", ["a", "b", "c", "d"]):
            body = json.dumps({"prompt": prompt, "stream": stream} | long).encode()
            client = socket.create_connection((host, int(port)))
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
            client.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
            clients.append(client)
    wait_for(lambda: server.service.num_open == 12, "not all requests are in")
    wait_for(lambda: server.service.state().num_running == 3, "they do not run")
    assert server.num_free < server.engine.cache.allocator.num_blocks
    for client in clients:
        client.close()
    server.wait_until_idle()
    undo()
    counted = server.service.core.scheduler.stats.num_output_tokens - before
    # as many as those that are not streams would have had
    assert counted < 6 * 90
    assert server.complete(prompt="ab", **GREEDY)


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_whose_client_vanishes_ends(server, n: int) -> None:
    before = server.service.core.scheduler.stats.num_output_tokens
    undo = slow_down(server, 0.05)
    body = {"prompt": "ab", "stream": True, "n": n, "max_tokens": 90, "temperature": 0}
    with server.http.stream(
        "POST", server.base + COMPLETIONS, json=body | {"ignore_eos": True}
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
    server.wait_until_idle()
    undo()
    counted = server.service.core.scheduler.stats.num_output_tokens - before
    assert counted < n * 45


@pytest.mark.parametrize("n", [1, 2])
def test_what_a_slow_reader_has_not_read_is_merged(server, n: int) -> None:
    """Against the application itself: no buffer of a socket takes anything off its hands."""
    body = {"prompt": "ab", "stream": True, "n": n, "max_tokens": 60, "temperature": 0}
    body |= {"ignore_eos": True, "logprobs": 0}
    parts = asyncio.run(_blocked_stream(server, body, reads_on=True))
    assert parts[-2:] == [b"data: [DONE]\n\n", b""]
    found = [json.loads(part[6:])["choices"][0] for part in parts[:-2]]
    # the first one, what the queue held, and all others as one
    assert len(found) <= 4 * n
    for index in range(n):
        own = [choice for choice in found if choice["index"] == index]
        assert len("".join(choice["text"] for choice in own)) == 60
        offsets = [offset for choice in own for offset in choice["logprobs"]["text_offset"]]
        assert offsets == list(range(60))


@pytest.mark.parametrize("n", [1, 2])
def test_a_client_that_vanishes_while_it_does_not_read(server, n: int) -> None:
    undo = slow_down(server, 0.05)
    body = {"prompt": "ab", "stream": True, "n": n, "max_tokens": 90, "ignore_eos": True}
    before = server.service.core.scheduler.stats.num_output_tokens
    assert len(asyncio.run(_blocked_stream(server, body, reads_on=False))) == 1
    server.wait_until_idle()
    undo()
    assert server.service.core.scheduler.stats.num_output_tokens - before < n * 45


async def _blocked_stream(server: Server, body: Any, *, reads_on: bool) -> list[bytes]:
    """Parts of a stream whose reader stops after the first one: until all is done, or for good."""
    parts: list[bytes] = []
    is_blocked = asyncio.Event()
    sent = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive() -> Any:
        if sent:
            return sent.pop()
        await (asyncio.Event() if reads_on else is_blocked).wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            return
        parts.append(message["body"])
        if len(parts) == 1:
            is_blocked.set()
            while not reads_on or not server.is_idle:
                await asyncio.sleep(0.01)

    scope = {
        "type": "http", "method": "POST", "path": COMPLETIONS, "raw_path": COMPLETIONS.encode(),
        "query_string": b"", "headers": [(b"content-type", b"application/json")],
        "http_version": "1.1", "scheme": "http", "root_path": "",
    }  # fmt: skip
    await asyncio.wait_for(server.app(scope, receive, send), 20)
    return parts


def test_a_slow_reader_gets_everything_and_holds_up_nobody(server) -> None:
    body = {"prompt": "ab", "stream": True, "n": 3, "max_tokens": 90, "temperature": 0}
    with server.http.stream(
        "POST", server.base + COMPLETIONS, json=body | {"ignore_eos": True}
    ) as slow:
        lines = slow.iter_lines()
        first = next(lines)
        others: list[Any] = []
        thread = threading.Thread(
            target=lambda: others.append(server.complete(prompt="hello", **GREEDY))
        )
        thread.start()
        thread.join(20)
        assert others
        data = [first, *lines]
    texts = ["", "", ""]
    for line in data:
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                texts[choice["index"]] += choice["text"]
    assert len({*texts}) == 1
    assert len(texts[0]) == 90


def test_a_huge_prompt_holds_up_nobody(server, monkeypatch) -> None:
    """Tokenizing it is not the event loop's work."""
    begun, goes_on = threading.Event(), threading.Event()

    def tokenize(text: str, *others: object) -> list[int]:
        begun.set()
        assert goes_on.wait(10)
        return [0, 1]

    monkeypatch.setattr(server.service.core.requests, "tokenize", tokenize)
    body, answers = {"prompt": "a" * 100_000} | GREEDY, []
    thread = threading.Thread(target=lambda: answers.append(server.post(COMPLETIONS, body)))
    thread.start()
    assert begun.wait(10)
    assert server.get("/health", timeout=3).status_code == 200
    goes_on.set()
    thread.join(10)
    assert answers[0].status_code == 200
    monkeypatch.undo()


@pytest.mark.slow
def test_requests_that_take_too_long_end_with_what_they_have() -> None:
    with serve(request_timeout_s=1.5) as server:
        # a pass gives five tokens at most: 18 of them take twice as long
        slow_down(server, 0.17)
        body = {"prompt": "ab", "max_tokens": 90, "ignore_eos": True, "temperature": 0}
        (choice,) = server.complete(**body)["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "timeout")
        assert 0 < len(choice["text"]) < 90
        assert 'finished_reason="timeout",model_name="tiny"} 1.0' in server.get("/metrics").text
