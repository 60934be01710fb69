"""Long values are not read again with every piece that comes of them."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import pytest

from specc.server.parsers import marked, tags
from specc.server.parsers.calls import CallParser
from specc.server.parsers.events import find_marker
from specc.server.parsers.formats import CALL_FORMATS
from tests.specc.server.parsers.pieces import found
from tests.specc.server.parsers.writers import WRITERS

TOOLS: dict[str, Any] = {"add": {"properties": {"o": {"type": "object"}}}}


@pytest.mark.parametrize(
    ("form", "module"), [("kimi_k3", tags), ("qwen3_coder", marked)], ids=["tags", "marked"]
)
def test_values_that_are_no_strings_are_searched_once(
    form: str, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces of about a token; beginnings of the mark that ends them are a part of them."""
    value = {"o": {"k": list(range(1000)), "t": "\n</para\n <|clo"}}
    text = WRITERS[form]([("add", value)])
    searched = 0

    def counting(text: str, *markers: str) -> tuple[int, str | None]:
        nonlocal searched
        searched += len(text)
        return find_marker(text, *markers)

    monkeypatch.setattr(module, "find_marker", counting)
    whole = found(lambda: CallParser(CALL_FORMATS[form], TOOLS), text, (4,))
    assert [(name, json.loads(arguments)) for name, arguments in whole.calls] == [("add", value)]
    assert len(text) // 2 < searched < 2 * len(text)
