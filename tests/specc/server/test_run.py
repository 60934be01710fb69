"""`specc serve` as a process: its port, its signals, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from specc.cli.main import app
from specc.errors import ConfigError
from specc.runtime.core import EngineCore
from specc.runtime.engine_args import AsyncEngineArgs
from specc.runtime.requests.chat_template import ChatTemplate, load_template
from specc.runtime.service.service import Service
from specc.server.app import create_app
from specc.server.config import Place, ServeConfig
from specc.server.listener import bind
from specc.server.run import DEAD, _Process, start_service
from tests.runtime.conftest import build_engine
from tests.specc.server.serving import slow_down, wait_for

MAIN = [sys.executable, "-P", "-c", "from specc.cli.main import main; main()"]
BODY = {"prompt": "ab", "max_tokens": 80, "ignore_eos": True, "temperature": 0}


class Run:
    """The process's event loop in a thread, with the signals that a process would get."""

    def __init__(self, drain_timeout_s: float = 10.0, advance_s: float = 0.0) -> None:
        self.engine = build_engine()
        self.service = Service(EngineCore(self.engine, "chain-4"))
        if advance_s:
            slow_down(self, advance_s)  # type: ignore[arg-type]
        listener = bind("127.0.0.1", 0)
        config = ServeConfig(("tiny",), log_every_s=0)
        place = Place(port=0, drain_timeout_s=drain_timeout_s)
        self.process = _Process(create_app(self.service, config), self.service, listener, place)
        self.base = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.http = httpx.Client(timeout=30, trust_env=False, verify=False)
        self.code: int | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        wait_for(self._answers, "the server does not start")

    def _run(self) -> None:
        async def run() -> int:
            loop = asyncio.get_running_loop()
            # only a main thread gets signals
            loop.add_signal_handler = lambda *_: None  # type: ignore[method-assign]
            return await self.process.run()

        self.code = asyncio.run(run())

    def _answers(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return self.http.get(f"{self.base}/health").status_code == 200
        return False

    def signal(self) -> None:
        self.process._signals.append(signal.SIGTERM)

    def end(self) -> int | None:
        self.thread.join(15)
        assert not self.thread.is_alive()
        self.service.close()
        return self.code


@contextlib.contextmanager
def streaming(run: Run) -> Iterator[Any]:
    """A request that runs, and the lines of its stream."""
    url = f"{run.base}/v1/completions"
    with (
        httpx.Client(timeout=30, trust_env=False, verify=False) as client,
        client.stream("POST", url, json=BODY | {"stream": True}) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        yield lines


def texts(lines: Any) -> str:
    data = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(choice["text"] for item in data for choice in item["choices"])


def test_draining_lets_open_requests_end_and_refuses_others() -> None:
    run = Run(advance_s=0.1)
    with streaming(run) as lines:
        run.signal()
        wait_for(lambda: run.http.get(f"{run.base}/health").status_code == 503, "it does not drain")
        assert run.http.get(f"{run.base}/health").json() == {"status": "draining"}
        assert run.service.num_open == 1
        answer = run.http.post(f"{run.base}/v1/completions", json=BODY)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        rest = list(lines)
        assert rest[-2:] == ["data: [DONE]", ""]
        assert len(texts(rest)) > 40
    assert run.end() == 0


def test_what_does_not_end_in_time_is_told_so() -> None:
    run = Run(drain_timeout_s=0.1, advance_s=0.05)
    url, whole = f"{run.base}/v1/completions", []
    client = httpx.Client(timeout=30, trust_env=False, verify=False)
    thread = threading.Thread(target=lambda: whole.append(client.post(url, json=BODY)))
    with streaming(run) as lines:
        thread.start()
        wait_for(lambda: run.service.num_open == 2, "the request is not in")
        run.signal()
        rest = [line for line in lines if line]
        assert "[DONE]" not in rest[-1]
        assert json.loads(rest[-1][6:])["error"]["code"] == "server_stopping"
    thread.join(10)
    assert whole[0].status_code == 503
    assert whole[0].json()["error"]["code"] == "server_stopping"
    assert run.end() == 0
    client.close()


def test_a_second_signal_ends_it_now() -> None:
    run = Run(drain_timeout_s=60, advance_s=0.05)
    with streaming(run):
        run.signal()
        time.sleep(0.1)
        assert run.thread.is_alive()
        begin_s = time.monotonic()
        run.signal()
        assert run.end() == 128 + signal.SIGTERM
        # the first one alone would have let it drain for 60 s
        assert time.monotonic() - begin_s < 30


def test_a_dead_engine_ends_the_process(caplog) -> None:
    run = Run()

    def fail(_: Any) -> None:
        raise RuntimeError("device lost")

    with caplog.at_level("CRITICAL"):
        run.service.core.runner.run = fail  # type: ignore[method-assign]
        answers = [run.http.post(f"{run.base}/v1/completions", json=BODY) for _ in range(3)]
        assert {answer.status_code for answer in answers} == {500}
        assert run.end() == DEAD == 1
    assert "failed for good" in caplog.text


def test_a_port_in_use_is_found_before_the_engine_is_loaded(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        result = CliRunner().invoke(app, ["serve", str(tmp_path / "none"), "--port", str(port)])
    assert result.exit_code == 2
    lines = result.stderr.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["found", "needed", "do"]
    assert f"port {port} is in use" in lines[0]


def test_a_port_that_two_bind_and_one_listens_at() -> None:
    first = bind("127.0.0.1", 0)
    second = bind("127.0.0.1", first.getsockname()[1])
    first.listen()
    with Service(EngineCore(build_engine(), "off")) as service:
        place = Place(port=second.getsockname()[1])
        web = create_app(service, ServeConfig(("tiny",)))
        with pytest.raises(ConfigError, match="in use"):
            asyncio.run(_Process(web, service, second, place).run())
    first.close()
    second.close()


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["--port", "70000"], "port 70000"),
        (["--host", "256.1.1.1", "--port", "0"], "256.1.1.1"),
        (["--log-level", "loud"], "--log-level loud"),
        (["--drain-timeout", "-1"], "--drain-timeout -1"),
        (["--request-timeout", "0"], "--request-timeout 0"),
        (["--max-body-bytes", "0"], "--max-body-bytes 0"),
        (["--api-key", ""], "API key"),
        (["--served-model-name", ""], "model names"),
        (["--threads", "0"], "--threads 0"),
        (["--max-waiting", "0"], "--max-waiting 0"),
        (["--max-connections", "0"], "--max-connections 0"),
        (["--default-chat-template-kwargs", "[1]"], "--default-chat-template-kwargs [1]"),
        (["--port", "0"], "does not exist"),
    ],
)
def test_bad_options(args: list[str], word: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["serve", str(tmp_path / "none"), *args])
    assert result.exit_code == 2
    lines = result.stderr.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["found", "needed", "do"], lines
    assert word in lines[0]


def test_the_variables_of_templates_that_are_given(tmp_path: Path, monkeypatch) -> None:
    """They reach the template; which it is, they cannot say."""
    (tmp_path / "chat_template.jinja").write_text("{{ thinks }}{{ messages[0].content }}")
    found: list[ChatTemplate | None] = []

    def load(*args: Any, **options: Any) -> None:
        found.append(load_template(*args, **options))
        raise ConfigError("far enough", "", "")

    monkeypatch.setattr("specc.server.run.load_template", load)
    command = ["serve", str(tmp_path), "--port", "0", "--default-chat-template-kwargs"]
    assert "far enough" in CliRunner().invoke(app, [*command, '{"thinks": false}']).stderr
    (template,) = found
    assert template is not None
    assert template.render([{"role": "user", "content": "a"}]) == "Falsea"
    template.close()
    result = CliRunner().invoke(app, [*command, '{"chat_template": "b"}'])
    assert result.exit_code == 2
    assert "chat_template among the defaults" in result.stderr
    assert len(found) == 1


def test_help_has_examples() -> None:
    result = CliRunner().invoke(app, ["serve", "--help"])
    assert result.exit_code == 0
    assert "Examples:\n    specc serve" in result.stdout


def test_which_policy_chooses(save_engine) -> None:
    from specc.runtime.policies.named import NAMES

    free = start_service(AsyncEngineArgs(save_engine))
    fixed = start_service(AsyncEngineArgs(save_engine, plan="chain-4"))
    with free, fixed:
        kinds = [type(s.core.scheduler.policy).__name__ for s in (free, fixed)]
    assert kinds == ["GoodputPolicy" if "goodput" in NAMES else "FixedPolicy", "FixedPolicy"]


def test_it_serves_at_once_and_measures_meanwhile(
    save_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first start measures beside requests, says so, and keeps it; the next one has it."""
    from specc.tune.latency import IdleLatency

    monkeypatch.setenv("SPECC_CACHE_DIR", str(tmp_path / "cache"))
    measured: list[EngineCore] = []

    def measure(core: EngineCore) -> IdleLatency:
        measured.append(core)
        return IdleLatency(core, 0.0)

    args = AsyncEngineArgs(save_engine)
    with start_service(args, measure) as service:
        run = TestClient(create_app(service, ServeConfig(("tiny",), log_every_s=0)))
        answer = run.post("/v1/completions", json=BODY)
        assert answer.status_code == 200
        health = run.get("/health").json()
        assert health["status"] == "ok"
        wait_for(lambda: "measuring_latency" not in run.get("/health").json(), "it never ends", 60)
        assert run.get("/stats").json()["measuring_latency"] is None
        assert 'latency_measured_ratio{model_name="tiny"} 1.0' in run.get("/metrics").text
        table = service.core.scheduler.policy._seconds.table  # type: ignore[attr-defined]
        assert table.about["source"] == "measured"
        again = run.post("/v1/completions", json=BODY).json()
        assert again["choices"] == answer.json()["choices"]
    assert len(measured) == 1
    with start_service(args, measure) as service:
        assert service.state().measured is None
        table = service.core.scheduler.policy._seconds.table  # type: ignore[attr-defined]
        assert table.about["source"] == "measured"
    # a plan of the caller's needs no seconds
    with start_service(AsyncEngineArgs(save_engine, plan="off", max_num_seqs=1), measure):
        pass
    assert len(measured) == 1


@pytest.fixture
def save_engine(tmp_path: Path) -> Path:
    from tests.runtime.conftest import save_engine as save

    return save(tmp_path / "engine").path


def test_sigterm_ends_a_process_with_0(save_engine: Path) -> None:
    """The whole of it once: the command, an engine directory, a request under way, the signal."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [*MAIN, "serve", str(save_engine), "--port", str(port)],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"SPECC_API_KEY": "secret"},
    )
    try:
        http = httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False, verify=False
        )

        def answers() -> bool:
            assert process.poll() is None
            with contextlib.suppress(httpx.TransportError):
                return http.get("/health").status_code == 200
            return False

        wait_for(answers, "the server does not start", 60)
        key = {"authorization": "Bearer secret"}
        assert http.get("/v1/models").status_code == 401
        assert http.get("/v1/models", headers=key).json()["data"][0]["id"] == "engine"
        body = {"prompt": "ab", "max_tokens": 60, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body, headers=key) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert list(lines)[-2:] == ["data: [DONE]", ""]
        assert process.wait(20) == 0
    finally:
        process.kill()
        log = process.communicate()[1]
    assert "draining" in log
    assert "Traceback" not in log
    assert "secret" not in log
