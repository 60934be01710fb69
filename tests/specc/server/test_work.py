"""Large requests hold nobody up: what they hold is counted, refused early, and done elsewhere."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from specc.errors import OverloadError
from specc.runtime.processes.bounded_child import ChildLimits
from specc.runtime.requests.chat_template import ChatTemplate
from specc.server import body as serve_body
from specc.server import work as serve_work
from specc.server.body import check_counts
from specc.server.config import MAX_CONTAINERS, MAX_FIELDS, MAX_VALUES
from specc.server.errors import ApiError
from specc.server.work import LARGE_BODY_BYTES, PromptThreads
from tests.specc.server.serving import GREEDY, assert_error, serve

LONG = 64 << 10


def counts(data: Any) -> tuple[int, int, int]:
    """Commas, fields, and lists and objects of a value."""
    if not isinstance(data, (list, dict)):
        return 0, 0, 0
    inner = [counts(x) for x in (data.values() if isinstance(data, dict) else data)]
    fields = len(data) if isinstance(data, dict) else 0
    own = max(0, len(data) - 1), fields, 1
    return tuple(sum(parts) for parts in zip(own, *inner, strict=True))  # type: ignore[return-value]


def test_counts_are_those_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strings with all that looks like structure, and escapes in any number."""
    chance = random.Random(3)
    letters = [
        '"',
        "\\",
        "\\\\",
        ",",
        ":",
        "[",
        "{",
        "]",
        "}",
        "\n",
        "é",
        "\ud83d\ude00",
        "a",
        "u0022",
    ]

    def value(depth: int) -> Any:
        kind = chance.randrange(5 if depth else 3)
        if kind == 3:
            return [value(depth - 1) for _ in range(chance.randrange(4))]
        if kind == 4:
            return {text(): value(depth - 1) for _ in range(chance.randrange(4))}
        return text() if kind else chance.randrange(100)

    def text() -> str:
        return "".join(chance.choices(letters, k=chance.randrange(8)))

    for _ in range(300):
        data = value(4)
        body = json.dumps(data, ensure_ascii=chance.random() < 0.5, indent=chance.choice([None, 1]))
        for limits in (counts(data), tuple(n - 1 for n in counts(data))):
            for name, limit in zip(("VALUES", "FIELDS", "CONTAINERS"), limits, strict=True):
                monkeypatch.setattr(serve_body, f"MAX_{name}", limit)
            if limits == counts(data):
                check_counts(body.encode("utf-8", "surrogatepass"))
            else:
                with pytest.raises(ApiError):
                    check_counts(body.encode("utf-8", "surrogatepass"))


def test_levels_are_counted_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Brackets in strings are none, and lists beside each other are one level."""
    chance = random.Random(1)

    def value(depth: int) -> Any:
        if not depth:
            return chance.choice([1, "[[{", '\\"[', "]]"])
        inner = [value(chance.randrange(depth)) for _ in range(chance.randrange(3))]
        inner.append(value(depth - 1))
        return inner if chance.random() < 0.5 else {f"[{i}": v for i, v in enumerate(inner)}

    for depth in range(1, 9):
        for _ in range(20):
            body = json.dumps(value(depth)).encode()
            monkeypatch.setattr(serve_body, "MAX_DEPTH", depth)
            check_counts(body)
            monkeypatch.setattr(serve_body, "MAX_DEPTH", depth - 1)
            with pytest.raises(ApiError, match="levels"):
                check_counts(body)


def fill(head: str, unit: str, tail: str, size: int = 7 << 20) -> bytes:
    return (head + ",".join([unit] * (size // (len(unit) + 1))) + tail).encode()


@pytest.mark.default("texts", "messages")
@pytest.mark.parametrize(
    ("body", "words"),
    [
        (fill('{"prompt":[', "1", "]}"), f"{MAX_VALUES} values"),
        (fill('{"prompt":[', "[" * 40 + "]" * 40, "]}"), f"{MAX_CONTAINERS} lists"),
        (fill('{"prompt":[', '""', "]}"), f"{MAX_VALUES} values"),
        (fill('{"messages":[', '{"role":"user"}', "]}"), f"{MAX_FIELDS} fields"),
        (fill('{"prompt":"a","stop":[', '"ab"', "]}"), f"{MAX_VALUES} values"),
        (fill('{"prompt":"a","stream_options":{', '"bbbbbbbb":1', "}}"), f"{MAX_FIELDS} fields"),
    ],
    ids=["ids", "lists", "texts", "messages", "stops", "fields"],
)
def test_too_many_parts_are_not_parsed(
    server, body: bytes, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "/v1/chat/completions" if b"messages" in body[:20] else "/v1/completions"

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("it was parsed")

    monkeypatch.setattr(serve_body, "parse_object", never)
    headers = {"Content-Type": "application/json"}
    assert_error(server.post(path, content=body, headers=headers), 400, words)


@pytest.mark.default("texts", "text")
@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([1] * 900_000, "900000 tokens"),
        ([[1] * 900_000], "900000 tokens"),
        (["a"] * 900_000, "900000 outputs"),
        (["a" * 20_000] * 3, "20000 bytes"),
        ("a" * 2_000_000, "tokens or more"),
    ],
    ids=["ids", "list-of-ids", "texts", "long-texts", "text"],
)
def test_long_prompts_are_refused(server, prompt: Any, words: str) -> None:
    assert_error(server.post("/v1/completions", {"prompt": prompt, "echo": True}), 400, words)


def longest_pause(server, work) -> float:
    """Share of the time that something took for which the slowest look at /health waited."""
    longest, is_over = 0.0, threading.Event()

    def tick() -> None:
        nonlocal longest
        with httpx.Client() as client:
            while not is_over.is_set():
                begin_s = time.perf_counter()
                client.get(f"{server.base}/health", timeout=60)
                longest = max(longest, time.perf_counter() - begin_s)

    ticking = threading.Thread(target=tick)
    begin_s = time.perf_counter()
    ticking.start()
    try:
        work()
    finally:
        is_over.set()
        ticking.join()
    return longest / (time.perf_counter() - begin_s)


@pytest.mark.slow
def test_six_large_prompts_freeze_nobody(server) -> None:
    """7 MB each; a tokenizer takes a second for each of them, and holds the interpreter's lock."""
    body = json.dumps({"prompt": "hello world " * (7 << 20 >> 4), **GREEDY}).encode()
    chat = json.dumps({"messages": [{"role": "user", "content": "a b " * (7 << 18)}]}).encode()

    def post(number: int) -> httpx.Response:
        path, content = ("completions", body) if number % 2 else ("chat/completions", chat)
        headers = {"Content-Type": "application/json"}
        return httpx.post(f"{server.base}/v1/{path}", content=content, headers=headers, timeout=60)

    def attack() -> None:
        with ThreadPoolExecutor(6) as threads:
            for answer in threads.map(post, range(6)):
                assert_error(answer, 400, "tokens or more")

    # a freeze is as long as one of the six takes
    assert longest_pause(server, attack) < 0.12


@pytest.mark.slow
def test_an_endless_template_costs_its_chats_only() -> None:
    """The event loop goes on, and so do prompts that are no chats, small and long ones."""
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    # such that it is not seen at the start
    loops = "{% if messages[0].content == 'a' %}" + loops + "{% endif %}"
    limits = ChildLimits(cpu_seconds=0.6, memory_bytes=128 << 20)
    with serve(template=ChatTemplate(loops, {}, limits)) as running:
        chat = {"messages": [{"role": "user", "content": "a"}]}
        with ThreadPoolExecutor(2) as threads:
            asked = [threads.submit(running.post, "/v1/chat/completions", chat) for _ in range(2)]
            time.sleep(0.2)
            begin_s = time.perf_counter()
            assert running.get("/health", timeout=60).status_code == 200
            assert running.complete(prompt="ab", **GREEDY)["choices"]
            assert_error(running.post("/v1/completions", {"prompt": "a" * 300_000}), 400, "tokens")
            # in this process, rendering would not end
            assert time.perf_counter() - begin_s < 20
            for one in asked:
                assert_error(one.result(), 400, "takes too much to render", param="messages")


class Work:
    """What blocks until it is let go."""

    def __init__(self) -> None:
        self.began, self.gate = 0, threading.Event()

    def __call__(self) -> int:
        self.began += 1
        assert self.gate.wait(20)
        return self.began


async def until(is_so) -> None:
    for _ in range(2000):
        if is_so():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it does not come")


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no niceness of their own")
def test_the_engine_goes_before_long_prompts() -> None:
    async def scenario() -> None:
        threads, before = PromptThreads(), niceness()
        assert await threads.run(LONG, niceness) == min(before + 5, 19)
        assert await threads.run(LARGE_BODY_BYTES, niceness) == min(before + 5, 19)
        # these wait for others, and are soon done
        assert await threads.run(LONG, niceness, is_chat=True) == before
        assert niceness() == before
        threads.close()

    asyncio.run(scenario())


def test_prompts_wait_for_their_turn() -> None:
    """Large ones one by one; long ones beside them; what nobody waits for is not begun."""

    async def scenario() -> None:
        threads, large, long = PromptThreads(), Work(), Work()
        assert await threads.run(10, lambda: threading.current_thread().name) == (
            threading.current_thread().name
        )
        tasks = [asyncio.ensure_future(threads.run(LARGE_BODY_BYTES, large)) for _ in range(16)]
        await until(lambda: large.began == 1)
        with pytest.raises(OverloadError, match="16 large prompts"):
            await threads.run(LARGE_BODY_BYTES, large)
        # those of another size do not wait for them
        assert await threads.run(LONG, lambda: 5) == 5
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks[1:], return_exceptions=True)
        # their places are free
        again = asyncio.ensure_future(threads.run(LARGE_BODY_BYTES, lambda: 7))
        await asyncio.sleep(0.05)
        assert not again.done()
        large.gate.set()
        assert await tasks[0] == 1
        assert await again == 7
        assert large.began == 1
        # what runs keeps its place, though its client has gone
        gone = [asyncio.ensure_future(threads.run(LARGE_BODY_BYTES, long)) for _ in range(1)]
        await until(lambda: long.began == 1)
        gone[0].cancel()
        await asyncio.gather(*gone, return_exceptions=True)
        assert threads._large.num_open == 1
        threads.close()
        with pytest.raises(OverloadError):
            await threads.run(LARGE_BODY_BYTES, large)
        long.gate.set()
        await until(lambda: threads._large.num_open == 0)

    asyncio.run(scenario())


class Rest:
    """An event that is waited for until the test says so, or until it is set."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.is_over = threading.Event()

    def wait(self, seconds: float) -> None:
        self.seconds.append(seconds)
        self.is_over.wait(20)

    def set(self) -> None:
        self.is_over.set()


def test_large_prompts_leave_time_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each, as long as it took; nobody waits for that but the next large one."""
    begun: list[float] = []

    def work() -> None:
        begun.append(time.monotonic())
        time.sleep(0.05)

    async def scenario() -> None:
        threads = PromptThreads()
        rest: Any = Rest()
        threads._large._is_closed = rest
        # the answer does not wait for the rest
        async with asyncio.timeout(15):
            await threads.run(LARGE_BODY_BYTES, work)
        await until(lambda: rest.seconds)
        assert 0.05 <= rest.seconds[0] <= time.monotonic() - begun[0]
        first = asyncio.ensure_future(threads.run(LARGE_BODY_BYTES, work))
        assert await threads.run(LONG, lambda: 5) == 5
        await asyncio.sleep(0.05)
        assert len(begun) == 1
        monkeypatch.setattr(serve_work, "_MAX_REST_S", 0.01)
        rest.is_over.set()
        await first
        await until(lambda: len(rest.seconds) == 2)
        assert rest.seconds[1] == 0.01
        rest.is_over.clear()

        def fail() -> None:
            raise KeyError("a")

        # an error is told at once, too
        async with asyncio.timeout(15):
            with pytest.raises(KeyError):
                await threads.run(LARGE_BODY_BYTES, fail)
        await until(lambda: len(rest.seconds) == 3)
        last = asyncio.ensure_future(threads.run(LARGE_BODY_BYTES, work))
        await asyncio.sleep(0)
        # it ends the rest, and those that wait for what has not begun are told
        threads.close()
        threads.wait()
        with pytest.raises(asyncio.CancelledError):
            await last
        assert len(begun) == 2

    asyncio.run(scenario())
