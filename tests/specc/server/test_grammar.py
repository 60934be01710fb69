"""Grammars of hostile requests: they cost themselves, and the server goes on and ends."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from specc.runtime.constraints import grammars
from specc.runtime.constraints.grammar_child import LIMITS
from tests.hostile_grammars import chained_lark, chained_references, many_items, slow
from tests.specc.server.serving import assert_error, serve, wait_for
from tests.specc.server.test_run import Run

SMALL = {"prompt": "ab", "max_tokens": 8, "temperature": 0}


def ask(server: Any, timeout_s: float = 60.0, **body: Any) -> httpx.Response:
    with httpx.Client(timeout=timeout_s, trust_env=False, verify=False) as http:
        return http.post(f"{server.base}/v1/completions", json=SMALL | body)


def beside(call: Callable[[], Any]) -> Future[Any]:
    """Start a call in a thread that keeps nobody."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def pool_of(server: Any) -> Any:
    return server.service.engine.grammars.children


def wait_until_idle(server: Any) -> None:
    pool = pool_of(server)
    wait_for(lambda: not any(pool.num_open), "grammars are compiled for nobody")


def is_compiling(server: Any) -> bool:
    return bool(pool_of(server).num_open[0] and pool_of(server).pids)


@pytest.mark.slow
def test_chained_rules_end_no_server() -> None:
    """Each of these bodies was a segmentation fault."""
    with serve() as server:
        answer = ask(server, guided_json=chained_references(5_000))
        assert answer.status_code == 200, answer.text
        answer = ask(server, guided_grammar=chained_lark(4_000))
        assert answer.json()["choices"][0]["text"] == "x"
        assert_error(ask(server, guided_grammar=chained_lark(12_000)), 400, "rules")


def test_a_crash_costs_one_request(monkeypatch) -> None:
    """As of whatever else makes the library recurse: here, with less stack."""
    limits = dataclasses.replace(LIMITS, stack_bytes=1 << 20)
    monkeypatch.setattr(grammars, "LIMITS", limits)
    with serve() as server:
        error = assert_error(ask(server, guided_json=chained_references(5_000)), 400, "crashed")
        assert error["type"] == "invalid_request_error"
        answer = ask(server, guided_choice=["abba", "baab"])
        assert answer.json()["choices"][0]["text"] in ("abba", "baab")


def test_a_choice_of_thousands() -> None:
    with serve() as server:
        answer = ask(server, guided_choice=many_items(3_000), max_tokens=40)
        assert answer.json()["choices"][0]["text"] in many_items(3_000)


@pytest.mark.slow
def test_too_many_at_once_are_refused_and_small_ones_go_on() -> None:
    """Of the two places, one is for what is small: the other takes a large one after another."""
    with serve() as server:
        pool_of(server)._max_waiting = 2
        large = [beside(lambda i=i: ask(server, guided_grammar=slow(i))) for i in range(3)]
        wait_for(lambda: pool_of(server).num_open[1] == 2, "they do not wait")
        answer = ask(server, guided_grammar=slow(3))
        assert_error(answer, 503, "try again later")
        assert answer.headers["retry-after"] == "1"
        assert ask(server, guided_regex="ab|ba").status_code == 200
        assert not any(future.done() for future in large[1:])


@pytest.mark.slow
def test_a_client_that_leaves_ends_its_compilation(monkeypatch) -> None:
    monkeypatch.setattr(grammars, "LIMITS", dataclasses.replace(LIMITS, cpu_seconds=60.0))
    with serve() as server:
        assert ask(server, guided_regex="ab").status_code == 200
        with pytest.raises(httpx.ReadTimeout):
            ask(server, timeout_s=0.4, guided_grammar=slow())
        begin_s = time.monotonic()
        wait_until_idle(server)
        # it would have gone on for five seconds of the processor
        assert time.monotonic() - begin_s < 3.5
        assert ask(server, guided_regex="ba").status_code == 200


def test_a_deadline_holds_while_a_grammar_is_compiled() -> None:
    with serve(request_timeout_s=0.4) as server:
        assert_error(ask(server, guided_grammar=slow()), 503, "not compiled within the 0.4 s")
        wait_until_idle(server)


def test_the_process_ends_in_the_middle_of_a_compilation() -> None:
    run = Run(drain_timeout_s=30.0)
    waiting = [beside(lambda i=i: ask(run, guided_grammar=slow(i))) for i in range(3)]
    wait_for(lambda: is_compiling(run), "it is not compiled")
    begin_s = time.monotonic()
    run.signal()
    for future in waiting:
        assert_error(future.result(10), 503, "about to stop")
    assert run.end() == 0
    # well before the drain is over
    assert time.monotonic() - begin_s < 20.0
    assert pool_of(run).pids == []


STUCK = """
import asyncio, sys, time
from specc.server import run as serve_run

serve_run._END_S = 0.3

async def run():
    # a thread of asyncio's own, for which its event loop waits when it ends
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 30)
    return 3

with serve_run._End() as end:
    asyncio.run(end.after(run()))
"""


@pytest.mark.slow
def test_no_thread_keeps_the_process() -> None:
    command = [sys.executable, "-P", "-c", STUCK]
    assert subprocess.run(command, timeout=20).returncode == 3


@pytest.mark.slow
def test_small_requests_beside_six_choices_of_a_hundred_thousand() -> None:
    with serve(max_grammar_chars=2 << 20) as server, ThreadPoolExecutor(8) as threads:
        assert ask(server, guided_regex="ab").status_code == 200
        large = [
            threads.submit(ask, server, guided_choice=many_items(100_000, i), max_tokens=40)
            for i in range(6)
        ]
        seconds = []
        number = 0
        while not all(future.done() for future in large):
            begin_s = time.monotonic()
            answer = ask(server, guided_regex=f"ab{{{number + 1}}}")
            seconds.append(time.monotonic() - begin_s)
            assert answer.status_code == 200, answer.text
            number += 1
        assert {future.result().status_code for future in large} <= {200, 503}
        assert 200 in {future.result().status_code for future in large}
        assert len(seconds) > 10
        assert sorted(seconds)[len(seconds) // 2] < 0.5, seconds
        assert max(seconds) < 3.0, seconds
