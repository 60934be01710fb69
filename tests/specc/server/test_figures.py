"""Requests by endpoint, calls of tools, and plans by load: as metrics, and as the page has them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.actor import acting
from tests.specc.server.serving import Server, serve, slow_down, wait_for
from tests.specc.server.test_metrics import samples

BODY = {"prompt": "hello", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"properties": {"place": {"type": "string"}}}},
}


@pytest.fixture
def counted() -> Iterator[Server]:
    with serve() as running:
        yield running


def requests_of(server: Server, prefix: str = "specc:") -> dict[str, float]:
    """Path, method and class of status → requests."""
    found = samples(server, prefix)
    return {
        labels: value for (name, labels), value in found.items() if name.endswith("_requests_total")
    }


def test_requests_by_endpoint(counted: Server) -> None:
    """Paths that clients think up are one row, or they would fill the memory."""
    counted.complete(**BODY)
    counted.complete(**BODY)
    counted.post("/v1/completions/", {"prompt": 7.5})
    counted.post("/tokenize", {"prompt": "abc"})
    for i in range(5):
        assert counted.post(f"/v1/thought-up-{i}", {}).status_code == 404
    counted.get("/v1/models")
    want = {
        "/v1/completions POST 2xx": 2,
        "/v1/completions POST 4xx": 1,
        "/tokenize POST 2xx": 1,
        "none POST 4xx": 5,
    }
    wait_for(lambda: requests_of(counted) == want, "requests are counted otherwise")
    assert requests_of(counted, "http") == want
    assert counted.get("/stats").json()["endpoints"] == [
        {"path": "none", "open": 0, "ended": {"4xx": 5}},
        {"path": "/v1/completions", "open": 0, "ended": {"2xx": 2, "4xx": 1}},
        {"path": "/tokenize", "open": 0, "ended": {"2xx": 1}},
    ]


def test_streams_are_open_to_their_end(counted: Server) -> None:
    undo = slow_down(counted, 0.03)
    url = counted.base + "/v1/completions"
    with counted.http.stream("POST", url, json=BODY | {"stream": True, "max_tokens": 60}) as answer:
        lines = answer.iter_lines()  # kept: the connection ends with it
        next(lines)
        (row,) = counted.get("/stats").json()["endpoints"]
        assert row == {"path": "/v1/completions", "open": 1, "ended": {}}
    undo()
    counted.wait_until_idle()
    wait_for(lambda: counted.get("/stats").json()["endpoints"][0]["open"] == 0, "it stays open")


def test_requests_without_a_key_are_counted() -> None:
    with serve(api_keys=("secret",)) as server:
        assert server.post("/v1/completions", BODY).status_code == 401
        wait_for(lambda: requests_of(server) == {"/v1/completions POST 4xx": 1}, "not counted")


def test_plans_by_load(counted: Server) -> None:
    """Of one request alone, and of three together."""
    counted.complete(**BODY)
    counted.complete(**BODY, n=3)
    counted.wait_until_published()
    found, total = samples(counted), counted.get("/stats").json()["total"]
    stats = counted.service.core.scheduler.stats
    by_load = {row["requests"]: row["steps"] for row in total["plans_by_load"]}
    assert next(iter(by_load)) == "1"
    assert by_load["3-4"]["chain-4"] > 0
    for load, steps in by_load.items():
        for plan, count in steps.items():
            assert found["plan_steps_total", f"{load} {plan}"] == count
    assert sum(sum(steps.values()) for steps in by_load.values()) == stats.num_steps
    (row,) = total["drafting_plans"]
    assert (row["plan"], row["draft"], row["steps"]) == ("chain-4", "draft_0", stats.num_spec_steps)
    assert row["accepted_per_depth"] == stats.accepted_per_depth
    assert row["mean_acceptance_length"] == stats.mean_acceptance_length > 1
    assert row["acceptance_rate"] == stats.acceptance_rate
    labels = "draft_0 chain-4"
    assert found["plan_drafts_total", labels] == found["spec_decode_num_drafts_total", ""]
    for name in ("draft_tokens_total", "accepted_tokens_total"):
        assert found[f"plan_{name}", labels] == found[f"spec_decode_num_{name}", ""]
    for depth in range(4):
        position = found["spec_decode_num_accepted_tokens_per_pos_total", str(depth)]
        assert found["plan_accepted_tokens_per_pos_total", f"{labels} {depth}"] == position


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
def test_calls_of_tools(path: str, streams: bool) -> None:
    """An output with a call, one without, one whose call is cut, and one that had no tools."""
    chat: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Look."}],
        "tools": [TOOL],
        "stream": streams,
    }
    answer = {"role": "assistant", "content": "It is there."}
    tool = {"role": "tool", "tool_call_id": "a", "content": "21"}
    if path == "/v1/messages":
        function = TOOL["function"]
        schema = {"type": "object", **function["parameters"]}
        chat |= {"tools": [{"name": "look", "input_schema": schema}], "max_tokens": 100}
        tool = {"role": "user", "content": "no"}
    limit = {"options": {"num_predict": 42}} if path == "/api/chat" else {"max_tokens": 42}
    with acting() as server:
        call = json.dumps(chat)
        assert server.post(path, json.loads(call)).status_code == 200
        assert server.post(path, json.loads(call) | limit).status_code == 200
        assert server.post(path, {k: v for k, v in chat.items() if k != "tools"}).status_code == 200
        server.wait_until_idle()
        want = {"outputs": 2, "outputs_with_calls": 2, "calls": 2, "cut_calls": 1}
        wait_for(
            lambda: server.get("/stats").json()["tools"] == want, "calls are counted otherwise"
        )
        if path == "/v1/chat/completions":
            assert server.post(path, chat | {"messages": [*chat["messages"], answer, tool]})
            want |= {"outputs": 3}
        wait_for(
            lambda: server.get("/stats").json()["tools"] == want, "calls are counted otherwise"
        )
        found = samples(server)
        assert found["tool_calls_total", "whole"] == found["tool_calls_total", "cut"] == 1
        assert found["tool_outputs_total", "tool_call"] == 2
        assert found["tool_outputs_total", "no_tool_call"] == want["outputs"] - 2
