"""A load's way to a server: streams of OpenAI's completions, over aiohttp."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from yarl import URL

from specc.errors import ConfigError, FaultError, OverloadError, RequestError, SpeccError
from specc.load.request import LoadRequest
from specc.load.run import Reply
from specc.speculation.metrics import SpecStats

_DO = "look at the server's log"
_ADDRESS = "look at the server's log; is this address the one of an HTTP server?"
_MOST_TEXT = 200
_SETTLE_S = 0.1
# name of a sample, without the server's → field of SpecStats
_FIELDS = {
    "spec_decode_num_drafts": "num_spec_steps",
    "spec_decode_num_draft_tokens": "num_draft_tokens",
    "spec_decode_num_accepted_tokens": "num_accepted_tokens",
}
_PER_DEPTH = "spec_decode_num_accepted_tokens_per_pos"


class HttpClient:
    """Requests of a server, each over a connection of its own.

    Asks for `ignore_eos` and for the usage with every chunk, as specc and vLLM know them. Counters
    of speculation come from the server's /metrics: they are of all that it does meanwhile.

    Sends within `async with` only, which may be entered again, in another event loop, too.

    Args:
        base: where it is, see `parse_base_url`.
        model: None asks the server.
        api_key: None sends none.
        temperature: 0 is greedy.
        seed: of sampling; each request has its own.
    """

    def __init__(
        self,
        base: URL,
        model: str | None = None,
        api_key: str | None = None,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.model = model
        self._base = base
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._temperature = temperature
        self._seed = seed
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> HttpClient:
        assert self._session is None, "one session at a time"
        self._session = aiohttp.ClientSession(
            # requests come when they are due, however many are open: none waits for another one's
            # connection, and none is sped up by one
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            # no time limit but that of the load
            timeout=aiohttp.ClientTimeout(),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=self._headers,
            # compressed events would come later than they were sent
            skip_auto_headers=("Accept-Encoding",),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        session, self._session = self._session, None
        assert session is not None, "entered"
        await session.close()

    async def connect(self) -> None:
        """Ask for the name of the model, unless it is known.

        Raises:
            ConfigError: no such server, or one that serves no model.
            SpeccError: it refuses.
        """
        try:
            async with self._exchange("GET", "v1/models") as response:
                await _check(response)
                models = json.loads(await response.read())["data"]
        except OSError as error:
            raise ConfigError(
                f"no server at {self._place} ({error.strerror or error})",
                "a server of completions",
                "start it, for example with specc serve, or correct --base-url",
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"a server at {self._place} that lists no models",
                "a server of OpenAI's API",
                "correct --base-url",
            ) from error
        if self.model is None and models:
            self.model = models[0]["id"]

    async def send(self, request: LoadRequest, on_tokens: Callable[[int], object]) -> Reply:
        body = {
            "model": self.model,
            "prompt": request.prompt,
            "max_tokens": request.num_output_tokens,
            "temperature": self._temperature,
            "seed": self._seed + request.index,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        async with self._exchange("POST", "v1/completions", body) as response:
            await _check(response)
            return await _read(response, on_tokens)

    async def counters(self) -> SpecStats | None:
        # a server looks at its engine now and then
        await asyncio.sleep(_SETTLE_S)
        try:
            async with self._exchange("GET", "metrics") as response:
                return parse_metrics(await response.text()) if response.status == 200 else None
        # ValueError: what is no text, or not that of Prometheus
        except (OSError, FaultError, ValueError):
            return None

    @property
    def _place(self) -> str:
        return f"{self._base.host_subcomponent}:{self._base.port}"

    @contextlib.asynccontextmanager
    async def _exchange(
        self, method: str, path: str, body: object = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request, and give its answer, whose body is still to come.

        Raises:
            OSError: nobody listens, or the connection broke.
            FaultError: the answer is no HTTP, or not all of it came.
        """
        assert self._session is not None, "within `async with`"
        try:
            async with self._session.request(
                method, self._base / path, json=body, allow_redirects=False
            ) as response:
                yield response
        except aiohttp.ClientPayloadError as error:
            raise FaultError("an answer that ends too early", "all of its body", _DO) from error
        except (aiohttp.ClientResponseError, aiohttp.ServerDisconnectedError) as error:
            raise FaultError("an answer that is no HTTP", "HTTP/1.1", _ADDRESS) from error


def parse_base_url(text: str) -> URL:
    """Read `http://localhost:8000`, with or without `/v1`.

    Raises:
        ConfigError: no such address.
    """
    try:
        url = URL(text)
    except ValueError:
        url = URL()
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(
            f"--base-url {text}", "an address of a server", "--base-url http://localhost:8000"
        )
    return url.with_path(url.path.rstrip("/").removesuffix("/v1"))


async def _read(response: aiohttp.ClientResponse, on_tokens: Callable[[int], object]) -> Reply:
    reason, known, usage = None, 0, None
    async for text in _events(response):
        if text == "[DONE]":
            break
        event = _parse(text)
        choices = event.get("choices") or [{}]
        usage = event.get("usage") or usage
        reason = choices[0].get("finish_reason") or reason
        count = 0
        if event.get("usage") and event.get("choices"):
            count = event["usage"].get("completion_tokens", 0) - known
        elif choices[0].get("text"):
            # a server that does not count says only that there is text
            count = 1
        if count > 0:
            known += count
            on_tokens(count)
    if reason is None:
        raise FaultError("a stream without an end", "a finish_reason", _DO)
    usage = usage or {}
    return Reply(reason, usage.get("prompt_tokens", 0), usage.get("completion_tokens"))


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """Data of server-sent events, as they come."""
    data: list[str] = []
    rest = b""
    async for piece in response.content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            text = line.rstrip(b"\r").decode("utf-8", "replace")
            if text.startswith("data:"):
                data.append(text[5:].removeprefix(" "))
            elif not text and data:
                yield "\n".join(data)
                data = []


def _parse(text: str) -> dict[str, Any]:
    try:
        event = json.loads(text)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise FaultError(f"an event that is no JSON: {text[:_MOST_TEXT]}", "JSON", _DO)
    if event.get("error"):
        raise FaultError(_message(event), "an answer", _DO)
    return event


async def _check(response: aiohttp.ClientResponse) -> None:
    """Raises SpeccError: the server has refused or failed."""
    if response.status == 200:
        return
    body = await response.read()
    try:
        message = _message(json.loads(body))
    except ValueError:
        message = body.decode("utf-8", "replace")
    found = f"HTTP {response.status}: {message[:_MOST_TEXT]}"
    kind: type[SpeccError] = RequestError
    if response.status in (429, 503):
        kind = OverloadError
    elif response.status >= 500:
        kind = FaultError
    raise kind(found, "status 200", _DO)


def _message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message", error) if isinstance(error, dict) else error or body)


def parse_metrics(text: str) -> SpecStats | None:
    """Counters named as vLLM's, summed over engines and models; None where there are none.

    Raises:
        ValueError: not Prometheus' text.
    """
    stats, depths = SpecStats(), dict[int, int]()
    is_known = False
    families = list(text_string_to_metric_families(text))
    # specc's servers have the same figures under vLLM's names, too
    own = [family for family in families if family.name.startswith("specc:")]
    for family in own or families:
        for sample in family.samples:
            # older servers name their counters without the suffix
            name = sample.name.partition(":")[2].removesuffix("_total")
            if name in _FIELDS:
                is_known = True
                total = getattr(stats, _FIELDS[name]) + round(sample.value)
                setattr(stats, _FIELDS[name], total)
            elif name == _PER_DEPTH and "position" in sample.labels:
                depth = int(sample.labels["position"])
                depths[depth] = depths.get(depth, 0) + round(sample.value)
    stats.accepted_at_depth = [depths.get(i, 0) for i in range(max(depths, default=-1) + 1)]
    return stats if is_known else None
