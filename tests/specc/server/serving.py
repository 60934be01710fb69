"""A server of a tiny engine, on a port of its own, and what tests ask it."""

from __future__ import annotations

import contextlib
import functools
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.runtime.requests.chat_template import ChatTemplate
from specc.runtime.service.service import Service
from specc.sampling.generation_config import SamplingDefaults
from specc.sampling.params import SamplingParams
from specc.server.app import create_app
from specc.server.config import ConnectionLimits, ServeConfig
from specc.server.run import HttpServer
from tests.runtime.conftest import EOS, TinyModel, build_engine

TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'tool' -%}{{ raise_exception('no tools here') }}{%- endif -%}"
    "{{ message.role[0] + message.content + ' ' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}A{%- endif -%}"
)
MODEL = "tiny"
GREEDY = {"temperature": 0, "max_tokens": 12}


@dataclass
class Server:
    """A running server; `base` is its URL."""

    base: str
    service: Service
    engine: Engine
    app: Any
    http_server: HttpServer
    key: str = "none"

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        if body is not None:
            options["json"] = body
        return self.http.post(f"{self.base}{path}", **options)

    def complete(self, **body: Any) -> dict[str, Any]:
        answer = self.post("/v1/completions", body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.http.get(f"{self.base}{path}", **options)

    @functools.cached_property
    def http(self) -> httpx.Client:
        return httpx.Client(timeout=30, trust_env=False, verify=False)

    @functools.cached_property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.base}/v1", api_key=self.key, max_retries=0, http_client=self.http
        )

    @property
    def num_free(self) -> int:
        return self.engine.cache.allocator.num_free

    @property
    def is_idle(self) -> bool:
        pool = self.engine.cache.allocator
        return self.service.num_open == 0 and pool.num_free == pool.num_blocks

    def wait_until_idle(self) -> None:
        wait_for(lambda: self.is_idle, "requests or blocks are left")

    def wait_until_published(self) -> None:
        """Idle, and `/metrics` says so: it comes shortly after the last update of a request."""
        self.wait_until_idle()
        stats = self.service.core.scheduler.stats

        def is_published() -> bool:
            state = self.service.state()
            running = state.num_running + state.num_waiting
            return not running and state.stats.num_requests == stats.num_requests

        wait_for(is_published, "the last state is not published")


def wait_for(is_so: Callable[[], bool], otherwise: str, seconds: float = 10.0) -> None:
    end_s = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end_s, otherwise
        time.sleep(0.005)


@contextlib.contextmanager
def serve(
    engine: Engine | None = None, template: str | ChatTemplate | None = TEMPLATE, **options: Any
) -> Iterator[Server]:
    """Start a server in a thread; `options` of `ServeConfig`, and `limits`, `tls`, `plan`, …"""
    engine = engine or build_engine(eos=(EOS,))
    limits, tls = options.pop("limits", ConnectionLimits()), options.pop("tls", None)
    plan, max_waiting = options.pop("plan", "chain-4"), options.pop("max_waiting", 64)
    naps = {"sleep_after_s": options.pop("sleep_after_s", None)}
    defaults = SamplingDefaults(options.pop("defaults", {}))
    config = ServeConfig(**{"model_names": (MODEL, "other"), "log_every_s": 0.0} | options)
    with Service(EngineCore(engine, plan, defaults=defaults), max_waiting, **naps) as service:
        is_source = isinstance(template, str)
        chat = ChatTemplate(template, {"eos_token": "<eos>"}) if is_source else template
        app = create_app(service, config, chat)
        # asyncio sends at once where it is told that this is TCP, as `specc.server.listener` does
        listener = socket.socket(proto=socket.IPPROTO_TCP)
        listener.bind(("127.0.0.1", 0))
        server = HttpServer(app, limits, tls, timeout_graceful_shutdown=1)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        wait_for(lambda: server.started, "the server does not start")
        port = listener.getsockname()[1]
        try:
            scheme = "http" if tls is None else "https"
            yield Server(f"{scheme}://127.0.0.1:{port}", service, engine, app, server)
        finally:
            server.should_exit = True
            thread.join(10)


def assert_error(answer: Any, status: int, *words: str, param: str | None = None) -> dict[str, Any]:
    """The four fields of OpenAI's errors; no path, no traceback."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert list(body) == ["error"]
    error = body["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert_harmless(error["message"])
    for word in words:
        assert word in error["message"]
    if param is not None:
        assert error["param"] == param
    return error


def assert_harmless(text: str) -> None:
    # a sentence or two, not the three lines of the command line
    assert re.match(r"[A-Z0-9].+[.?…]$", text, re.DOTALL), text
    assert not re.search(r"\b(found|needed|do): ", text), text
    assert len(text) <= 600
    for leak in ("Traceback", 'File "', "site-packages", ".py", "/work", "/tmp", "/home", "0x7"):
        assert leak not in text, text


def slow_down(server: Server, seconds: float) -> Callable[[], None]:
    """Make every iteration take longer; returns what undoes it."""
    core, advance = server.service.core, server.service.core.advance

    def slowly() -> bool:
        time.sleep(seconds)
        return advance()

    core.advance = slowly  # type: ignore[method-assign]

    def undo() -> None:
        core.advance = advance  # type: ignore[method-assign]

    return undo


def greedy_ids(engine: Engine, text: str, max_tokens: int) -> list[int]:
    """What the target alone puts out, EOS included."""
    assert engine.tokenizer is not None
    tokens = TinyModel().greedy(engine.tokenizer.encode(text).ids, max_tokens)
    end = tokens.index(EOS) + 1 if EOS in tokens else len(tokens)
    return tokens[:end]


def greedy_text(engine: Engine, text: str, max_tokens: int) -> str:
    assert engine.tokenizer is not None
    return engine.tokenizer.decode(greedy_ids(engine, text, max_tokens), skip_special_tokens=True)


def alone(engine: Engine, text: str, params: SamplingParams, plan: str = "off") -> Any:
    """The output of a request that runs by itself, in the library."""
    from specc.runtime.llm import LLM

    return LLM(engine, plan=plan).generate(text, params)[0].outputs[0]
