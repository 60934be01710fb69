"""The OpenAPI description: bodies are parsed by hand, so what they hold is stated by hand."""

from __future__ import annotations

import functools
import json
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.responses import PlainTextResponse, Response

from specc.server.protocol import ChatRequest, CompletionRequest
from specc.server.tokenizing import DetokenizeRequest, TokenizeRequest

# bodies of requests
_KINDS = (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)
_PLACE = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}

_ERRORS = {
    "description": "What is wrong, and what to do.",
    "content": {"application/json": {"schema": {"$ref": _PLACE.format(model="Error")}}},
}


def request_body(kind: type[BaseModel], is_streamed: bool = True) -> dict[str, Any]:
    """Arguments of a route whose body is parsed by hand.

    Args:
        kind: what the body holds.
        is_streamed: answers may be streams.
    """
    body = {"schema": {"$ref": _PLACE.format(model=kind.__name__)}}
    content = {"required": True, "content": {"application/json": body}}
    codes = (400, 401, 404, 408, 413, 415, 500, 503)
    answer: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if is_streamed:
        answer["text/event-stream"] = {}
    responses: dict[int, Any] = {code: _ERRORS for code in codes}
    responses[200] = {"description": "The answer, or its stream.", "content": answer}
    return {"openapi_extra": {"requestBody": content}, "responses": responses}


def of_model() -> dict[str, Any]:
    """Arguments of a route that may not know the model."""
    return {"responses": {401: _ERRORS, 404: _ERRORS}}


def of_health() -> dict[str, Any]:
    """Arguments of a route that may say no."""
    schema = {"type": "object", "properties": {"status": {"type": "string"}}}
    content = {"application/json": {"schema": schema}}
    return {"responses": {503: {"description": "No requests, please.", "content": content}}}


def of_text() -> dict[str, Any]:
    """Arguments of a route that answers in text."""
    return {"response_class": PlainTextResponse}


def describe(app: FastAPI, has_strict_fields: bool) -> None:
    """Add the application's description, with the schemas that `request_body` names.

    Args:
        app: made with `openapi_url=None`: FastAPI's own route writes it anew for each request.
        has_strict_fields: unknown fields are refused.
    """
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            description = generate()
            schemas = description.setdefault("components", {}).setdefault("schemas", {})
            schemas["Error"] = _ERROR
            for path in description["paths"].values():
                for operation in path.values():
                    # no route answers with what FastAPI would by itself
                    operation["responses"].pop("422", None)
            for kind in _KINDS:
                schema = kind.model_json_schema(ref_template=_PLACE)
                schemas |= schema.pop("$defs", {}) | {kind.__name__: schema}
            for schema in schemas.values():
                if not has_strict_fields and schema.get("additionalProperties") is False:
                    del schema["additionalProperties"]
            app.openapi_schema = description
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]

    @functools.cache
    def written() -> bytes:
        return json.dumps(openapi(), ensure_ascii=False, separators=(",", ":")).encode()

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi_json() -> Response:
        """The description; written once, as that takes milliseconds of the event loop."""
        return Response(written(), media_type="application/json")
