"""Responses over HTTP: what is refused and how, whose responses are whose, and attacks."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import pytest

from tests.specc.server.responses.rig import check_events, events_of
from tests.specc.server.serving import MODEL, assert_error, serve, slow_down, wait_for

PATH = "/v1/responses"
BODY = {"input": "ab", "temperature": 0, "max_output_tokens": 8}
FUNCTION = {"type": "function", "name": "f"}


@pytest.mark.parametrize(
    ("body", "param", "word"),
    [
        ({"background": True}, "background", "background"),
        ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "templates of prompts"),
        ({"context_management": [{"type": "compaction"}]}, "context_management", "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "web_search"),
        ({"tools": [FUNCTION, {"type": "mcp"}]}, "tools.1.type", "mcp"),
        ({"tools": [{"type": "function"}]}, "tools.0.name", "name"),
        ({"tools": [5]}, "tools.0.type", "None"),
        (
            {"tools": [FUNCTION], "tool_choice": {"type": "file_search"}},
            "tool_choice",
            "file_search",
        ),
        ({"tool_choice": "required"}, "tool_choice", "tools"),
        ({"input": []}, "input", "empty"),
        ({"input": None}, "input", "Missing"),
        ({"input": 5}, "input", "another form"),
        ({"input": [5]}, "input.0", "no object"),
        ({"input": [{"type": "computer_call"}]}, "input.0.type", "computer_call"),
        ({"input": [{}]}, "input.0.type", "None"),
        ({"input": [{"role": "x", "content": "a"}]}, "input.0.role", "'x'"),
        ({"input": [{"role": "user"}]}, "input.0.content", "content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input.0.content.0.type",
            "images",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "input.0.content.0.text",
            "Missing",
        ),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input.0.arguments", "Missing"),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
            "input.0.call_id",
            "'c'",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "c"}]},
            "input.0.output",
            "Missing",
        ),
        ({"input": [{"type": "reasoning", "summary": 5}]}, "input.0.summary", "list"),
        (
            {"input": [{"type": "reasoning", "encrypted_content": "gAAA"}]},
            "input.0.encrypted_content",
            "encrypted",
        ),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "'xml'"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a"}}},
            "text.format.schema",
            "Missing",
        ),
        ({"text": {"format": 5}}, "text.format.type", "None"),
        ({"max_output_tokens": 0}, "max_output_tokens", "1 or more"),
        ({"max_output_tokens": "5"}, "max_output_tokens", "integer"),
        ({"truncation": "middle"}, "truncation", "auto"),
        ({"include": ["everything"]}, "include.0", "include.0"),
        ({"top_logprobs": 2}, "top_logprobs", "include"),
        ({"metadata": {"a": 5}}, "metadata.a", "string"),
        ({"metadata": {"a": "b" * 513}}, "metadata", "512"),
        ({"reasoning": {"effort": "boundless"}}, "reasoning.effort", "effort"),
        ({"temperature": -1}, "temperature", "-1"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "resp_1"),
        ({"cache_salt": 5}, "cache_salt", "cache_salt"),
        ({"model": "others"}, "model", "others"),
    ],
)
def test_what_is_refused_is_named(server: Any, body: Any, param: str, word: str) -> None:
    answer = server.post(PATH, BODY | body)
    assert_error(answer, 404 if param == "model" else 400, word, param=param)


def test_fields_that_nobody_knows(server: Any) -> None:
    assert server.post(PATH, BODY | {"nothing": 1, "user": "me", "image": {}}).status_code == 200
    with serve(strict_fields=True) as strict:
        error = assert_error(strict.post(PATH, BODY | {"instruction": "a"}), 400)
        assert "Did you mean instructions?" in error["message"]


def test_answers_are_those_of_chats(server: Any) -> None:
    """The same prompt, tokens and options; sampled ones, too, by their seeds."""
    for more in ({}, {"temperature": 1, "seed": 5}, {"top_k": 3, "temperature": 1, "seed": 1}):
        response = server.post(PATH, BODY | {"instructions": "xy"} | more).json()
        messages = [{"role": "system", "content": "xy"}, {"role": "user", "content": "ab"}]
        chat = server.post(
            "/v1/chat/completions",
            {"messages": messages, "max_tokens": 8, "temperature": 0} | more,
        ).json()
        text = response["output"][0]["content"][0]["text"]
        assert text == chat["choices"][0]["message"]["content"]
        assert response["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
        assert response["temperature"] == more.get("temperature", 0)


def test_log_probabilities(server: Any) -> None:
    body = BODY | {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = server.client.responses.create(model=MODEL, **body)
    part = response.output[0].content[0]
    assert "".join(entry.token for entry in part.logprobs) == part.text
    assert {len(entry.top_logprobs) for entry in part.logprobs} == {2}
    events = events_of(server.post(PATH, body | {"stream": True}).text)
    final = check_events(events)
    assert final["output"][0]["content"][0]["text"] == part.text
    with serve(reasoning_parser="qwen3") as thinking:
        assert_error(thinking.post(PATH, body), 400, "Log probabilities", param="include")


def test_a_server_without_the_package(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from specc.server.responses import package

    def never(name: str) -> Any:
        raise ImportError(name)

    package._types.cache_clear()
    package.request_type.cache_clear()
    monkeypatch.setattr(package.importlib, "import_module", never)
    error = assert_error(server.post(PATH, BODY), 501, "openai", "/v1/chat/completions")
    assert error["code"] == "not_installed"
    assert server.post("/v1/chat/completions", {"messages": [
        {"role": "user", "content": "a"}], "max_tokens": 2}).status_code == 200  # fmt: skip


def test_another_key_reaches_nothing() -> None:
    with serve(api_keys=("one", "two")) as server:

        def ask(key: str, method: str, path: str, body: Any = None) -> Any:
            headers = {"Authorization": f"Bearer {key}"}
            return server.http.request(method, server.base + path, json=body, headers=headers)

        assert ask("three", "POST", PATH, BODY).status_code == 401
        response = ask("one", "POST", PATH, BODY).json()
        own = f"{PATH}/{response['id']}"
        item = response["output"][0]["id"]
        for method, path in (
            ("GET", own), ("GET", f"{own}/input_items"), ("POST", f"{own}/cancel"), ("DELETE", own),
        ):  # fmt: skip
            assert_error(ask("two", method, path), 404, "not found")
            assert_error(ask("two", method, path.replace("resp_", "resp_0")), 404, "not found")
        found = ask("two", "POST", PATH, BODY | {"previous_response_id": response["id"]})
        assert_error(found, 400, "not found", param="previous_response_id")
        found = ask("two", "POST", PATH, BODY | {"input": [{"type": "item_reference", "id": item}]})
        assert_error(found, 404, "not found")
        # the owner has all of it still
        assert ask("one", "GET", own).json() == response
        more = BODY | {"previous_response_id": response["id"]}
        assert ask("one", "POST", PATH, more).status_code == 200


def test_a_client_cannot_name_its_response(server: Any) -> None:
    answer = server.post(PATH, BODY, headers={"X-Request-Id": "mine"})
    assert answer.headers["x-request-id"] == "mine"
    assert "mine" not in answer.json()["id"]


def test_a_response_that_runs_is_cancelled() -> None:
    with serve() as server:
        undo = slow_down(server, 0.05)
        body = BODY | {"stream": True, "max_output_tokens": 60}
        with server.http.stream("POST", server.base + PATH, json=body) as stream:
            lines = stream.iter_text()
            text = ""
            while "output_text.delta" not in text:
                text += next(lines)
            name = events_of(text[: text.rindex("\n\n") + 2])[0]["response"]["id"]
            running = server.get(f"{PATH}/{name}").json()
            assert (running["id"], running["status"]) == (name, "in_progress")
            other = {"Authorization": "Bearer other"}
            for path in (f"{PATH}/{name}", f"{PATH}/{name}/cancel"):
                method = "POST" if path.endswith("cancel") else "GET"
                found = server.http.request(method, server.base + path, headers=other)
                assert found.status_code == 404
            cancelled = server.post(f"{PATH}/{name}/cancel").json()
            assert cancelled["status"] == "cancelled"
            text += "".join(lines)
        undo()
        assert check_events(events_of(text)) == cancelled
        assert server.get(f"{PATH}/{name}").json() == cancelled
        # again: it stays as it is
        assert server.post(f"{PATH}/{name}/cancel").json() == cancelled
        assert_error(server.post(f"{PATH}/resp_1/cancel"), 404)
        server.wait_until_idle()


def test_a_client_that_goes_leaves_nothing() -> None:
    with serve() as server:
        undo = slow_down(server, 0.02)
        body = BODY | {"stream": True, "max_output_tokens": 60}
        with server.http.stream("POST", server.base + PATH, json=body) as stream:
            next(stream.iter_text())
        undo()
        server.wait_until_idle()
        assert server.app.state.responses.num_responses == 0


def test_kept_responses_are_bounded() -> None:
    with serve(max_stored_responses=3, max_stored_bytes=20_000) as server:
        store = server.app.state.responses
        ids = [server.post(PATH, BODY).json()["id"] for _ in range(5)]
        found = [server.get(f"{PATH}/{name}").status_code for name in ids]
        assert found == [404, 404, 200, 200, 200]
        # what no client needs to be told twice is not kept at all
        server.post(PATH, BODY | {"store": False})
        assert store.num_responses == 3
        for _ in range(6):
            server.post(PATH, BODY | {"metadata": {str(i): "x" * 500 for i in range(16)}})
        assert store.num_bytes <= 20_000
    with serve(max_stored_responses=0) as server:
        response = server.post(PATH, BODY).json()
        assert response["store"] is False
        assert server.get(f"{PATH}/{response['id']}").status_code == 404


def test_hostile_bodies_are_refused_soon(server: Any, nothing_is_left: None) -> None:
    deep: Any = "a"
    for _ in range(200):
        deep = [deep]
    for body in (
        {"input": [{"role": "user", "content": "a"}] * 100_000},
        {"input": [{}] * 100_000},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": ""}] * 17_000}]},
        {"input": deep},
        {"input": "a", "metadata": {str(i): "b" for i in range(30_000)}},
        {"input": [{"role": "user", "content": [deep]}]},
        {"input": "a", "tools": [FUNCTION] * 10_000},
        {"input": "a", "text": {"format": {"type": "json_schema", "name": "a",
                                           "schema": {"x": "y" * 300_000}}}},
    ):  # fmt: skip
        begin_s = time.monotonic()
        answer = server.post(PATH, body)
        assert answer.status_code == 400
        assert_error(answer, 400)
        assert time.monotonic() - begin_s < 10
    assert server.post(PATH, BODY).status_code == 200


def test_a_stream_that_nobody_reads_keeps_nobody_up(server: Any) -> None:
    host, port = server.base.removeprefix("http://").split(":")
    body = json.dumps(BODY | {"stream": True, "max_output_tokens": 80, "ignore_eos": True}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    request = head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body
    stalled = [socket.create_connection((host, int(port))) for _ in range(4)]
    for connection in stalled:
        connection.sendall(request)
    assert server.post(PATH, BODY).status_code == 200
    for connection in stalled:
        connection.close()
    server.wait_until_idle()
    wait_for(lambda: not server.service.num_open, "streams are left")


def test_the_pages_of_a_list(server: Any) -> None:
    response = server.post(PATH, BODY | {"input": [{"role": "user", "content": "a"}] * 25}).json()
    path = f"{PATH}/{response['id']}/input_items"
    first = server.get(path).json()
    assert (len(first["data"]), first["has_more"]) == (20, True)
    rest = server.get(f"{path}?after={first['last_id']}").json()
    assert (len(rest["data"]), rest["has_more"]) == (5, False)
    ids = [item["id"] for item in first["data"] + rest["data"]]
    assert len(set(ids)) == 25
    assert [item["id"] for item in server.get(f"{path}?order=asc&limit=100").json()["data"]] == (
        ids[::-1]
    )
    for query in ("limit=0", "limit=101", "limit=x", "order=up", "after=nobody"):
        name = query.partition("=")[0]
        assert_error(server.get(f"{path}?{query}"), 400, param=name)
    assert_error(server.get(f"{PATH}/{response['id']}?stream=true"), 400, param="stream")
