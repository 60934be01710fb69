"""The HTTP client of loads against servers: a tiny one of known answers, and specc's own."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from specc.errors import ConfigError, FaultError
from specc.load.http_client import HttpClient, parse_metrics
from specc.load.http_exchange import BaseUrl, open_request
from specc.load.request import LoadRequest
from specc.load.run import LoadLimits, run_load
from tests.specc.server.serving import serve

METRICS = """\
# HELP specc:spec_decode_num_drafts_total Steps that drafted.
# TYPE specc:spec_decode_num_drafts_total counter
specc:spec_decode_num_drafts_total{model_name="a"} 40.0
specc:spec_decode_num_drafts_created{model_name="a"} 1.7e+09
specc:spec_decode_num_draft_tokens_total{model_name="a"} 80.0
specc:spec_decode_num_accepted_tokens_total{model_name="a"} 36.0
specc:spec_decode_num_accepted_tokens_per_pos_total{model_name="a",position="1"} 12.0
specc:spec_decode_num_accepted_tokens_per_pos_total{model_name="a",position="0"} 24.0
specc:num_requests_running{model_name="a"} 3.0
"""


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
        status: of it.
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
        size = next(
            int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("Content-Len")
        )
        body = await reader.readexactly(size)
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
    async def running(self) -> AsyncIterator[BaseUrl]:
        server = await asyncio.start_server(self.handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            yield BaseUrl.parse(f"http://127.0.0.1:{port}/some/v1/")


def request(index: int = 0) -> LoadRequest:
    return LoadRequest(index, 0.0, "abcde", None, 7)


def ask(server: TinyServer, count: int = 1, limits: LoadLimits | None = None, **options: Any):
    async def run():
        async with server.running() as base:
            client = HttpClient(base, **options)
            await client.connect()
            return await run_load([request(i) for i in range(count)], client, limits)

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
    assert one.chunks[1].time_s - one.chunks[0].time_s >= 0.09
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
    [
        (TinyServer(['{"error": {"message": "too long"}}'], "400 Bad Request"), "HTTP 400: too lo"),
        (TinyServer(["<html>busy"], "503 Unavailable", "length"), "HTTP 503: <html>busy"),
        (TinyServer([chunk("a", 1), 'data: {"error": {"message": "x"}}\n\n']), "x"),
        (TinyServer([chunk("a", 1), "data: {oops\n\n"]), "an event that is no JSON: {oops"),
        (TinyServer([chunk("a", 1), DONE]), "a stream without an end"),
        (TinyServer([chunk("a", 1)], ends=False), "an answer that ends too early"),
        (TinyServer([END, DONE]), "no output"),
    ],
)
def test_what_goes_wrong_is_a_failure_with_its_reason(server, error):
    one = ask(server).results[0]
    assert one.error is not None
    assert one.error.startswith(error)
    assert not one.is_ok


def test_a_request_that_takes_too_long_is_given_up_at_the_server():
    server = TinyServer([chunk("a", 1), *[PAUSE] * 50, END, DONE])

    async def run():
        async with server.running() as base:
            client = HttpClient(base, "tiny")
            found = await run_load([request()], client, LoadLimits(timeout_s=0.25))
            await asyncio.sleep(0.2)
            return found

    assert asyncio.run(run()).results[0].error == "timeout"
    assert server.num_gone == 1


def test_counters_come_from_metrics():
    stats = parse_metrics(METRICS)
    assert stats is not None
    assert (stats.num_spec_steps, stats.num_draft_tokens, stats.num_accepted_tokens) == (40, 80, 36)
    assert stats.accepted_at_depth == [24, 12]
    assert parse_metrics("python_info 1.0\n") is None
    # the same before and after: nothing was drafted
    run = ask(TinyServer([chunk("a", 1), END, DONE]))
    assert (run.stats.num_spec_steps, run.stats.accepted_at_depth) == (0, [0, 0])


def test_addresses():
    assert BaseUrl.parse("http://localhost:8000") == BaseUrl("localhost", 8000, False, "")
    assert BaseUrl.parse("https://example.org/v1/") == BaseUrl("example.org", 443, True, "")
    assert BaseUrl.parse("http://[::1]:80/a").authority == "[::1]:80"
    for text in ("localhost:8000", "ftp://x", "http://", "http://x:99999"):
        with pytest.raises(ConfigError, match="base-url"):
            BaseUrl.parse(text)


def test_nobody_listens():
    async def run():
        async with TinyServer([]).running() as base:
            pass
        return base

    base = asyncio.run(run())
    with pytest.raises(ConfigError, match="no server"):
        asyncio.run(HttpClient(base).connect())

    async def both():
        return await run_load([request()], HttpClient(base, "tiny"))

    found = asyncio.run(both())
    assert found.results[0].error
    assert found.stats is None


def test_what_is_no_http():
    async def run():
        async def handle(reader, writer):
            writer.write(b"SSH-2.0\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        async with server:
            base = BaseUrl.parse(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            async with open_request(base, "GET", "/"):
                pass

    with pytest.raises(FaultError, match="no HTTP"):
        asyncio.run(run())


def test_speccs_own_server():
    """Tokens, usage and counters of the real thing."""
    with serve() as server:

        async def run():
            client = HttpClient(BaseUrl.parse(server.base))
            await client.connect()
            prompts = ["hello", "abc", "xyz"]
            load = [LoadRequest(i, 0.01 * i, text, None, 12) for i, text in enumerate(prompts)]
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
