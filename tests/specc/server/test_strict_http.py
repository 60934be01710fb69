"""What of HTTP itself is refused: requests with two readings, and those without measure."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterator
from typing import Any

import h11
import pytest

from specc.server.config import ConnectionLimits
from specc.server.strict_http import FREE_CHUNKS, MAX_HEAD_BYTES, StrictConnection
from tests.specc.server.serving import Server, serve

BODY = b'{"prompt": "ab", "max_tokens": 1}'
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(limits=ConnectionLimits(keep_alive_s=0.05)) as running:
        yield running


def send(server: Server, data: bytes) -> bytes:
    """All that the server answers until it closes the connection."""
    address = server.base.removeprefix("http://").split(":")
    with socket.create_connection(address) as client:
        client.settimeout(10)
        client.sendall(data)
        found = b""
        with contextlib.suppress(ConnectionResetError):  # of data that it does not read
            while part := client.recv(1 << 16):
                found += part
        return found


def statuses(answer: bytes) -> list[int]:
    return [int(code) for code in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]


def in_chunks(body: bytes, size: int) -> bytes:
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


GOOD = {
    "length": POST + LENGTH + b"\r\n" + BODY,
    "chunks": POST + CHUNKED + b"\r\n" + CHUNKS,
    "chunk extension": POST + CHUNKED + b"\r\n" + CHUNKS.replace(b"\r\n", b";a=b\r\n", 1),
    "trailer": POST + CHUNKED + b"\r\n" + CHUNKS[:-2] + b"A: b\r\n\r\n",
    "a byte in each chunk": POST + CHUNKED + b"\r\n" + in_chunks(BODY, 1),
    "many chunks": POST + CHUNKED + b"\r\n" + in_chunks(BODY.ljust(1 << 18), 64),
    "some small chunks": POST + CHUNKED + b"\r\n" + in_chunks(BODY.ljust(FREE_CHUNKS), 1),
    "get": GET + b"\r\n",
    "head": b"HEAD /health HTTP/1.1\r\nHost: x\r\n\r\n",
    "http/1.0": b"GET /health HTTP/1.0\r\n\r\n",
    "60 headers": GET + b"".join(b"A%d: b\r\n" % i for i in range(60)) + b"\r\n",
    "many parameters": b"GET /health?" + b"a=b&" * 5000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
}


@pytest.mark.parametrize("name", GOOD)
def test_what_is_taken(server, name: str) -> None:
    assert statuses(send(server, GOOD[name])) == [200]


def test_each_body_has_its_own_chunks(server) -> None:
    request = POST + CHUNKED + b"\r\n" + in_chunks(BODY, 1)
    count = FREE_CHUNKS // len(BODY) + 2
    assert statuses(send(server, request * count)) == [200] * count


BAD = {
    "length beside chunks": (POST + LENGTH + CHUNKED + b"\r\n" + CHUNKS, 400),
    "chunks beside a length": (POST + CHUNKED + LENGTH + b"\r\n" + CHUNKS, 400),
    "two equal lengths": (POST + LENGTH * 2 + b"\r\n" + BODY, 400),
    "two lengths": (POST + LENGTH + b"Content-Length: 5\r\n\r\n" + BODY, 400),
    "a list of lengths": (POST + b"Content-Length: 33, 33\r\n\r\n" + BODY, 400),
    "a length with a sign": (POST + b"Content-Length: +33\r\n\r\n" + BODY, 400),
    "a negative length": (POST + b"Content-Length: -1\r\n\r\n" + BODY, 400),
    "a length in hex": (POST + b"Content-Length: 0x21\r\n\r\n" + BODY, 400),
    "an empty length": (POST + b"Content-Length:\r\n\r\n" + BODY, 400),
    "a length of 30 digits": (POST + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n" + BODY, 400),
    "bare line feeds": (GET.replace(b"\r\n", b"\n") + b"\n", 400),
    "one bare line feed": (GET + b"A: b\nC: d\r\n\r\n", 400),
    "a bare line feed at the end": (GET + b"A: b\r\n\n", 400),
    "a bare line feed first": (b"\n" + GET + b"\r\n", 400),
    "a bare carriage return": (GET + b"A: b\rC: d\r\n\r\n", 400),
    "a folded header": (GET + b"A: b\r\n c\r\n\r\n", 400),
    "a folded header, with a tab": (GET + b"Transfer-Encoding:\r\n\tchunked\r\n\r\n", 400),
    "a first header that is folded": (b"GET /health HTTP/1.1\r\n Host: x\r\n\r\n", 400),
    "a blank before the colon": (GET + b"A : b\r\n\r\n", 400),
    "no colon": (GET + b"A\r\n\r\n", 400),
    "no name": (GET + b": b\r\n\r\n", 400),
    "a nul": (GET + b"A: b\0c\r\n\r\n", 400),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", 400),
    "two hosts": (GET + b"Host: y\r\n\r\n", 400),
    "two transfer encodings": (POST + CHUNKED * 2 + b"\r\n" + CHUNKS, 501),
    "another transfer encoding": (POST + b"Transfer-Encoding: gzip\r\n\r\n" + CHUNKS, 501),
    "an odd transfer encoding": (POST + b"Transfer-Encoding: x, chunked\r\n\r\n" + CHUNKS, 501),
    "chunks in http/1.0": (POST.replace(b"1.1", b"1.0") + CHUNKED + b"\r\n" + CHUNKS, 400),
    "http/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "http/1.2": (GET.replace(b"1.1", b"1.2") + b"\r\n", 505),
    "http/0.9": (b"GET /health\r\n\r\n", 400),
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "two blanks": (b"GET  /health HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "a chunk size of 17 digits": (POST + CHUNKED + b"\r\n" + b"f" * 17 + b"\r\n", 400),
    "a chunk size with a sign": (POST + CHUNKED + b"\r\n+5\r\nabcde\r\n", 400),
    "a chunk size in 0x": (POST + CHUNKED + b"\r\n0x5\r\nabcde\r\n", 400),
    "a blank after a chunk size": (POST + CHUNKED + b"\r\n5 \r\nabcde\r\n", 400),
    "a chunk line with a line feed": (POST + CHUNKED + b"\r\n5;a\nb\r\nabcde\r\n", 400),
    "a chunk line with a return": (POST + CHUNKED + b"\r\n5;a\rb\r\nabcde\r\n", 400),
    "a long chunk extension": (POST + CHUNKED + b"\r\n5;" + b"a" * 9000 + b"\r\n", 400),
    "a chunk line without end": (POST + CHUNKED + b"\r\n5;" + b"a" * 9000, 400),
    "a chunk that is too long": (POST + CHUNKED + b"\r\n2\r\nabcde\r\n0\r\n\r\n", 400),
    "a byte in each of many chunks": (POST + CHUNKED + b"\r\n" + in_chunks(b" " * 300, 1), 413),
    "a large chunk, then small ones": (
        POST + CHUNKED + b"\r\n" + in_chunks(b" " * 9000, 9000)[:-5] + in_chunks(b" " * 300, 1),
        413,
    ),
    "large chunks that do not come": (
        POST + CHUNKED + b"\r\n" + in_chunks(b" " * 125, 1)[:-5] + b"1\r\na\r\n" * 9,
        413,
    ),
    "a trailer with a line feed": (POST + CHUNKED + b"\r\n" + CHUNKS[:-2] + b"A: b\n\r\n", 400),
    "a length in a trailer": (POST + CHUNKED + b"\r\n" + CHUNKS[:-2] + LENGTH * 2 + b"\r\n", 400),
    "a long path": (b"GET /" + b"a" * 250_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
    "a long path without end": (b"GET /" + b"a" * 250_000, 431),
    "a long name": (GET + b"a" * 250_000 + b": b\r\n\r\n", 431),
    "10,000 headers": (GET + b"A: b\r\n" * 10_000 + b"\r\n", 431),
    "1,000 headers": (GET + b"A: b\r\n" * 1000 + b"\r\n", 431),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused(server, name: str) -> None:
    """Once, and the connection is closed: what follows is not read as a request."""
    data, status = BAD[name]
    answer = send(server, data + GET + b"\r\n")
    assert statuses(answer) == [status]
    assert b"connection: close" in answer.lower()
    body = answer.partition(b"\r\n\r\n")[2]
    assert body.startswith(b'{"error":{"message":"This is not HTTP/1.1: ')
    assert len(body) < 500
    assert server.service.num_open == 0


def events_of(connection: StrictConnection, data: bytes) -> list[Any]:
    events = []
    for i in range(len(data)):
        connection.receive_data(data[i : i + 1])
        while (event := connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            events.append(event)
    return events


def test_a_head_of_a_byte_at_a_time() -> None:
    """The same, however it is cut."""
    for name, (data, status) in BAD.items():
        if len(data) > 1000:
            continue
        connection = StrictConnection()
        with pytest.raises(h11.RemoteProtocolError) as caught:
            events_of(connection, data)
        assert caught.value.error_status_hint == status, name
    for data in GOOD.values():
        events = events_of(StrictConnection(), data)
        assert isinstance(events[0], h11.Request)
        assert isinstance(events[-1], h11.EndOfMessage)


def test_the_longest_head_that_is_taken() -> None:
    fill = MAX_HEAD_BYTES - len(GET) - len(b"A: \r\n\r\n")
    for length, is_taken in ((fill, True), (fill + 1, False)):
        connection = StrictConnection()
        connection.receive_data(GET + b"A: " + b"b" * length + b"\r\n\r\n")
        if is_taken:
            assert isinstance(connection.next_event(), h11.Request)
        else:
            with pytest.raises(h11.RemoteProtocolError, match="too long"):
                connection.next_event()


def test_requests_in_one_piece_are_answered_in_their_order(server) -> None:
    data = GOOD["length"] + GOOD["get"] + GOOD["chunks"] + GOOD["head"] + GOOD["get"] * 20
    answer = send(server, data)
    assert statuses(answer) == [200] * 24
    kinds = re.findall(rb'"object":"text_completion"|"status":"ok"', answer)
    assert [kind[1:7] for kind in kinds[:3]] == [b"object", b"status", b"object"]


def test_a_request_after_a_malformed_one_is_not_served(server) -> None:
    """The attack itself: a second request in what one of two readers takes for a body."""
    hidden = b"0\r\n\r\n" + GOOD["length"]
    data = POST + b"Content-Length: %d\r\n" % len(hidden) + CHUNKED + b"\r\n" + hidden
    assert statuses(send(server, data)) == [400]


def test_other_methods(server) -> None:
    for method in (b"OPTIONS", b"TRACE", b"CONNECT", b"DELETE", b"BREW"):
        (status,) = statuses(send(server, GET.replace(b"GET", method) + b"\r\n"))
        assert status in (404, 405), method
    assert statuses(send(server, b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n")) == [404]
    assert statuses(send(server, GET + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n")) == [200]


def test_malformed_chunks_after_an_early_answer(server, caplog) -> None:
    """The answer is out, so there is nothing to say; nor is it a fault of the server."""
    data = POST.replace(b"application/json", b"text/plain") + CHUNKED + b"\r\n5\r\nabcde\r\n"
    address = server.base.removeprefix("http://").split(":")
    with socket.create_connection(address) as client:
        client.settimeout(10)
        client.sendall(data)
        answer = b""
        while not answer.endswith(b"}}"):
            answer += client.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 415")
        client.sendall(b"zz\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1 << 16) == b""
    assert "Traceback" not in caplog.text
    assert "Fatal error" not in caplog.text


def test_a_page_of_another_origin_cannot_post(server) -> None:
    """Forms and simple requests have one of three types; any other one needs leave first."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        headers = {"content-type": kind, "origin": "http://evil.example"}
        answer = server.post("/v1/completions", content=BODY, headers=headers)
        assert answer.status_code == 415
    # a script can leave the type out; what the browser adds is not the script's to leave out
    for told in ({"origin": "null"}, {"sec-fetch-site": "cross-site"}):
        for headers in (told, told | {"content-type": "application/x-www-form-urlencoded"}):
            answer = server.post("/v1/completions", content=BODY, headers=headers)
            assert answer.status_code == 415
    ask = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    answer = server.http.options(f"{server.base}/v1/completions", headers=ask)
    assert answer.status_code == 405
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("path", ["/v1/completions", "/completion", "/api/generate"])
def test_a_body_without_a_type_is_json(server, path: str) -> None:
    """As litellm sends them to Ollama; curl, unless it is told, takes all for a form."""
    body = b'{"model": "tiny", "prompt": "ab", "raw": true, "stream": false}'
    assert server.post(path, content=body).status_code == 200
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert server.post(path, content=body, headers=form).status_code == 200
    answer = server.post(path, content=body, headers={"content-type": "text/plain"})
    assert answer.status_code == 415
