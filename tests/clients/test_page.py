"""The live page in a browser, beside `/metrics` of the server that it shows."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

import pytest

from tests.clients.actor import acting
from tests.clients.environment import node_with
from tests.specc.server.serving import Server, wait_for
from tests.specc.server.test_metrics import samples

pytestmark = pytest.mark.slow
PACKAGES = ("playwright-core@1.65.1", "@sparticuz/chromium@153.0.0")
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"properties": {"place": {"type": "string"}}}},
}
CHAT = {"messages": [{"role": "user", "content": "Look."}], "tools": [TOOL]}
Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with acting() as running:
        yield running


@pytest.fixture(scope="module")
def ask(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """One browser for all tests; screenshots stay where pytest's folders do."""
    home, missing = node_with(PACKAGES)
    assert not missing, missing
    folder = tmp_path_factory.mktemp("page")
    command = ["node", str(home / "page.mjs"), server.base + "/", str(folder)]
    errors = (folder / "errors").open("w+")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors, "text": True}
    with subprocess.Popen(command, **pipes) as node:  # type: ignore[call-overload]

        def send(name: str, **options: Any) -> Any:
            node.stdin.write(json.dumps({"ask": name} | options) + "\n")
            node.stdin.flush()
            line = node.stdout.readline()
            assert line, Path(errors.name).read_text()[-3000:]
            return json.loads(line)

        yield send
        node.stdin.close()


@contextlib.contextmanager
def load(server: Server) -> Iterator[None]:
    """Requests of all kinds one after the other, at least one of each."""
    is_over = threading.Event()

    def send() -> None:
        while True:
            server.post("/v1/chat/completions", CHAT)
            server.post("/v1/chat/completions", CHAT | {"max_tokens": 42, "stream": True})
            server.post("/v1/completions", {"prompt": "hello", "max_tokens": 200})
            server.post("/v1/messages", {"model": "tiny", "max_tokens": 50} | {
                "messages": CHAT["messages"]})  # fmt: skip
            server.post("/api/chat", CHAT | {"model": "tiny"})
            server.post("/tokenize", {"prompt": "hello"})
            server.post("/v1/completions", {"prompt": 7.5})
            server.post("/v1/unknown", {})
            if is_over.is_set():
                return

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def test_widths_and_schemes_under_load(server: Server, ask: Ask) -> None:
    """Nothing beside the screen, text that can be read, no error, nothing from elsewhere."""
    with load(server):
        for width in (360, 768, 1280):
            for scheme in ("light", "dark"):
                found = ask("look", width=width, scheme=scheme)
                assert found["scroll"] == width
                assert found["contrast"]["ratio"] >= 4.5, found["contrast"]
                assert found["errors"] == found["elsewhere"] == []


def rounded(number: float, digits: int) -> str:
    """As JavaScript does it: halves up."""
    return str(Decimal(number).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


def test_figures_are_those_of_metrics(server: Server, ask: Ask) -> None:
    with load(server):
        pass
    server.wait_until_published()
    wait_for(lambda: server.app.state.metrics.load.num_generating == 0, "a request stays open")
    page, found = ask("read"), samples(server)
    assert page["errors"] == []

    def value(name: str, labels: str = "") -> str:
        return f"{round(found.get((name, labels), 0)):,}"

    paths = {labels.split()[0] for name, labels in found if name == "http_requests_total"}
    assert len(paths) == 6
    rows = {row[0]: row[1:] for row in page["endpoints"]}
    for path in paths:
        kinds = [value("http_requests_total", f"{path} POST {x}") for x in ("2xx", "4xx", "5xx")]
        assert rows.pop("other paths" if path == "none" else path) == ["0", *kinds]
    assert not rows
    calls = found["tool_calls_total", "whole"] + found["tool_calls_total", "cut"]
    assert page["tools"] == {
        "outputs with tools": f"{found['tool_outputs_total', 'tool_call']:.0f}",
        "of these with a call": value("tool_outputs_total", "tool_call"),
        "calls": f"{calls:.0f}",
        "calls cut short": value("tool_calls_total", "cut"),
    }
    assert found["tool_calls_total", "cut"] > 0
    for name, metric in (
        ("prompt tokens", "prompt_tokens_total"),
        ("output tokens", "generation_tokens_total"),
        ("found in the cache", "prefix_cache_hits_total"),
        ("preemptions", "num_preemptions_total"),
        ("failed iterations", "engine_failures_total"),
    ):
        assert page["totals"][name] == value(metric), name
    assert found["prefix_cache_hits_total", ""] > 0
    steps = found["plan_drafts_total", "draft_0 chain-8"]
    accepted = found["plan_accepted_tokens_total", "draft_0 chain-8"]
    assert page["plans"] == ["chain-8 by draft_0"]
    assert page["figures"] == [
        f"{rounded(1 + accepted / steps, 2)} tokens a step · {steps:,.0f} steps"
    ]
    reached = [
        found["plan_accepted_tokens_per_pos_total", f"draft_0 chain-8 {i}"] for i in range(8)
    ]
    shares = [f"{i + 1}{rounded(100 * count / steps, 0)}\xa0%" for i, count in enumerate(reached)]
    assert page["depths"] == shares
    (row,) = page["loads"]
    steps = {
        labels.split()[1]: n for (name, labels), n in found.items() if name == "plan_steps_total"
    }
    total = sum(steps.values())
    shares = [
        f"{plan}\xa0{'100' if count == total else rounded(100 * count / total, 1)}\xa0%"
        for plan, count in sorted(steps.items(), key=lambda item: -item[1])
    ]
    assert row == ["1", ", ".join(shares), f"{total:,.0f}"]


def test_names_of_its_parts(ask: Ask) -> None:
    """All that a screen reader is told: sections and charts have names, columns have headers."""
    page = ask("read")
    assert page["regions"] == page["sections"] == 13
    assert page["charts"] == page["images"] == 8
    assert page["health"] == "ok"
    endpoints, plans = page["headers"][:5], page["headers"][5:]
    assert endpoints == ["endpoint", "open", "2xx", "4xx", "5xx"]
    assert plans == ["requests", "plans", "steps"]


def test_keys(ask: Ask) -> None:
    found = ask("press")
    assert found["reached"] == ["Pause", "/metrics"]
    assert found["label"] == "Resume"
    assert found["paused"] == 0 < found["resumed"]


def test_a_server_that_is_gone(ask: Ask) -> None:
    found = ask("lose")
    assert found["lost"].startswith("No answer from the server since ")
    assert found["back"] == ""
    assert found["bad"].startswith("HTTP 502 from the server since ")


def test_hours_of_it(ask: Ask) -> None:
    """An hour and more of updates leaves no more behind than a few minutes of them."""
    found = ask("stay", updates=5000)
    before, after = found["before"], found["after"]
    assert after["nodes"] == before["nodes"]
    assert after["listeners"] == before["listeners"]
    assert after["bytes"] < before["bytes"] + 60_000
