"""The application: routes, who may use them, and how errors are told."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from specc.errors import ConfigError, SpeccError
from specc.runtime.requests.chat_template import ChatTemplate
from specc.runtime.service.service import Service
from specc.runtime.service.state import Health
from specc.server import admin
from specc.server.body import BodyBudget, ClientGone
from specc.server.config import ServeConfig
from specc.server.endpoints import Endpoints
from specc.server.error_forms import error_response
from specc.server.errors import (
    JSON,
    ApiError,
    api_error_of,
    internal_error,
    shorten,
    unknown_model,
)
from specc.server.hosts import KnownHosts
from specc.server.keys import has_key, wrong_key
from specc.server.load import CountsRequests
from specc.server.memory import memory_kept_low
from specc.server.messages.endpoints import MessageEndpoints, no_batches
from specc.server.metrics import ServeMetrics
from specc.server.native_apis.routes import add_native_apis
from specc.server.openapi import (
    describe,
    message_body,
    of_health,
    of_model,
    of_text,
    request_body,
)
from specc.server.origins import with_origins
from specc.server.plain_requests import MESSAGES, PlainRequests
from specc.server.protocol import ChatRequest, CompletionRequest
from specc.server.responses.routes import Responses, add_routes
from specc.server.tokenizing import DetokenizeRequest, TokenizeRequest, Tokenizing
from specc.version import __version__

_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_log = logging.getLogger("specc.serve")
_PAGE = Path(__file__).with_name("page.html")
# what paths begin with
_NEED_KEYS = (
    "/v1", "/openapi.json", "/tokenize", "/detokenize", "/completion", "/props", "/api",
)  # fmt: skip
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline';"
    " connect-src 'self'; img-src data:; base-uri 'none'; frame-ancestors 'none'"
)


def create_app(
    service: Service, config: ServeConfig, template: ChatTemplate | None = None
) -> FastAPI:
    """The HTTP API of a service.

    Args:
        service: started; the caller closes it.
        config: names, keys and limits.
        template: of chats; None refuses them.
    Raises:
        ConfigError: a name of the model is that of an adapter.
    """
    if both := set(config.model_names) & set(service.engine.adapters):
        raise ConfigError(
            f"a model and an adapter that are both called {min(both)!r}",
            "names of their own: requests choose one by its name",
            "pass --served-model-name NAME",
        )
    metrics = ServeMetrics(service, config.model_names[0], config.vllm_metrics)
    endpoints = Endpoints(service, config, metrics, template)
    app = FastAPI(
        title="specc",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        lifespan=lambda _: _logging(metrics, config.log_every_s, endpoints),
    )
    app.state.metrics = metrics
    app.state.endpoints = endpoints
    app.state.bodies = BodyBudget(config)
    _add_status_routes(app, service, metrics)
    _add_model_routes(app, config, service.engine.max_seq_len, service.engine.adapters)

    @app.post("/v1/completions", **request_body(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Continue one prompt or several."""
        return await _guarded(endpoints.complete(request))

    @app.post("/v1/chat/completions", **request_body(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        return await _guarded(endpoints.chat(request))

    _add_message_routes(app, MessageEndpoints(endpoints, config))
    responses = Responses(endpoints, config, template)
    app.state.responses = responses.store
    add_routes(app, responses, _guarded)
    _add_token_routes(app, Tokenizing(endpoints, template))
    add_native_apis(app, endpoints, config, template)
    admin.add_admin_routes(app, service, config)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(SpeccError, _on_specc_error)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(Exception, _on_unexpected)
    if config.api_keys:
        app.add_middleware(_NeedsKey, keys=config.api_keys)
    if config.allowed_hosts is not None:
        app.add_middleware(KnownHosts, names=config.allowed_hosts)
    # these two around all others: keys and names depend on the path
    app.add_middleware(CountsRequests, load=metrics.load, paths=_endpoints_of(app))
    app.add_middleware(PlainRequests, has_ids=config.enable_request_id_headers)
    describe(app, config.strict_fields)
    # around what Starlette answers where nobody expected an error, too
    app.middleware_stack = with_origins(app.build_middleware_stack(), config.origins)
    app.state.origins = config.origins
    return app


async def _guarded(work: Coroutine[Any, Any, Response]) -> Response:
    """The answer; what nobody expected is logged here, and costs the client no connection."""
    try:
        return await work
    except (ApiError, SpeccError, ClientGone):
        raise
    except Exception:
        _log.exception("a request has failed")
        return error_response(internal_error())


def _endpoints_of(app: FastAPI) -> frozenset[str]:
    """Paths without an id to which something is posted."""
    posts = (route for route in app.routes if "POST" in (getattr(route, "methods", None) or ()))
    return frozenset(path for route in posts if "{" not in (path := getattr(route, "path", "{")))


def _add_token_routes(app: FastAPI, tokenizing: Tokenizing) -> None:
    @app.post("/tokenize", **request_body(TokenizeRequest, is_streamed=False))
    async def tokenize(request: Request) -> Response:
        """Token ids of a text, or of a chat."""
        return await _guarded(tokenizing.tokenize(request))

    @app.post("/detokenize", **request_body(DetokenizeRequest, is_streamed=False))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        return await _guarded(tokenizing.detokenize(request))

    @app.get("/tokenizer_info", **of_model())
    async def tokenizer_info() -> Response:
        """Special tokens, and the chat template."""
        return await _guarded(tokenizing.info())


def _add_status_routes(app: FastAPI, service: Service, metrics: ServeMetrics) -> None:
    @app.get("/health", **of_health())
    async def health() -> Response:
        """Whether requests can be served."""
        now = service.health
        content: dict[str, Any] = {"status": now.value}
        if (measured := service.state().measured) is not None:
            content["measuring_latency"] = measured
        if service.operator.is_asleep:
            content["is_sleeping"] = True
        return JSON(content, status_code=200 if now is Health.OK else 503)

    @app.get("/ping", **of_health())
    async def ping() -> Response:
        """As /health."""
        return await health()

    @app.get("/version")
    async def version() -> Response:
        """Of specc, and of the drafts' weights."""
        return JSON({"version": __version__, **admin.draft_versions(service)})

    @app.get("/load")
    async def server_load() -> Response:
        """Requests that are being served, as vLLM counts them."""
        return JSON({"server_load": metrics.load.num_generating})

    @app.get("/metrics", **of_text())
    async def prometheus() -> Response:
        """For Prometheus."""
        return Response(metrics.to_text(), media_type=_PROMETHEUS)

    @app.get("/stats")
    async def stats() -> Response:
        """For the page."""
        return JSON(metrics.to_json(), headers={"Cache-Control": "no-store"})

    @app.get("/", include_in_schema=False)
    async def root() -> Response:
        """Live figures."""
        return page()


def _add_model_routes(
    app: FastAPI, config: ServeConfig, max_seq_len: int, adapters: Sequence[str]
) -> None:
    created = int(time.time())
    all_names = (*config.model_names, *adapters)

    def describe_model(name: str) -> dict[str, Any]:
        # as vLLM lists them: an adapter is a model whose parent is the target
        is_adapter = name not in config.model_names
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "specc",
            "root": name if is_adapter else config.model_names[0],
            "parent": config.model_names[0] if is_adapter else None,
            "max_model_len": max_seq_len,
        }

    @app.get("/v1/models", **of_model())
    async def models() -> Response:
        """The names of the model, and its adapters."""
        names = [describe_model(name) for name in all_names]
        return JSON({"object": "list", "data": names})

    @app.get("/v1/models/{model:path}", **of_model())
    async def model(model: str) -> Response:
        """One name."""
        if model not in all_names:
            raise unknown_model(model, all_names)
        return JSON(describe_model(model))


def _add_message_routes(app: FastAPI, messages: MessageEndpoints) -> None:
    @app.post(MESSAGES, **message_body())
    async def create(request: Request) -> Response:
        """Answer a conversation, as Anthropic's API does."""
        return await _guarded(messages.create(request))

    @app.post(f"{MESSAGES}/count_tokens", **message_body(is_count=True))
    async def count_tokens(request: Request) -> Response:
        """Count the tokens of such a conversation's prompt."""
        return await _guarded(messages.count(request))

    for path in (f"{MESSAGES}/batches", MESSAGES + "/batches/{rest:path}"):

        @app.api_route(path, methods=["GET", "POST", "DELETE"], include_in_schema=False)
        async def batches() -> Response:
            """What Anthropic has there."""
            raise no_batches()


@contextlib.asynccontextmanager
async def _logging(
    metrics: ServeMetrics, every_s: float, endpoints: Endpoints
) -> AsyncIterator[None]:
    async def log() -> None:
        while True:
            await asyncio.sleep(every_s)
            if line := metrics.log_line():
                _log.info("%s", line)

    task = asyncio.ensure_future(log()) if every_s else None
    async with memory_kept_low():
        yield
    if task is not None:
        task.cancel()
    endpoints.close()


class _NeedsKey:
    """Lets no request under /v1, or for the description of the API, through without a key.

    Args:
        app: that answers what it lets through.
        keys: any of which will do.
    """

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or not scope["path"].startswith(_NEED_KEYS)
        # what the operator asks has keys of its own
        is_open = is_open or scope["path"] in admin.PATHS
        if is_open or has_key(Headers(scope=scope), self._keys):
            await self._app(scope, receive, send)
            return
        await error_response(wrong_key())(scope, receive, send)


async def _on_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _on_specc_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, SpeccError)
    answer = api_error_of(error)
    if answer.status == 500:
        _log.error("%s: %s", type(error).__name__, shorten(error.found, 1000))
    return error_response(answer)


async def _on_client_gone(_: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = {name.lower(): value for name, value in (error.headers or {}).items()}
    if error.status_code == 404:
        answer = ApiError(
            404,
            f"Invalid URL ({request.method[:20]} {shorten(request.url.path)}). Please use"
            " /v1/models, /v1/completions or /v1/chat/completions.",
            code="not_found",
        )
    elif error.status_code == 405:
        answer = ApiError(
            405,
            f"Not allowed to {request.method[:20]} on {shorten(request.url.path)}; expected"
            f" {headers.get('allow', 'another method')}. Please correct the method.",
            code="method_not_allowed",
        )
    else:
        answer = ApiError(error.status_code, str(error.detail), code="http_error")
    answer.headers = headers
    return error_response(answer)


async def _on_validation_error(_: Request, error: Exception) -> Response:
    return error_response(ApiError(400, "This is no request of this API. Please correct it."))


async def _on_unexpected(_: Request, error: Exception) -> Response:
    # whoever runs this application logs the error itself
    return error_response(internal_error())


def page() -> HTMLResponse:
    """Live figures, asked for at /stats."""
    return HTMLResponse(_read_page(), headers={"Content-Security-Policy": _POLICY})


@functools.cache
def _read_page() -> bytes:
    return _PAGE.read_bytes()
