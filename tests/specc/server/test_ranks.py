"""`specc serve` of a sharded engine, as a process: it answers, ends, and dies as a whole."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import engines
from tests.runtime.ranks.processes import children_of, wait_gone
from tests.runtime.ranks.test_rendezvous import free_port
from tests.specc.server.serving import wait_for

BODY = {"prompt": "ab", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
LONG = BODY | {"max_tokens": 4000}
# within which all of it has to be gone
ENDS_S = 10.0


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engines.build_cut(tmp_path_factory.mktemp("cut"))


class Serving:
    def __init__(self, engine: Path) -> None:
        port = free_port()
        options = ["--port", str(port), "--oversubscribe", "--rank-timeout", "5"]
        # else it would measure passes first
        options += ["--plan", "tree-2-1"]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "specc", "serve", str(engine), *options],
            stderr=subprocess.PIPE,
            text=True,
        )
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False, verify=False
        )
        self.pids = [self.process.pid]

    def start(self) -> None:
        wait_for(self._answers, "the server does not start", 60)
        self.pids += children_of(self.process.pid)

    def _answers(self) -> bool:
        assert self.process.poll() is None
        with contextlib.suppress(httpx.TransportError):
            return self.http.get("/health").status_code == 200
        return False

    def ends(self) -> tuple[int, str]:
        """Exit code and log, when nothing is left of it."""
        assert self.process.stderr is not None
        code = self.process.wait(ENDS_S)
        assert not wait_gone(self.pids, 2.0)
        return code, self.process.stderr.read()

    def close(self) -> None:
        assert self.process.stderr is not None
        self.process.kill()
        self.process.wait()
        self.process.stderr.close()


@pytest.fixture
def serving(engine: Path) -> Iterator[Serving]:
    running = Serving(engine)
    try:
        running.start()
        yield running
    finally:
        running.close()


@pytest.mark.slow
def test_sigterm_ends_all_ranks(serving: Serving) -> None:
    """A request that is under way ends as it would have, and leaves no process."""
    assert len(serving.pids) == 2
    whole = serving.http.post("/v1/completions", json=BODY).json()
    assert whole["usage"]["completion_tokens"] == 8
    body = BODY | {"max_tokens": 60, "stream": True}
    with serving.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        serving.process.send_signal(signal.SIGTERM)
        assert list(lines)[-2:] == ["data: [DONE]", ""]
    code, log = serving.ends()
    assert code == 0, log
    assert "Traceback" not in log


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_server(serving: Serving) -> None:
    """Who waits gets an error; whatever started the server can start it again."""
    answers: list[Any] = []

    def ask() -> None:
        try:
            answers.append(serving.http.post("/v1/completions", json=LONG))
        except httpx.TransportError as error:
            answers.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    wait_for(lambda: _is_running(serving.http), "the request does not start")
    begin_s = time.monotonic()
    os.kill(serving.pids[1], signal.SIGKILL)
    code, log = serving.ends()
    assert time.monotonic() - begin_s < ENDS_S
    thread.join(ENDS_S)
    assert code == 1
    assert f"rank 1 (pid {serving.pids[1]}) was killed by signal 9 (SIGKILL)" in log
    (answer,) = answers
    assert answer.status_code == 500, answer
    assert "rank" not in answer.json()["error"]["message"]


def _is_running(http: httpx.Client) -> bool:
    text = http.get("/metrics").text
    return any(
        line.startswith("specc:num_requests_running") and not line.endswith(" 0.0")
        for line in text.splitlines()
    )
