"""A wall clock that jumps while requests are served: only what tells the time of day follows it."""

from __future__ import annotations

import contextlib
import email.utils
import json
import os
import re
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

from specc.server.listener import bind
from tests.runtime.conftest import save_engine
from tests.specc.server.serving import wait_for

# a process whose wall clock is as far off as a file says: the clocks of Python's own modules, too
MAIN = """
import datetime, pathlib, sys, time
file = pathlib.Path(sys.argv.pop(1))
real, real_ns = time.time, time.time_ns
def offset():
    return float(file.read_text() or 0)
time.time = lambda: real() + offset()
time.time_ns = lambda: real_ns() + int(offset() * 1e9)
class Jumping(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(time.time(), tz)
datetime.datetime = Jumping
from specc.cli.main import main
main()
"""
YEAR = 365 * 24 * 3600.0
TEMPLATE = "{{ strftime_now('%Y')[0] }}{% for m in messages %}{{ m.content }}{% endfor %}"


class Clocked:
    """`specc serve` with a clock of its own."""

    def __init__(self, scratch: Path, *options: str) -> None:
        self.file, self.log = scratch / "offset", scratch / "log"
        self.jump(0)
        (scratch / "template").write_text(TEMPLATE)
        with bind("127.0.0.1", 0) as free:
            self.port = free.getsockname()[1]
        engine = save_engine(scratch / "engine").path
        args = ["serve", str(engine), "--port", str(self.port), "--no-measure", *options]
        args += ["--chat-template", str(scratch / "template"), "--log-every", "0.2"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", MAIN, str(self.file), *args], stderr=log
            )
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}", timeout=20, trust_env=False, verify=False
        )
        wait_for(self._answers, "the server does not start", 60)

    def jump(self, seconds: float) -> None:
        """Away from the true time, in one step."""
        new = self.file.with_suffix(".new")
        new.write_text(str(seconds))
        os.replace(new, self.file)

    def _answers(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        with contextlib.suppress(httpx.TransportError):
            return self.http.get("/health").status_code == 200
        return False

    def figure(self, name: str) -> float:
        found = re.search(rf"^specc:{name}{{.*}} (\S+)$", self.http.get("/metrics").text, re.M)
        assert found, name
        return float(found[1])


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Clocked]:
    running = Clocked(tmp_path_factory.mktemp("clock"), "--request-timeout", "20")
    try:
        yield running
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(20) == 0
        assert "Traceback" not in running.log.read_text()
    finally:
        running.process.kill()
        running.process.wait()


JUMPS = (YEAR, -YEAR, 3600.0, -3600.0, 0.0)


@pytest.mark.slow
def test_requests_across_jumps(server) -> None:
    """Deadlines, connections and figures do not notice; `created` and `Date` follow."""
    body: dict[str, Any] = {"prompt": "ab", "max_tokens": 60, "ignore_eos": True, "temperature": 0}
    wanted = server.http.post("/v1/completions", json=body).json()
    for jump in JUMPS:
        lines: list[str] = []
        with server.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            reader = answer.iter_lines()
            lines.append(next(reader))
            server.jump(jump)
            lines += reader
        data = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        text = "".join(item["choices"][0]["text"] for item in data)
        assert text == wanted["choices"][0]["text"]
        assert data[-1]["choices"][0]["finish_reason"] == "length"
        assert len({item["created"] for item in data}) == 1
        # the next one, over a connection that was kept
        answer = server.http.post("/v1/completions", json=body)
        assert answer.json()["choices"] == wanted["choices"]
        assert abs(answer.json()["created"] - (time.time() + jump)) < 5
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
        assert server.http.post("/v1/chat/completions", json=chat).status_code == 200
        assert server.http.get("/health").status_code == 200
        wait_for(lambda jump=jump: date_is_off_by(server, jump), "Date does not follow")
    server.jump(0)
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert 0 < server.figure(f"{name}_sum") < 60
    assert 0 <= server.figure("inter_token_latency_seconds_sum") < 60
    assert server.figure("goodput_tokens_per_second") >= 0
    assert 0 < server.http.get("/stats").json()["up_s"] < 300


def date_is_off_by(server: Clocked, seconds: float) -> bool:
    date = server.http.get("/health").headers["date"]
    found = email.utils.parsedate_to_datetime(date).timestamp()
    return abs(found - time.time() - seconds) < 5


@pytest.mark.slow
def test_the_log_goes_on_across_jumps(server) -> None:
    body = {"prompt": "ab", "max_tokens": 60, "ignore_eos": True}
    for jump in (-YEAR, YEAR, 0.0):
        server.jump(jump)
        count = server.log.read_text().count("tokens/s")
        end_s = time.monotonic() + 10
        while server.log.read_text().count("tokens/s") <= count:
            assert time.monotonic() < end_s, server.log.read_text()[-2000:]
            assert server.http.post("/v1/completions", json=body).status_code == 200


@pytest.mark.slow
def test_timeouts_across_jumps(tmp_path) -> None:
    """A drain lasts as long as it is meant to, and a late request ends when it is late."""
    running = Clocked(tmp_path, "--request-timeout", "0.4", "--drain-timeout", "20")
    jumps = threading.Event()

    def jump() -> None:
        while not jumps.wait(0.02):
            running.jump(YEAR)
            running.jump(-YEAR)

    thread = threading.Thread(target=jump)
    thread.start()
    try:
        body = {"prompt": "ab", "max_tokens": 90, "ignore_eos": True, "n": 20}
        begin_s = time.monotonic()
        choices = running.http.post("/v1/completions", json=body).json()["choices"]
        seconds = time.monotonic() - begin_s
        # whoever ended by the clock has waited for 0.4 s, and nobody for much longer
        late = [choice for choice in choices if choice["stop_reason"] == "timeout"]
        assert seconds < 10
        assert not late or seconds > 0.35
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(20) == 0
    finally:
        jumps.set()
        thread.join()
        running.process.kill()
        running.process.wait()
