"""Pages of other origins: what a browser is told, also where a request is refused."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import httpx
import pytest

from specc.errors import ConfigError
from specc.server.config import ConnectionLimits
from specc.server.origin_options import Origins
from tests.command_line import assert_refused, invoke
from tests.specc.server.serving import Server, assert_error, serve, slow_down, wait_for

PAGE, OTHER = "https://app.example", "https://evil.example"
ALLOWED = "access-control-allow-origin"
KEY = {"authorization": "Bearer secret"}
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type, x-stainless-lang",
}
BODY = {"prompt": "ab", "max_tokens": 2}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    options = {"api_keys": ("secret",), "allowed_hosts": ("127.0.0.1",)}
    with serve(origins=Origins((PAGE, "http://localhost:3000")), **options) as running:
        yield running


def ask(server: Server, path: str, origin: str, **headers: str) -> httpx.Response:
    options = {"headers": {"origin": origin, **PREFLIGHT, **headers}}
    return server.http.request("OPTIONS", f"{server.base}{path}", **options)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/models"])
def test_browsers_ask_first_and_without_a_key(server, path: str) -> None:
    answer = ask(server, path, PAGE)
    assert answer.status_code == 200
    assert answer.headers[ALLOWED] == PAGE
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "x-stainless-lang" in answer.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in answer.headers
    assert ask(server, path, "http://localhost:3000").headers[ALLOWED] == "http://localhost:3000"


@pytest.mark.parametrize(
    "origin",
    [OTHER, "null", "http://app.example", f"{PAGE}:8443", f"{PAGE}.evil.example", "*",
     "https://evil.example/?https://app.example"],
)  # fmt: skip
def test_other_origins_get_no_leave(server, origin: str) -> None:
    assert ALLOWED not in ask(server, "/v1/completions", origin).headers
    answer = server.post("/v1/completions", BODY, headers={"origin": origin, **KEY})
    assert ALLOWED not in answer.headers
    assert "Origin" in answer.headers["vary"]


def test_browsers_that_ask_leave_for_a_private_network(server) -> None:
    private = {"access-control-request-private-network": "true"}
    allowed = "access-control-allow-private-network"
    answer = ask(server, "/v1/completions", PAGE, **private)
    assert (answer.status_code, answer.headers[allowed]) == (200, "true")
    assert allowed not in ask(server, "/v1/completions", PAGE).headers
    answer = ask(server, "/v1/completions", OTHER, **private)
    assert answer.status_code == 400
    assert allowed not in answer.headers


def test_methods_that_there_are_none_of(server) -> None:
    answer = ask(server, "/v1/completions", PAGE, **{"access-control-request-method": "DELETE"})
    assert answer.status_code == 400


def test_answers_and_streams_say_it(server) -> None:
    headers = {"origin": PAGE, **KEY}
    for body in (BODY, BODY | {"stream": True}):
        answer = server.post("/v1/completions", body, headers=headers)
        assert (answer.status_code, answer.headers[ALLOWED]) == (200, PAGE)
        assert "Origin" in answer.headers["vary"]
        assert "Retry-After" in answer.headers["access-control-expose-headers"]


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        ("/v1/completions", BODY, {}, 401),
        ("/v1/completions", BODY | {"n": 0}, KEY, 400),
        ("/v1/completions", BODY | {"model": "zzz"}, KEY, 404),
        ("/v1/none", BODY, KEY, 404),
        ("/v1/models", BODY, KEY, 405),
        ("/v1/models", None, KEY | {"host": "evil.example"}, 403),
    ],
)
def test_so_do_errors(server, path: str, body, headers, status: int) -> None:
    """Or the page would learn nothing of them."""
    send = server.get if body is None else functools.partial(server.post, body=body)
    answer = send(path, headers={"origin": PAGE, **headers})
    assert_error(answer, status)
    assert answer.headers[ALLOWED] == PAGE


def test_so_do_errors_that_nobody_expected(server, monkeypatch, caplog) -> None:
    def fail() -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(server.app.state.metrics, "to_json", fail)
    answer = server.get("/stats", headers={"origin": PAGE})
    assert_error(answer, 500)
    assert answer.headers[ALLOWED] == PAGE


def test_so_does_a_server_with_too_many_connections() -> None:
    limits = ConnectionLimits(max_connections=1)
    with serve(origins=Origins((PAGE,)), limits=limits) as server:
        undo = slow_down(server, 0.02)
        body = {"prompt": "ab", "max_tokens": 60, "ignore_eos": True, "stream": True}
        with server.http.stream("POST", f"{server.base}/v1/completions", json=body):
            wait_for(lambda: server.service.num_open == 1, "the request is not in")
            with httpx.Client(trust_env=False, verify=False, timeout=10) as http:
                headers = {"origin": PAGE}
                answer = http.get(f"{server.base}/v1/models", headers=headers)
            assert_error(answer, 503, "connections")
            assert answer.headers[ALLOWED] == PAGE
        undo()


def test_without_origins_nothing_is_said() -> None:
    with serve() as server:
        assert ask(server, "/v1/completions", PAGE).status_code == 405
        answer = server.post("/v1/completions", BODY, headers={"origin": PAGE})
        assert answer.status_code == 200
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_methods_as_browsers_write_them() -> None:
    """Those of fetch in capitals; a method that is allowed in other letters would never be met."""
    with serve(origins=Origins((PAGE,), allowed_methods=("post",))) as server:
        assert ask(server, "/v1/completions", PAGE).status_code == 200
        get = {"access-control-request-method": "GET"}
        assert ask(server, "/v1/models", PAGE, **get).status_code == 400


def test_any_origin() -> None:
    with serve(origins=Origins(("*",), allowed_headers=("X-One",))) as server:
        answer = server.post("/v1/completions", BODY, headers={"origin": OTHER})
        assert answer.headers[ALLOWED] == "*"
        assert "access-control-allow-credentials" not in answer.headers
        wanted = {"access-control-request-headers": "x-one"}
        assert ask(server, "/v1/completions", OTHER, **wanted).status_code == 200
        assert ask(server, "/v1/completions", OTHER).status_code == 400


def test_credentials() -> None:
    with serve(origins=Origins((PAGE,), allow_credentials=True)) as server:
        answer = server.post("/v1/completions", BODY, headers={"origin": PAGE})
        assert answer.headers["access-control-allow-credentials"] == "true"
        assert answer.headers[ALLOWED] == PAGE


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("https://App.Example", "https://app.example"),
        ("https://app.example:443", "https://app.example"),
        ("http://app.example:443", "http://app.example:443"),
        ("https://app.example:0443", "https://app.example"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("http://[0:0::0001]", "http://[::1]"),
        ("capacitor://localhost", "capacitor://localhost"),
        ("*", "*"),
    ],
)
def test_origins_as_browsers_write_them(text: str, kept: str) -> None:
    assert Origins((text,)).allowed_origins == (kept,)


@pytest.mark.parametrize(
    "text",
    ["", "app.example", "https://app.example/", "https://a.example, https://b.example", "null",
     "https://*.example", '["https://app.example"]', "https://a@b.example", "https://a.example\n",
     "https://a.example:65536", "https://a.example:0", "https://a.example:\u0664", "http://[::1::]"],
)  # fmt: skip
def test_what_is_no_origin(text: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-origin"):
        Origins((text,))


def test_options_that_do_not_go_together(tmp_path) -> None:
    command = ["serve", tmp_path / "none", "--port", "0"]
    one = ["--allowed-origin", PAGE]
    for given, word in (
        (["--allowed-origin", "*", "--allow-credentials"], "every page"),
        (["--allow-credentials"], "without --allowed-origin"),
        (["--allowed-method", "GET"], "without --allowed-origin"),
        (["--allowed-header", "X-One"], "without --allowed-origin"),
        ([*one, "--allowed-method", "GET,POST"], "repeat --allowed-method"),
        # vLLM's names are known, its lists are not
        (["--allowed-origins", f'["{PAGE}"]'], "repeat it for each"),
    ):
        assert_refused(invoke(*command, *given), word)
