"""The server over TLS: its limits hold there, too, and wrong files are told at the start."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from specc.errors import ConfigError
from specc.server.config import ConnectionLimits, Tls
from specc.server.connections import StrictProtocol
from specc.server.tls import make_context
from tests.command_line import assert_refused, invoke
from tests.specc.server.serving import GREEDY, Server, greedy_text, serve, wait_for
from tests.specc.server.test_connections import GET, POST, QUICK, until_closed

FILES = Path(__file__).with_name("certificates")
CERTIFICATE, KEY = FILES / "certificate.pem", FILES / "key.pem"
OWN = Tls(ssl_certfile=CERTIFICATE, ssl_keyfile=KEY)
LONG_STREAM = json.dumps(
    {"prompt": "ab", "max_tokens": 50, "stream": True, "ignore_eos": True, "logprobs": 20}
).encode()
STREAM_LENGTH = b"Content-Length: %d\r\n\r\n" % len(LONG_STREAM)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(limits=QUICK, tls=make_context(OWN)) as running:
        yield running
        assert running.get("/health").status_code == 200


def address(server: Server) -> tuple[str, int]:
    host, port = server.base.removeprefix("https://").split(":")
    return host, int(port)


def connect(server: Server) -> socket.socket:
    """Without a handshake."""
    return socket.create_connection(address(server), timeout=10)


def trusting(**options: Any) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=CERTIFICATE)
    for name, value in options.items():
        setattr(context, name, value)
    return context


def connect_safely(server: Server, context: ssl.SSLContext | None = None) -> ssl.SSLSocket:
    client = connect(server)
    return (context or trusting()).wrap_socket(client, server_hostname="localhost")


def slow_reader(server: Server) -> ssl.SSLSocket:
    """The only connection, whose sockets hold little."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(10)
    client.connect(address(server))
    safe = trusting().wrap_socket(client, server_hostname="localhost")
    connections = server.http_server.connections

    def speaks_http() -> bool:
        return [type(one) for one in connections._open] == [StrictProtocol]

    wait_for(speaks_http, "there is no connection")
    (connection,) = connections._open
    connection.transport.get_extra_info("socket").setsockopt(
        socket.SOL_SOCKET, socket.SO_SNDBUF, 4096
    )
    return safe


def test_a_client_that_trusts_the_certificate(server) -> None:
    with httpx.Client(verify=trusting(), trust_env=False, timeout=30) as http:
        answer = http.post(f"{server.base}/v1/completions", json={"prompt": "ab", **GREEDY})
        assert answer.json()["choices"][0]["text"] == greedy_text(server.engine, "ab", 12)
        body = {"prompt": "ab", "stream": True, **GREEDY}
        parts = http.post(f"{server.base}/v1/completions", json=body).text.split("\n\n")
        chunks = [json.loads(part[6:]) for part in parts if part.startswith("data: {")]
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert text == greedy_text(server.engine, "ab", 12)
    offers = trusting()
    offers.set_alpn_protocols(["h2", "http/1.1"])
    with connect_safely(server, offers) as client:
        assert client.selected_alpn_protocol() == "http/1.1"
        assert (client.version() or "") >= "TLSv1.2"


def test_a_client_that_trusts_others(server) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        connect_safely(server, ssl.create_default_context())
    assert server.get("/health").status_code == 200


@pytest.mark.parametrize("data", [b"", b"\x16\x03\x01\x02\x00\x01"])
def test_a_handshake_that_does_not_come(server, data: bytes) -> None:
    client = connect(server)
    client.sendall(data)
    found, seconds = until_closed(client)
    assert found == b""
    # asyncio alone would wait for a minute
    assert 0.2 < seconds < 8
    wait_for(lambda: len(server.http_server.connections) == 0, "it has kept its place")


def test_headers_that_do_not_come_after_it(server) -> None:
    client = connect_safely(server)
    client.sendall(GET[:-2])
    _, seconds = until_closed(client)
    assert 0.2 < seconds < 8


def test_plain_http(server) -> None:
    client = connect(server)
    client.sendall(GET)
    found, seconds = until_closed(client)
    assert b"HTTP" not in found
    assert seconds < 8
    assert server.get("/health").status_code == 200


def test_requests_are_read_as_strictly(server) -> None:
    client = connect_safely(server)
    client.sendall(POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
    found, _ = until_closed(client)
    assert found.startswith(b"HTTP/1.1 400")
    assert b"malformed_http" in found


def test_a_request_beside_the_end_of_the_handshake(server) -> None:
    """Both in one packet: the request is there before anything that reads it."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = trusting().wrap_bio(incoming, outgoing, server_hostname="localhost")
    client = connect(server)
    while True:
        try:
            tls.do_handshake()
            break
        except ssl.SSLWantReadError:
            client.sendall(outgoing.read())
            incoming.write(client.recv(1 << 16))
    tls.write(GET)
    client.sendall(outgoing.read())
    answer = b""
    while not answer.endswith(b"}"):
        part = client.recv(1 << 16)
        assert part, "it is closed"
        incoming.write(part)
        try:
            answer += tls.read(1 << 16)
        except ssl.SSLWantReadError:
            continue
    assert answer.startswith(b"HTTP/1.1 200")
    client.close()


def test_silent_ones_make_room() -> None:
    limits = ConnectionLimits(max_connections=20)
    with serve(limits=limits, tls=make_context(OWN)) as server:
        silent = [connect(server) for _ in range(100)]
        for _ in range(5):
            with httpx.Client(timeout=5, trust_env=False, verify=trusting()) as http:
                body = {"prompt": "ab", "max_tokens": 1}
                assert http.post(f"{server.base}/v1/completions", json=body).status_code == 200
        assert len(server.http_server.connections) <= 21
        assert until_closed(silent[0])[1] < 1
        for client in silent[1:]:
            client.close()


def test_a_stream_that_nobody_reads() -> None:
    """Less than TLS keeps to itself: what is counted has to be what the socket has not taken."""
    limits = dataclasses.replace(QUICK, keep_alive_s=75)
    with serve(limits=limits, tls=make_context(OWN)) as server:
        safe = slow_reader(server)
        connections = server.http_server.connections
        safe.sendall(POST + STREAM_LENGTH + LONG_STREAM)
        wait_for(lambda: not len(connections), "the connection stays", 30)
        server.wait_until_idle()
        safe.close()


def test_a_client_that_does_not_say_goodbye() -> None:
    """TLS would wait for it, at the end of the process, too."""
    with serve(tls=make_context(OWN)) as server:
        client = connect_safely(server)
        client.sendall(GET[:-2] + b"Connection: close\r\n\r\n")
        idle = connect_safely(server)
        idle.sendall(GET)
        assert idle.recv(100).startswith(b"HTTP/1.1 200")
        wait_for(lambda: len(server.http_server.connections) == 1, "it stays", 5)
        begin_s = time.monotonic()
    assert time.monotonic() - begin_s < 4
    client.close()
    idle.close()


def test_a_client_that_reads_late_misses_nothing() -> None:
    limits = dataclasses.replace(QUICK, unread_timeout_s=30)
    with serve(limits=limits, tls=make_context(OWN)) as server:
        client = slow_reader(server)
        client.sendall(POST + b"Connection: close\r\n" + STREAM_LENGTH + LONG_STREAM)
        (connection,) = server.http_server.connections._open
        wait_for(connection.transport.is_closing, "the answer does not end", 30)
        assert connection.below.get_write_buffer_size() > 0, "the sockets hold all of it"
        # longer than anything but the time for those that read nothing
        time.sleep(0.8)
        found, _ = until_closed(client)
        assert found.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_clients_with_certificates() -> None:
    wanted = dataclasses.replace(OWN, ssl_ca_certs=CERTIFICATE, ssl_cert_reqs=2)
    with serve(limits=QUICK, tls=make_context(wanted)) as server:
        found = b""
        with contextlib.suppress(ssl.SSLError, ConnectionError), connect_safely(server) as stranger:
            # it learns that it was turned away when it reads
            stranger.sendall(GET)
            found = stranger.recv(100)
        assert found == b""
        known = trusting()
        known.load_cert_chain(CERTIFICATE, KEY)
        with connect_safely(server, known) as client:
            client.sendall(GET)
            assert client.recv(100).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("files", "found", "do"),
    [
        ({"ssl_keyfile": KEY}, "--ssl-keyfile", "add --ssl-certfile"),
        ({"ssl_cert_reqs": 2}, "--ssl-cert-reqs 2", "add --ssl-certfile"),
        ({"ssl_certfile": "none.pem", "ssl_keyfile": KEY}, "none.pem: No such file", "correct"),
        ({"ssl_certfile": FILES}, "certificates: Is a directory", "correct"),
        ({"ssl_certfile": CERTIFICATE, "ssl_keyfile": "none.pem"}, "none.pem: No such", "correct"),
        ({"ssl_certfile": KEY, "ssl_keyfile": KEY}, "no certificate in PEM", "BEGIN CERTIFICATE"),
        ({"ssl_certfile": CERTIFICATE}, "no private key", "--ssl-keyfile FILE"),
        ({"ssl_certfile": CERTIFICATE, "ssl_keyfile": CERTIFICATE}, "no private key", "FILE"),
        (
            {"ssl_certfile": CERTIFICATE, "ssl_keyfile": FILES / "other_key.pem"},
            "the key of another certificate",
            "name the key",
        ),
        (
            {"ssl_certfile": CERTIFICATE, "ssl_keyfile": FILES / "encrypted_key.pem"},
            "needs a passphrase",
            "openssl pkey",
        ),
        (
            {"ssl_certfile": CERTIFICATE, "ssl_keyfile": KEY, "ssl_cert_reqs": 1},
            "without --ssl-ca-certs",
            "add --ssl-ca-certs",
        ),
        (
            {"ssl_certfile": CERTIFICATE, "ssl_keyfile": KEY, "ssl_ca_certs": CERTIFICATE},
            "--ssl-cert-reqs 0",
            "add --ssl-cert-reqs 2",
        ),
        (
            {
                "ssl_certfile": CERTIFICATE,
                "ssl_keyfile": KEY,
                "ssl_ca_certs": KEY,
                "ssl_cert_reqs": 2,
            },
            "no certificates in PEM",
            "BEGIN CERTIFICATE",
        ),
    ],
)
def test_files_that_are_wrong(files, found, do) -> None:
    paths = {
        name: Path(value) if name != "ssl_cert_reqs" else value for name, value in files.items()
    }
    with pytest.raises(ConfigError) as caught:
        make_context(Tls(**paths))
    assert found in caught.value.found
    assert do in caught.value.do


def test_a_file_that_is_cut(tmp_path) -> None:
    cut = tmp_path / "certificate.pem"
    cut.write_bytes(CERTIFICATE.read_bytes()[:300])
    with pytest.raises(ConfigError, match="does not take") as caught:
        make_context(Tls(ssl_certfile=cut, ssl_keyfile=KEY))
    # the key is as it should be
    assert caught.value.found.startswith(f"--ssl-certfile {cut} and --ssl-keyfile {KEY}")


def test_files_of_all_kinds(tmp_path) -> None:
    assert make_context(Tls()) is None
    both = tmp_path / "both.pem"
    both.write_bytes(CERTIFICATE.read_bytes() + KEY.read_bytes())
    assert make_context(Tls(ssl_certfile=both)) is not None


def test_the_options(tmp_path) -> None:
    """Files are looked at before the engine is."""
    command = ["serve", tmp_path / "none", "--port", "0"]
    assert_refused(invoke(*command, "--ssl-certfile", KEY), "no certificate in PEM")
    assert_refused(invoke(*command, "--ssl-cert-reqs", 3), "--ssl-cert-reqs")
    safe = ["--ssl-certfile", CERTIFICATE, "--ssl-keyfile", KEY]
    assert_refused(invoke(*command, *safe), "none")
