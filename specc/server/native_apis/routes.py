"""Paths of llama.cpp's and Ollama's APIs; they are described there, and not in /openapi.json."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from specc.errors import SpeccError
from specc.runtime.requests.chat_template import ChatTemplate
from specc.server.body import ClientGone
from specc.server.config import ServeConfig
from specc.server.endpoints import Endpoints
from specc.server.errors import JSON, ApiError, api_error_of, internal_error, shorten
from specc.server.native_apis import llama_answer, ollama_answer
from specc.server.native_apis.llama_cpp import LlamaCompletion, props
from specc.server.native_apis.ollama import OllamaEndpoints, tags

_log = logging.getLogger("specc.serve")


def add_native_apis(
    app: FastAPI, endpoints: Endpoints, config: ServeConfig, template: ChatTemplate | None
) -> None:
    """Add them to an application, with errors in their forms."""
    complete = LlamaCompletion(endpoints)
    ollama = OllamaEndpoints(endpoints, template is not None)
    source = None if template is None else template.default_source
    names = (*config.model_names, *endpoints.service.engine.adapters)

    @app.post("/completion", include_in_schema=False)
    async def completion(request: Request) -> Response:
        """llama.cpp's."""
        return await _guarded(complete(request), llama_answer.error_form)

    @app.get("/props", include_in_schema=False)
    async def properties() -> Response:
        """llama.cpp's."""
        return JSON(props(endpoints, config.model_names[0], source))

    @app.post("/api/chat", include_in_schema=False)
    async def chat(request: Request) -> Response:
        """Ollama's."""
        return await _guarded(ollama.chat(request), ollama_answer.error_form)

    @app.post("/api/generate", include_in_schema=False)
    async def generate(request: Request) -> Response:
        """Ollama's."""
        return await _guarded(ollama.generate(request), ollama_answer.error_form)

    @app.get("/api/tags", include_in_schema=False)
    async def models() -> Response:
        """Ollama's."""
        return JSON(tags(names))


async def _guarded(
    work: Coroutine[Any, Any, Response], form: Callable[[ApiError], dict[str, Any]]
) -> Response:
    """The answer, or what is wrong; as `app` tells it, in another form."""
    try:
        return await work
    except ClientGone:
        raise
    except ApiError as found:
        error = found
    except SpeccError as found:
        error = api_error_of(found)
        if error.status == 500:
            _log.error("%s: %s", type(found).__name__, shorten(found.found, 1000))
    except Exception:
        _log.exception("a request has failed")
        error = internal_error()
    return JSON(form(error), status_code=error.status, headers=error.headers)
