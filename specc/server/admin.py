"""What the operator of a server may ask it: new weights of drafts, sleep, and waking up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from fastapi import FastAPI
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from starlette.requests import Request
from starlette.responses import Response

from specc.errors import FaultError, OverloadError, RequestError, SpeccError
from specc.runtime.service.service import Service
from specc.runtime.sleep import check_tags
from specc.server.body import parse_body, read_body
from specc.server.config import ServeConfig
from specc.server.errors import JSON, ApiError, api_error_of, bad_request
from specc.server.keys import has_key, wrong_key

RELOAD, SLEEP, WAKE_UP = "/v1/drafts/reload", "/sleep", "/wake_up"
# they need the admin's key, and no other one
PATHS = (RELOAD, SLEEP, WAKE_UP)
_FIELDS = {"path", "draft"}
Found = TypeVar("Found")
_log = logging.getLogger("specc.serve")


def add_admin_routes(app: FastAPI, service: Service, config: ServeConfig) -> None:
    """Let an application take what its operator asks.

    Args:
        service: started.
        config: keys, and the folder of new weights.
    """
    admin = config.admin
    keys = [key.encode() for key in admin.admin_keys]
    # files in memory at a time
    reloading = asyncio.Lock()

    def require(request: Request) -> None:
        if not keys:
            raise ApiError(
                403,
                f"{request.url.path} is refused by a server without an admin key. Please start it"
                " with SPECC_ADMIN_KEY, or --admin-key.",
                kind="permission_error",
                code="no_admin_key",
            )
        if not has_key(request.headers, keys):
            raise wrong_key("admin")

    @app.post(RELOAD, **_described("A file of new weights for a draft.", sorted(_FIELDS)))
    async def reload_draft(request: Request) -> Response:
        """Put new weights into a draft, between two steps."""
        require(request)
        async with read_body(request, config) as body:
            path, draft = _read_reload(parse_body(body))
        folder = admin.draft_weights_dir
        if folder is None:
            raise ApiError(
                403,
                "This server opens no file of new weights. Please start it with"
                " --draft-weights-dir.",
                kind="permission_error",
                code="no_draft_weights_dir",
            )
        async with reloading:
            version = await _run(lambda: service.operator.reload_draft(path, draft, folder))
        _log.info("%s has version %d of its weights", version.name, version.number)
        return JSON({"draft": version.name, "version": version.number, "sha256": version.digest})

    @app.post(SLEEP, **_described("Level 1."))
    async def sleep(request: Request) -> Response:
        """End open requests, refuse others, and let weights and caches leave memory."""
        require(request)
        level = request.query_params.get("level", "1")
        if not level.isdecimal():
            raise bad_request(f"level={level!r:.40}", "a number", "pass 1", "level")
        await _run(lambda: service.operator.sleep(int(level[:9])))
        return Response(status_code=200)

    @app.post(WAKE_UP, **_described("Awake, with the weights of before."))
    async def wake_up(request: Request) -> Response:
        """Have weights and caches in memory again, and take requests."""
        require(request)
        check_tags(request.query_params.getlist("tags"))
        await _run(service.operator.wake_up)
        return Response(status_code=200)

    @app.get("/is_sleeping")
    async def is_sleeping() -> Response:
        """Whether weights and caches are out of memory."""
        return JSON({"is_sleeping": service.operator.is_asleep})


def draft_versions(service: Service) -> dict[str, Any]:
    """For /version: which weights drafts have."""
    versions = service.engine.draft_weights.versions.values()
    found = {x.name: {"version": x.number, "sha256": x.digest or None} for x in versions}
    return {"drafts": found} if found else {}


def admin_families(service: Service, family: Callable[..., Any], label: Any) -> Iterator[Metric]:
    """Figures of new weights and of sleep.

    Args:
        family: makes one, of a kind, name, text and names of labels.
        label: values of the labels that every figure has.
    """
    drafts = service.engine.draft_weights
    versions = family(
        GaugeMetricFamily, "draft_weights_version", "Of a draft; 0: the engine's own.", "draft"
    )
    reloads = family(CounterMetricFamily, "draft_reloads", "New weights put in.", "draft")
    for version in drafts.versions.values():
        versions.add_metric([*label, version.name], version.number)
        reloads.add_metric([*label, version.name], version.number)
    yield versions
    yield reloads
    failures = family(CounterMetricFamily, "draft_reload_failures", "Files that were refused.")
    failures.add_metric(label, drafts.num_failures)
    yield failures
    # names and values of vLLM
    states = family(
        GaugeMetricFamily, "engine_sleep_state", "1 of the one it is in.", "sleep_state"
    )
    asleep = service.operator.is_asleep
    for name, value in (("awake", not asleep), ("weights_offloaded", asleep), ("discard_all", 0)):
        states.add_metric([*label, name], int(value))
    yield states


async def _run(work: Callable[[], Found]) -> Found:
    """Do something that may wait for the engine; what is wrong is told to whoever asked."""
    try:
        return await asyncio.to_thread(work)
    except (RequestError, OverloadError, FaultError) as error:
        raise api_error_of(error) from error
    except SpeccError as error:
        _log.warning("refused: %s", error.found)
        raise bad_request(error.found, error.needed, error.do) from error


def _read_reload(body: dict[str, Any]) -> tuple[str, str | None]:
    if unknown := sorted(body.keys() - _FIELDS):
        raise bad_request(f"a field {unknown[0]!r:.60}", "path and draft", "leave it out")
    path, draft = body.get("path"), body.get("draft")
    if not (isinstance(path, str) and 0 < len(path) <= 4096 and "\0" not in path):
        raise bad_request(
            "a path that names no file", "a file in --draft-weights-dir", "correct it", "path"
        )
    if not (draft is None or isinstance(draft, str)):
        raise bad_request("a draft without a name", "draft_0 or another", "correct it", "draft")
    return path, draft


def _described(answer: str, fields: list[str] | None = None) -> dict[str, Any]:
    """Arguments of a route, for the description of the API."""
    codes = {401: "Not the admin's key.", 403: "Refused by this server.", 400: "What is wrong."}
    ref = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    responses: dict[int | str, Any] = {
        code: {"description": text, "content": ref} for code, text in codes.items()
    }
    responses[200] = {"description": answer}
    found: dict[str, Any] = {"responses": responses}
    if fields:
        schema = {
            "type": "object",
            "required": ["path"],
            "properties": {name: {"type": "string"} for name in fields},
        }
        content = {"required": True, "content": {"application/json": {"schema": schema}}}
        found["openapi_extra"] = {"requestBody": content}
    return found
