"""Names that a server answers to, and what of a request is quoted in errors."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from specc.cli.main import app
from specc.errors import ConfigError
from specc.server.hosts import choose_hosts, host_of
from tests.specc.server.serving import Server, assert_error, serve

LOCAL = ("127.0.0.1", "127.0.0.1")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    hosts = choose_hosts(*LOCAL, ["specc.example"], has_keys=False)
    with serve(allowed_hosts=hosts) as running:
        yield running


def test_which_names_are_known() -> None:
    own = {"localhost", socket.gethostname().lower()}
    assert set(choose_hosts(*LOCAL, [], has_keys=False) or ()) == own | {"127.0.0.1"}
    assert set(choose_hosts("::1", "localhost", [], has_keys=False) or ()) == own
    some = choose_hosts("0.0.0.0", "0.0.0.0", ["Specc.Example"], has_keys=False)
    assert set(some or ()) == own | {"0.0.0.0", "specc.example"}
    # with a key, and for whoever opens it to a network, names are not known beforehand
    assert choose_hosts(*LOCAL, [], has_keys=True) is None
    assert choose_hosts("0.0.0.0", "0.0.0.0", [], has_keys=False) is None
    assert choose_hosts("10.1.2.3", "box", [], has_keys=False) is None
    assert choose_hosts(*LOCAL, ["*"], has_keys=False) is None
    # a server that names some wants these only
    assert choose_hosts(*LOCAL, ["a.example"], has_keys=True) is not None
    for name in ("", "http://a", "a:80", "a/b", "*.a:1"):
        with pytest.raises(ConfigError, match="allowed host"):
            choose_hosts(*LOCAL, [name], has_keys=False)


def test_hosts_of_headers() -> None:
    found = ["LocalHost:8000", "localhost.", "[::1]:80", "[::1", "127.0.0.1", " a.b:x ", ":80"]
    hosts = [host_of(header) for header in found]
    assert hosts == ["localhost", "localhost", "[::1]", "[::1]", "127.0.0.1", "a.b", ""]


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "10.9.8.7", "[::1]:80", "a.localhost",
     "specc.example:80"],
)  # fmt: skip
def test_names_that_are_known(server, host: str) -> None:
    assert server.get("/health", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example",
     "specc.example.evil", "xlocalhost", "a@localhost", "[localhost]", "evil.example#localhost",
     "0177.1", "x" * 20_000],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/", "/health", "/stats", "/v1/models", "/openapi.json"])
def test_names_that_are_not(server, host: str, path: str) -> None:
    """A page whose name points here reads nothing, whatever it asks for."""
    error = assert_error(server.get(path, headers={"host": host}), 403, "--allowed-host")
    assert error["code"] == "host_not_allowed"


def test_a_page_whose_name_points_here_generates_nothing(server) -> None:
    body, headers = {"prompt": "ab", "max_tokens": 1}, {"host": "evil.example"}
    assert_error(server.post("/v1/completions", body, headers=headers), 403)
    assert server.service.core.scheduler.stats.num_output_tokens == 0


def test_any_name_where_there_is_no_list() -> None:
    with serve() as server:
        assert server.get("/health", headers={"host": "any.example"}).status_code == 200


def test_the_option(tmp_path) -> None:
    args = ["serve", str(tmp_path / "none"), "--port", "0", "--allowed-host", "http://a"]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 2
    assert "allowed host" in result.stderr


LONG = "Z" * 100_000
COMPLETION: dict[str, Any] = {"prompt": "ab", "max_tokens": 1}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
DEEP = {LONG: {LONG: LONG}}
VALUES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *((COMPLETION, {name: LONG}) for name in (
        "model", "rule", "stream", "max_tokens", "temperature", "seed", "n", "stop",
        "stop_token_ids", "priority", "stream_options", "response_format", "guided_choice",
        "structured_outputs",
        "guided_regex", "guided_grammar", "guided_json", "logit_bias", "tools", "top_k",
        "guided_whitespace_pattern", "tool_choice", "suffix", "chat_template", "best_of",
    )),
    (COMPLETION, {LONG: 1}),
    (COMPLETION, {"prompt": [LONG, 1]}),
    (COMPLETION, {"prompt": [10**4000]}),
    (COMPLETION, {"seed": 10**4000}),
    (COMPLETION, {"top_k": -(10**4000)}),
    (COMPLETION, {"stop_token_ids": [10**4000]}),
    (COMPLETION, {"n": 10**4000}),
    (COMPLETION, {"stop": [LONG]}),
    (COMPLETION, {"stop": {LONG: LONG}}),
    (COMPLETION, {"stream_options": DEEP}),
    (COMPLETION, {"response_format": {"type": LONG}}),
    (COMPLETION, {"response_format": {"type": "json_schema", "json_schema": DEEP}}),
    (COMPLETION, {"structured_outputs": DEEP}),
    (COMPLETION, {"structured_outputs": {"regex": "(" + LONG}}),
    (COMPLETION, {"guided_json": {"type": LONG}}),
    (COMPLETION, {"guided_json": {"$ref": LONG}}),
    (COMPLETION, {"guided_json": {"properties": {LONG: {"type": LONG}}}}),
    (COMPLETION, {"guided_grammar": f"start: {LONG.lower()}"}),
    (COMPLETION, {"guided_choice": [LONG, 1]}),
    (CHAT, {"model": LONG}),
    (CHAT, {LONG: 1}),
    (CHAT, {"messages": LONG}),
    (CHAT, {"messages": [{"role": LONG, "content": 5}]}),
    (CHAT, {"messages": [{"role": "tool", "content": LONG}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": LONG}]}]}),
    (CHAT, {"messages": [{"role": "user", "content": [DEEP]}]}),
    (CHAT, {"chat_template_kwargs": LONG}),
    (CHAT, {"chat_template": LONG}),
    (CHAT, {"reasoning_effort": LONG}),
]  # fmt: skip
REFUSES = "{{ raise_exception('no ' + (messages[0].content or messages[0].role) * 10) }}"


@pytest.mark.default(
    "0",
    "2",
    "5",
    "7",
    "10",
    "13",
    "16",
    "19",
    "22",
    "24",
    "27",
    "30",
    "32",
    "35",
    "38",
    "40",
    "43",
    "46",
    "48",
    "51",
)
@pytest.mark.parametrize("index", range(len(VALUES)))
def test_no_error_quotes_much(server, index: int, caplog) -> None:
    base, change = VALUES[index]
    path = "/v1/chat/completions" if base is CHAT else "/v1/completions"
    answer = server.post(path, base | change)
    if answer.status_code == 200:
        # unknown names are left out, and logged
        taken = ["guided_json", "guided_regex", "stop_token_ids", "stream_options", LONG]
        # of chats alone
        taken += ["chat_template"] if base is COMPLETION else []
        assert next(iter(change)) in taken, "a value that is none"
        assert len(caplog.text) < 5000
        return
    error = assert_error(answer, answer.status_code)
    assert answer.status_code in (400, 404)
    assert len(answer.content) < 1500
    assert len(error["param"] or "") <= 120
    # what is wrong, and what to do, are both there
    assert any(word in error["message"] for word in ("Please ", "This server has "))
    assert len(caplog.text) < 5000


def test_nor_do_other_answers(server, caplog) -> None:
    short = LONG[:20_000]  # of a head, there is no more
    answers = [
        server.get(f"/v1/models/{short}"),
        server.get(f"/{short}"),
        server.http.request("Z" * 20_000, f"{server.base}/health"),
        server.post("/v1/completions", content=b"{}", headers={"content-type": short}),
        server.post("/v1/completions", content=b"{}", headers={"host": short}),
    ]
    assert [answer.status_code for answer in answers] == [404, 404, 405, 415, 403]
    for answer in answers:
        assert_error(answer, answer.status_code)
        assert len(answer.content) + len(str(answer.headers)) < 1500
        assert "Please " in answer.json()["error"]["message"] or answer is answers[0]


def test_templates_that_quote(caplog) -> None:
    with serve(template=REFUSES) as server:
        body = CHAT | {"messages": [{"role": "user", "content": LONG}]}
        answer = server.post("/v1/chat/completions", body)
        error = assert_error(answer, 400, "Please ")
        assert error["param"] == "messages"
        assert len(json.dumps(error)) < 1500
