"""Texts that stand for values, as JSON of the types that a tool's schema allows."""

from __future__ import annotations

import json
from collections.abc import Collection

from specc.server.parsers.json_scan import JsonScan
from specc.server.parsers.schema_part import SchemaPart, type_of

# of a value that is JSON, whatever the schema says
ANY_TYPE = frozenset(("null", "boolean", "integer", "number", "array", "object"))


def as_json(value: str, types: Collection[str] | None, part: SchemaPart | None = None) -> str:
    """A value as JSON: of a type that it can have other than text, else text, as by vLLM.

    Args:
        types: see `SchemaPart.types`; None is a text, whose opening quote has been written.
        part: of the schema: a text that it lists is one, though it could be another type.
    """
    if types is None:
        return in_string(value) + '"'
    written = _other_than_text(value, types)
    if written is not None and part is not None and "string" in types:
        is_text = not part.admits(json.loads(written)) and part.admits(value)
        written = None if is_text else written
    return json.dumps(value, ensure_ascii=False) if written is None else written


def can_be(value: str, types: Collection[str]) -> bool:
    """Whether a value is of one of the types, other than text."""
    return _other_than_text(value, types) is not None


def in_string(text: str) -> str:
    """A text, or a part of one, as it stands between quotes in JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _other_than_text(value: str, types: Collection[str]) -> str | None:
    text = value.strip()
    # templates write Python's None
    if "null" in types and text in ("null", "None"):
        return "null"
    if "boolean" in types:
        if text.lower() in ("true", "false"):
            return text.lower()
        # what else they could be is not allowed
        if text in ("0", "1") and not {"integer", "string"} & set(types):
            return "true" if text == "1" else "false"
    scan = JsonScan()
    # what follows a number ends it
    if scan.feed(text + " ", 0) != len(text) or not scan.is_done:
        return None
    try:
        parsed = json.loads(text)
        # 1e999 is no number to anybody who reads it
        json.dumps(parsed, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    is_other = not isinstance(parsed, str) and type_of(parsed) <= frozenset(types)
    return text if is_other else None
