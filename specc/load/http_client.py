"""A load's way to a server: streams of OpenAI's completions."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

from specc.errors import ConfigError, FaultError, OverloadError, RequestError, SpeccError
from specc.load.http_exchange import BaseUrl, Response, open_request
from specc.load.request import LoadRequest
from specc.load.run import Answer
from specc.speculation.metrics import SpecStats

_DO = "look at the server's log"
_SAMPLE = re.compile(r"^\w+:(spec_decode_\w+?)(?:_total)?(?:\{(.*)\})? (\S+)", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')
_MOST_TEXT = 200
_SETTLE_S = 0.1


class HttpClient:
    """Requests of a server, each over a connection of its own.

    Asks for `ignore_eos` and for the usage with every chunk, as specc and vLLM know them. Counters
    of speculation come from the server's /metrics: they are of all that it does meanwhile.

    Args:
        base: where it is.
        model: None asks the server.
        api_key: None sends none.
        temperature: 0 is greedy.
        seed: of sampling; each request has its own.
    """

    def __init__(
        self,
        base: BaseUrl,
        model: str | None = None,
        api_key: str | None = None,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.model = model
        self._base = base
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._temperature = temperature
        self._seed = seed

    async def connect(self) -> None:
        """Ask for the name of the model, unless it is known.

        Raises:
            ConfigError: no such server, or one that serves no model.
            SpeccError: it refuses.
        """
        try:
            async with open_request(self._base, "GET", "/v1/models", headers=self._headers) as got:
                await _check(got)
                models = json.loads(await got.read())["data"]
        except OSError as error:
            raise ConfigError(
                f"no server at {self._base.authority} ({error.strerror or error})",
                "a server of completions",
                "start it, for example with specc serve, or correct --base-url",
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"a server at {self._base.authority} that lists no models",
                "a server of OpenAI's API",
                "correct --base-url",
            ) from error
        if self.model is None and models:
            self.model = models[0]["id"]

    async def send(self, request: LoadRequest, on_tokens: Callable[[int], object]) -> Answer:
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
        data = json.dumps(body).encode()
        async with open_request(
            self._base, "POST", "/v1/completions", body=data, headers=self._headers
        ) as response:
            await _check(response)
            return await _read(response, on_tokens)

    async def counters(self) -> SpecStats | None:
        # a server looks at its engine now and then
        await asyncio.sleep(_SETTLE_S)
        try:
            async with open_request(self._base, "GET", "/metrics", headers=self._headers) as got:
                return parse_metrics((await got.read()).decode()) if got.status == 200 else None
        except (OSError, FaultError, UnicodeDecodeError):
            return None


async def _read(response: Response, on_tokens: Callable[[int], object]) -> Answer:
    reason, known, usage = None, 0, None
    async for text in response.events():
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
    return Answer(reason, usage.get("prompt_tokens", 0), usage.get("completion_tokens"))


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


async def _check(response: Response) -> None:
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
    """Counters of speculation in Prometheus' text, named as vLLM's; None where there are none."""
    stats, positions = SpecStats(), dict[int, int]()
    counters = {
        "spec_decode_num_drafts": "num_spec_steps",
        "spec_decode_num_draft_tokens": "num_draft_tokens",
        "spec_decode_num_accepted_tokens": "num_accepted_tokens",
    }
    is_known = False
    for name, labels, value in _SAMPLE.findall(text):
        count = round(float(value))
        if name in counters:
            is_known = True
            setattr(stats, counters[name], getattr(stats, counters[name]) + count)
        elif name == "spec_decode_num_accepted_tokens_per_pos":
            match = _POSITION.search(labels)
            if match:
                place = int(match[1])
                positions[place] = positions.get(place, 0) + count
    stats.accepted_at_depth = [positions.get(i, 0) for i in range(max(positions, default=-1) + 1)]
    return stats if is_known else None
