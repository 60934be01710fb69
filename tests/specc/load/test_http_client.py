"""The HTTP client of loads against servers: a tiny one of known answers, and specc's own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from yarl import URL

from specc.errors import ConfigError
from specc.load import http_client
from specc.load.http_client import HttpClient, parse_base_url
from specc.load.request import LoadRequest
from specc.load.run import ClientLimits, run_load
from tests.specc.load.test_server_counters import METRICS
from tests.specc.server.serving import serve
from tests.tiers import every


def chunk(text: str, done: int | None = None, **choice: Any) -> str:
    event: dict[str, Any] = {"choices": [{"index": 0, "text": text} | choice]}
    if done is not None:
        event["usage"] = {"prompt_tokens": 5, "completion_tokens": done}
    return f"data: {json.dumps(event)}\n\n"


END = chunk("", finish_reason="length")
USAGE = 'data: {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 7}}\n\n'
DONE = "data: [DONE]\n\n"
PAUSE = object()


class TinyServer:
    """Speaks just enough HTTP, in any pieces; keeps what it was sent.

    Args:
        pieces: of the body of a completion, strings and pauses.
        framing: `chunked`, `length` or `close`.
        ends: False breaks off in the middle.
        is_torn: every piece reaches the client in two halves.
    """

    def __init__(self, pieces, status="200 OK", framing="chunked", ends=True, is_torn=False):
        self.pieces, self.status, self.framing, self.ends = pieces, status, framing, ends
        self.is_torn = is_torn
        self.bodies: list[Any] = []
        self.headers: list[str] = []
        self.num_gone = 0

    async def handle(self, reader, writer) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        sizes = re.findall(r"Content-Length: (\d+)", head)
        body = await reader.readexactly(int(sizes[0]) if sizes else 0)
        path = head.split()[1]
        self.headers.append(head)
        if path.endswith("/models"):
            self.answer(writer, '{"data": [{"id": "tiny"}, {"id": "b"}]}')
        elif path.endswith("/metrics"):
            self.answer(writer, METRICS)
        else:
            self.bodies.append(json.loads(body))
            await self.stream(reader, writer)
        with contextlib.suppress(ConnectionError):
            writer.close()
            await writer.wait_closed()

    def answer(self, writer, text: str) -> None:
        data = text.encode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(data) + data)

    async def stream(self, reader, writer) -> None:
        whole = "".join(piece for piece in self.pieces if isinstance(piece, str)).encode()
        framing = {
            "chunked": "Transfer-Encoding: chunked\r\n",
            "length": f"Content-Length: {len(whole)}\r\n",
            "close": "",
        }[self.framing]
        writer.write(f"HTTP/1.1 {self.status}\r\n{framing}\r\n".encode())
        for piece in self.pieces:
            if piece is PAUSE:
                await writer.drain()
                gone = asyncio.ensure_future(reader.read(1))
                await asyncio.wait({gone}, timeout=0.1)
                if gone.done():
                    self.num_gone += 1
                    return
                gone.cancel()
                continue
            data = piece.encode()
            if self.framing == "chunked":
                data = b"%x\r\n%s\r\n" % (len(data), data)
            if self.is_torn:
                writer.write(data[: len(data) // 2])
                await writer.drain()
                await asyncio.sleep(0.02)
                data = data[len(data) // 2 :]
            writer.write(data)
        if self.framing == "chunked" and self.ends:
            writer.write(b"0\r\n\r\n")
        await writer.drain()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[URL]:
        server = await asyncio.start_server(self.handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            yield parse_base_url(f"http://127.0.0.1:{port}/some/v1/")


def request(index: int = 0) -> LoadRequest:
    return LoadRequest(index, 0.0, "abcde", None, 7)


def ask(server: TinyServer, count: int = 1, limits: ClientLimits | None = None, **options: Any):
    async def run():
        async with server.running() as base, HttpClient(base, **options) as client:
            await client.connect()
            return await run_load([request(i) for i in range(count)], client, limits)

    with pytest.MonkeyPatch.context() as patch:
        # its counters are what they will be
        patch.setattr(http_client, "_SETTLE_S", 0.0)
        return asyncio.run(run())


@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
def test_a_stream_tells_its_tokens(framing):
    server = TinyServer(
        [chunk("a", 1), PAUSE, chunk("bc", 4), chunk("d", 7), END, USAGE, DONE], framing=framing
    )
    run = ask(server, seed=3, temperature=0.5, api_key="key")
    one = run.results[0]
    assert one.error is None
    assert [part.num_tokens for part in one.chunks] == [1, 3, 3]
    # the server pauses for 0.1 s; half of that leaves room for a busy machine
    assert one.chunks[1].time_s - one.chunks[0].time_s >= 0.05
    assert (one.num_prompt_tokens, one.num_output_tokens, one.finish_reason) == (5, 7, "length")
    assert server.bodies == [
        {
            "model": "tiny",
            "prompt": "abcde",
            "max_tokens": 7,
            "temperature": 0.5,
            "seed": 3,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
    ]
    assert server.headers[-2].startswith("POST /some/v1/completions HTTP/1.1\r\n")
    assert "Authorization: Bearer key\r\n" in server.headers[-2]


def test_a_server_that_counts_only_at_the_end():
    server = TinyServer([chunk("a"), chunk(""), chunk("b"), END, USAGE, DONE])
    one = ask(server).results[0]
    assert [part.num_tokens for part in one.chunks] == [1, 1]
    assert one.num_output_tokens == 7


def test_events_may_be_cut_anywhere():
    text = chunk("ä", 1) + ": a comment\r\n\r\n" + chunk("b", 7).replace("\n", "\r\n") + END + DONE
    server = TinyServer(list(text))
    one = ask(server).results[0]
    assert [part.num_tokens for part in one.chunks] == [1, 6]


@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
def test_pieces_may_be_torn(framing):
    pieces = [chunk("a", 1), chunk("b", 7), END, DONE]
    one = ask(TinyServer(pieces, framing=framing, is_torn=True)).results[0]
    assert one.error is None
    assert [part.num_tokens for part in one.chunks] == [1, 6]


@pytest.mark.parametrize(
    ("server", "error"),
    every(
        2,
        [
            (
                TinyServer(['{"error": {"message": "too long"}}'], "400 Bad Request"),
                "HTTP 400: too lo",
            ),
            (TinyServer(["<html>busy"], "503 Unavailable", "length"), "HTTP 503: <html>busy"),
            (TinyServer([chunk("a", 1), 'data: {"error": {"message": "x"}}\n\n']), "x"),
            (TinyServer([chunk("a", 1), "data: {oops\n\n"]), "an event that is no JSON: {oops"),
            (TinyServer([chunk("a", 1), DONE]), "a stream without an end"),
            (TinyServer([chunk("a", 1)], ends=False), "an answer that ends too early"),
            (TinyServer([END, DONE]), "no output"),
        ],
    ),
)
def test_what_goes_wrong_is_a_failure_with_its_reason(server, error):
    one = ask(server).results[0]
    assert one.error is not None
    assert one.error.startswith(error)
    assert not one.is_ok


def test_a_request_that_takes_too_long_is_given_up_at_the_server():
    server = TinyServer([chunk("a", 1), *[PAUSE] * 50, END, DONE])

    async def run():
        async with server.running() as base, HttpClient(base, "tiny") as client:
            found = await run_load([request()], client, ClientLimits(timeout_s=0.25))
            await asyncio.sleep(0.2)
            return found

    assert asyncio.run(run()).results[0].error == "timeout"
    assert server.num_gone == 1


def test_counters_are_of_the_load():
    # the same before and after: nothing was drafted
    run = ask(TinyServer([chunk("a", 1), END, DONE]))
    assert (run.stats.num_spec_steps, run.stats.accepted_at_depth) == (0, [0, 0])


@pytest.mark.parametrize(
    ("text", "models"),
    [
        ("http://localhost:8000", "http://localhost:8000/v1/models"),
        ("http://localhost:8000/", "http://localhost:8000/v1/models"),
        ("https://example.org/v1/", "https://example.org/v1/models"),
        ("http://[::1]:80/a", "http://[::1]/a/v1/models"),
    ],
)
def test_addresses(text, models):
    assert str(parse_base_url(text) / "v1/models") == models


@pytest.mark.parametrize("text", ["localhost:8000", "ftp://x", "http://", "http://x:99999", ""])
def test_what_is_no_address(text):
    with pytest.raises(ConfigError, match="base-url"):
        parse_base_url(text)


def test_nobody_listens():
    async def run():
        async with TinyServer([]).running() as base:
            pass
        async with HttpClient(base, "tiny") as client:
            with pytest.raises(ConfigError, match=rf"no server at 127.0.0.1:{base.port} \(Connect"):
                await client.connect()
            return await run_load([request()], client)

    found = asyncio.run(run())
    assert found.results[0].error.startswith("Connect call failed")
    assert found.stats is None


@pytest.mark.parametrize("answer", [b"SSH-2.0\r\n\r\n", b""])
def test_what_is_no_http(answer):
    async def run():
        async def handle(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        async with server:
            base = URL(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            async with HttpClient(base, "tiny") as client:
                return await run_load([request()], client)

    found = asyncio.run(run())
    assert found.results[0].error == "an answer that is no HTTP"
    assert found.stats is None


@pytest.mark.slow
def test_any_number_of_requests_is_open_at_a_time():
    """More than a pool of connections usually holds; each has one of its own."""
    count = 150
    everyone = asyncio.Event()
    arrived = 0

    async def handle(reader, writer):
        nonlocal arrived
        await reader.readuntil(b"\r\n\r\n")
        arrived += 1
        if arrived == count:
            everyone.set()
        await everyone.wait()
        body = (chunk("a", 1) + END + DONE).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        writer.close()

    async def run():
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        async with server:
            base = URL(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            async with HttpClient(base, "tiny") as client:
                client.counters = no_counters
                limits = ClientLimits(timeout_s=20)
                return await run_load([request(i) for i in range(count)], client, limits)

    async def no_counters():
        return None

    assert {one.error for one in asyncio.run(run()).results} == {None}


def test_an_address_that_moved_is_a_failure():
    """A redirect would be timed as part of the answer, and a POST become a GET."""
    server = TinyServer([], "302 Found\r\nLocation: /some/v1/models", "length")
    assert ask(server).results[0].error.startswith("HTTP 302")


def test_speccs_own_server():
    """Tokens, usage and counters of the real thing."""
    with serve() as server:

        async def run():
            prompts = ["hello", "abc", "xyz"]
            load = [LoadRequest(i, 0.01 * i, text, None, 12) for i, text in enumerate(prompts)]
            async with HttpClient(parse_base_url(server.base)) as client:
                await client.connect()
                return await run_load(load, client)

        found = asyncio.run(run())
        assert server.engine.tokenizer is not None
        for text, one in zip(("hello", "abc", "xyz"), found.results, strict=True):
            assert one.error is None
            assert one.num_prompt_tokens == len(server.engine.tokenizer.encode(text).ids)
            assert one.num_output_tokens == 12 == sum(part.num_tokens for part in one.chunks)
            # a speculative step brings several tokens at once
            assert len(one.chunks) < 12
        state = server.service.state().stats
        assert found.stats.num_spec_steps == state.num_spec_steps > 0
        assert found.stats.accepted_at_depth == state.accepted_at_depth
        server.wait_until_idle()
