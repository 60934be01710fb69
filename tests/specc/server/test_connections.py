"""Connections without end or measure: idle ones, slow ones, and readers that do not read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from specc.server.config import ConnectionLimits
from specc.server.connections import EXTRA_CONNECTIONS, Connections, StrictProtocol
from specc.server.listener import Listener, fit, raise_file_limit
from specc.server.log import RepeatFilter
from specc.server.turns import LongTurns, Turns
from tests.runtime.conftest import save_engine
from tests.specc.server.serving import GREEDY, Server, serve, slow_down, wait_for

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
QUICK = ConnectionLimits(
    head_timeout_s=0.3,
    keep_alive_s=1.0,
    rest_timeout_s=0.3,
    unread_timeout_s=0.4,
    look_every_s=0.05,
)
MAIN = [sys.executable, "-P", "-c", "from specc.cli.main import main; main()"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(limits=QUICK, body_timeout_s=0.3) as running:
        yield running
        assert running.get("/health").status_code == 200


def connect(server: Server, data: bytes = b"", **options: Any) -> socket.socket:
    address = server.base.removeprefix("http://").split(":")
    client = socket.create_connection((address[0], int(address[1])), timeout=10)
    if data:
        client.sendall(data)
    return client


def until_closed(client: socket.socket) -> tuple[bytes, float]:
    """What still comes, and how long that takes."""
    begin_s, found = time.monotonic(), b""
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(1 << 16):
            found += part
    client.close()
    return found, time.monotonic() - begin_s


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", marks=pytest.mark.slow),
        b"GET /hea",
        pytest.param(GET[:-2], marks=pytest.mark.slow),
        GET + GET[:-2],
    ],
)
def test_headers_that_do_not_come(server, data: bytes) -> None:
    begin_s = time.monotonic()
    until_closed(connect(server, data))
    # soon, beside the 10 s that a client would have by default
    assert 0.2 < time.monotonic() - begin_s < 8


def test_headers_that_come_a_byte_at_a_time(server) -> None:
    """Each byte is early enough, all of them together are not."""
    client, num_sent = connect(server), 0
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for i in range(300):
            client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nA: "[i : i + 1] or b"b")
            num_sent += 1
            time.sleep(0.03)
    client.close()
    # ten of them take as long as all may; on a busy machine each takes longer, or the server does
    assert 1 < num_sent < 250


def test_connections_that_are_kept_alive(server) -> None:
    client = connect(server)
    for _ in range(5):
        client.sendall(GET)
        answer = b""
        while not answer.endswith(b"}"):
            part = client.recv(1 << 16)
            assert part, "it is closed"
            answer += part
        assert answer.startswith(b"HTTP/1.1 200")
        time.sleep(0.25)  # all of it is longer than any timeout
    found, seconds = until_closed(client)
    assert (found, seconds < 5) == (b"", True)


def test_each_request_has_its_first_bytes_for_itself(server, monkeypatch) -> None:
    """Only what is long shares its turns, not what follows on the same connection."""
    added: list[Turns] = []
    add = LongTurns.add
    monkeypatch.setattr(LongTurns, "add", lambda all_, one: (added.append(one), add(all_, one)))
    client = connect(server)
    long = POST + b"Content-Length: 400000\r\n\r\n" + b" " * 400_000
    for request, is_long in ((GET, False), (long, True), (GET, False)):
        added.clear()
        client.sendall(request)
        answer = b""
        while not answer.endswith(b"}"):
            part = client.recv(1 << 16)
            assert part, "it is closed"
            answer += part
        assert bool(added) == is_long
    client.close()


@pytest.mark.parametrize("kind", ["application/json", "text/plain"])
def test_bodies_that_come_a_byte_at_a_time(server, kind: str) -> None:
    """Those of a wrong type are answered before they are there; the rest has its time, too."""
    head = POST.replace(b"application/json", kind.encode())
    client = connect(server, head + b"Content-Length: 1000\r\n\r\n")
    client.settimeout(0.03)
    found, num_sent = b"", 0
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for _ in range(300):
            client.sendall(b" ")
            num_sent += 1
            try:
                part = client.recv(1 << 16)
            except TimeoutError:
                continue
            found += part
            if not part:
                break
    client.close()
    status = b"408" if kind == "application/json" else b"415"
    assert found.startswith(b"HTTP/1.1 " + status)
    assert num_sent < 250


def test_a_body_that_nobody_wants(server) -> None:
    client = connect(server, GET[:-2] + b"Content-Length: 1000000\r\n\r\n")
    found, seconds = until_closed(client)
    assert found.startswith(b"HTTP/1.1 200")
    assert seconds < 8


def test_long_bodies_share_a_budget() -> None:
    with serve(max_body_bytes=1 << 20, body_timeout_s=5) as server:
        size = (1 << 20) - 100
        clients = [
            connect(server, POST + b"Content-Length: %d\r\n\r\n" % size + b" " * (size - 1))
            for _ in range(17)
        ]
        budget = server.app.state.bodies
        wait_for(lambda: budget._num_free < 1 << 20, "the budget is not used")
        body = {"prompt": "ab", "max_tokens": 1}
        answer = server.post("/v1/completions", body | {"user": "x" * (1 << 19)})
        if answer.status_code == 200:  # the last one of them had to go instead
            assert budget._num_free >= 0
        else:
            assert answer.json()["error"]["code"] == "overloaded"
        assert server.post("/v1/completions", body).status_code == 200
        for client in clients:
            client.close()
        wait_for(lambda: budget._num_free == 16 << 20, "the budget does not come back")
        assert server.complete(**body | {"user": "x" * (1 << 19)})
        server.wait_until_idle()


def test_a_stream_that_nobody_reads() -> None:
    """It ends: neither its memory nor its place are the client's for good."""
    with serve(limits=QUICK, max_waiting=256) as server:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = server.base.removeprefix("http://").split(":")
        client.connect((host, int(port)))
        connections = server.http_server.connections
        wait_for(lambda: len(connections) == 1, "there is no connection")
        (connection,) = connections._open
        connection.transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDBUF, 4096
        )
        # chunks of outputs with many log probabilities: more than the sockets hold
        body = {
            "prompt": "ab", "n": 6, "max_tokens": 90, "stream": True, "ignore_eos": True,
            "logprobs": 20, "stream_options": {"include_usage": True},
        }  # fmt: skip
        data = json.dumps(body).encode()
        client.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(data) + data)
        wait_for(lambda: server.service.num_open > 0, "the request is not in")
        wait_for(lambda: not len(connections), "the connection stays", 120)
        # it was not because all had been written
        received = b""
        with contextlib.suppress(ConnectionError):
            while part := client.recv(1 << 16):
                received += part
        assert b"[DONE]" not in received
        server.wait_until_idle()
        client.close()
        assert server.complete(prompt="ab", **GREEDY)


def test_idle_connections_make_room() -> None:
    limits = ConnectionLimits(max_connections=20)
    with serve(limits=limits) as server:
        busy = connect(server, POST + b"Content-Length: 500\r\n\r\n")
        idle = [connect(server) for _ in range(100)]
        for _ in range(10):
            with httpx.Client(timeout=5, trust_env=False, verify=False) as http:
                body = {"prompt": "ab", "max_tokens": 1}
                assert http.get(f"{server.base}/health").status_code == 200
                assert http.post(f"{server.base}/v1/completions", json=body).status_code == 200
        assert len(server.http_server.connections) <= 21
        # the first ones had to go
        assert until_closed(idle[0])[1] < 1
        for client in [*idle, busy]:
            client.close()
        wait_for(lambda: len(server.http_server.connections) == 0, "connections are left")


def test_where_all_connections_work_others_are_told() -> None:
    with serve(limits=ConnectionLimits(max_connections=4)) as server:
        undo = slow_down(server, 0.05)
        body = json.dumps({"prompt": "ab", "max_tokens": 90, "ignore_eos": True}).encode()
        request = POST + b"Content-Length: %d\r\n\r\n" % len(body) + body
        busy = [connect(server, request) for _ in range(4)]
        wait_for(lambda: server.service.num_open == 4, "they are not in")
        answer = server.post("/v1/completions", {"prompt": "ab"})
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "too_many_connections"
        for path in ("/health", "/metrics", "/ping"):
            assert server.get(path).status_code == 200
        assert server.service.num_open == 4  # none of them was cut
        undo()
        for client in busy:
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
            client.close()
        # the connection that was too many may have been kept
        server.http.close()
        del server.http
        wait_for(lambda: len(server.http_server.connections) == 0, "connections are left")
        assert server.complete(prompt="ab", **GREEDY)


def test_more_than_the_extra_ones_are_closed() -> None:
    with serve(limits=ConnectionLimits(max_connections=2)) as server:
        undo = slow_down(server, 0.05)
        body = json.dumps({"prompt": "ab", "max_tokens": 90, "ignore_eos": True}).encode()
        request = POST + b"Content-Length: %d\r\n\r\n" % len(body) + body
        busy = [connect(server, request) for _ in range(2)]
        wait_for(lambda: server.service.num_open == 2, "they are not in")
        # a slow request for the health: a body that takes its time keeps none of them
        extra = [connect(server, GET) for _ in range(EXTRA_CONNECTIONS + 10)]
        assert len(server.http_server.connections) <= 2 + EXTRA_CONNECTIONS
        assert server.get("/health").status_code == 200
        undo()
        for client in [*busy, *extra]:
            client.close()
        server.wait_until_idle()


def test_no_more_than_the_extra_ones_stay_where_all_are_at_work() -> None:
    connections, stay = Connections(ConnectionLimits(max_connections=2)), []
    for _ in range(2 + EXTRA_CONNECTIONS + 3):
        protocol = Mock(spec=StrictProtocol)
        stay.append(connections.admit(protocol))
        connections.serve(protocol)
    assert stay == [True] * (2 + EXTRA_CONNECTIONS) + [False] * 3
    assert len(connections) == 2 + EXTRA_CONNECTIONS


@contextlib.contextmanager
def file_limit(count: int) -> Iterator[None]:
    """So many files more than are open now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_without_files_closes_connections() -> None:
    """Left to asyncio, each attempt would be logged, and clients would wait for nothing."""

    async def run() -> tuple[int, list[Any]]:
        errors: list[Any] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: errors.append(context))
        listener = Listener(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind(("127.0.0.1", 0))
        server = await loop.create_server(asyncio.Protocol, sock=listener)
        clients = [socket.socket() for _ in range(30)]
        for client in clients:
            client.setblocking(False)
        num_closed = 0
        with file_limit(4):
            fillers = []
            with contextlib.suppress(OSError):
                while True:
                    fillers.append(os.dup(0))
            for filler in fillers[-3:]:
                os.close(filler)
            for client in clients:
                await loop.sock_connect(client, listener.getsockname())
            await asyncio.sleep(0.3)
            for client in clients:
                with contextlib.suppress(BlockingIOError, ConnectionResetError):
                    num_closed += client.recv(1) == b""
        for fd in fillers[:-3]:
            os.close(fd)
        for client in clients:
            client.close()
        server.close()
        return num_closed, errors

    num_closed, errors = asyncio.run(run())
    assert num_closed >= 20
    assert errors == []


def test_limits_fit_the_open_files(caplog) -> None:
    limits = ConnectionLimits(max_connections=1000)
    assert fit(limits, 5000) is limits
    with caplog.at_level("WARNING", "specc.serve"):
        assert 500 < fit(limits, 1024).max_connections < 1024 - EXTRA_CONNECTIONS
    assert "ulimit" in caplog.text
    assert fit(limits, 10).max_connections == 1


def test_the_soft_limit_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        assert raise_file_limit() == min(hard, 1 << 16)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, 1 << 16), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
@pytest.mark.parametrize("has_hard_limit", [True, False])
def test_1100_idle_connections(has_hard_limit: bool, tmp_path: Path) -> None:
    """A whole process at `ulimit -n 1024`, whether it may raise that or not."""
    engine = save_engine(tmp_path / "engine").path
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    limit = "ulimit -n 1024" if has_hard_limit else "ulimit -Sn 1024"
    command = ["bash", "-c", f'{limit} && exec "$@"', "bash", *MAIN, "serve", str(engine)]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([*command, "--port", str(port), "--no-measure"], stderr=log)
    base = f"http://127.0.0.1:{port}"
    idle: list[socket.socket] = []
    try:

        def answers() -> bool:
            assert process.poll() is None
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{base}/health", trust_env=False).status_code == 200
            return False

        wait_for(answers, "the server does not start", 60)
        begin_s = time.monotonic()
        for i in range(1100):
            idle.append(socket.create_connection(("127.0.0.1", port), timeout=10))
            if i % 2:
                idle[-1].sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
        for _ in range(20):
            with httpx.Client(base_url=base, trust_env=False, timeout=8, verify=False) as http:
                assert http.get("/health").status_code == 200
                answer = http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 2})
                assert answer.status_code == 200
        assert time.monotonic() - begin_s < 8, "they would be late by then"
    finally:
        for client in idle:
            client.close()
        process.terminate()
        assert process.wait(20) == 0
    text = (tmp_path / "log").read_text()
    assert "Traceback" not in text
    assert len(text) < 5000


def record(line: int, error: Exception | None = None) -> logging.LogRecord:
    info = (type(error), error, None) if error else None
    return logging.LogRecord("x", logging.ERROR, "file.py", line, "what %s", ("now",), info)  # type: ignore[arg-type]


def test_what_repeats_in_the_log_is_counted() -> None:
    now_s = 0.0
    repeat = RepeatFilter(burst=3, every_s=10, clock=lambda: now_s)
    records = [record(1) for _ in range(100)]
    shown = [item.getMessage() for item in records if repeat.filter(item)]
    assert shown == ["what now"] * 2 + ["what now (more of this kind are not shown for 10 s)"]
    # of other kinds
    assert repeat.filter(record(2))
    assert repeat.filter(record(1, ValueError()))
    assert repeat.filter(record(1, KeyError()))
    now_s = 10.0
    again = record(1)
    assert repeat.filter(again)
    assert again.getMessage() == "what now (97 more of this kind were not shown)"
    # nor does it remember without end
    for line in range(5000):
        assert repeat.filter(record(line + 10))
    assert len(repeat._kinds) == 1000


def test_lines_of_information_are_all_shown() -> None:
    repeat = RepeatFilter(burst=1)
    info = logging.LogRecord("x", logging.INFO, "file.py", 1, "figures", (), None)
    assert all(repeat.filter(info) for _ in range(10))
