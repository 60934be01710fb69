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

# of Anthropic's API; what its fields hold, the package `anthropic` says
_MESSAGE_ERROR = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
        "request_id": {"type": "string"},
    },
}
_MESSAGES: dict[str, Any] = {
    "type": "object",
    "required": ["model", "messages"],
    "properties": {
        "model": {"type": "string"},
        "messages": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["role", "content"],
                "properties": {
                    "role": {"enum": ["user", "assistant", "system"]},
                    "content": {
                        "anyOf": [
                            {"type": "string"},
                            {"type": "array", "items": {"type": "object"}},
                        ]
                    },
                },
            },
        },
    },
}
_CODES = (400, 401, 404, 408, 413, 415, 500, 503)


def message_body(is_count: bool = False) -> dict[str, Any]:
    """Arguments of a route of Anthropic's API.

    Args:
        is_count: it takes no limit of tokens, and has no stream.
    """
    own = {} if is_count else {"max_tokens": {"type": "integer", "minimum": 1}}
    schema = _MESSAGES | {
        "required": [*_MESSAGES["required"], *own],
        "properties": {**_MESSAGES["properties"], **own},
    }
    content = {"required": True, "content": {"application/json": {"schema": schema}}}
    error = {"application/json": {"schema": {"$ref": _PLACE.format(model="MessageError")}}}
    errors = {"description": "What is wrong, and what to do.", "content": error}
    responses: dict[int, Any] = {code: errors for code in (*_CODES, 501, 529)}
    answer: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    answer |= {} if is_count else {"text/event-stream": {}}
    responses[200] = {"description": "The answer.", "content": answer}
    return {"openapi_extra": {"requestBody": content}, "responses": responses}


def request_body(kind: type[BaseModel], is_streamed: bool = True) -> dict[str, Any]:
    """Arguments of a route whose body is parsed by hand.

    Args:
        kind: what the body holds.
        is_streamed: answers may be streams.
    """
    body = {"schema": {"$ref": _PLACE.format(model=kind.__name__)}}
    content = {"required": True, "content": {"application/json": body}}
    answer: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if is_streamed:
        answer["text/event-stream"] = {}
    responses: dict[int, Any] = {code: _ERRORS for code in _CODES}
    responses[200] = {"description": "The answer, or its stream.", "content": answer}
    return {"openapi_extra": {"requestBody": content}, "responses": responses}


def of_model() -> dict[str, Any]:
    """Arguments of a route that may not know the model."""
    return {"responses": {401: _ERRORS, 404: _ERRORS}}


def of_kept() -> dict[str, Any]:
    """Arguments of a route of what may be gone."""
    return {"responses": {400: _ERRORS, 401: _ERRORS, 404: _ERRORS}}


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
            schemas |= {"Error": _ERROR, "MessageError": _MESSAGE_ERROR}
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
