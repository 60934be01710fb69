"""Long values are not read again with every piece that comes of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from specc.server.parsers import tags
from specc.server.parsers.calls import CallParser
from specc.server.parsers.events import find_marker
from specc.server.parsers.formats import CALL_FORMATS
from specc.server.parsers.value_end import ValueEnd
from tests.specc.server.parsers.pieces import found
from tests.specc.server.parsers.writers import WRITERS

TOOLS: dict[str, Any] = {"add": {"properties": {"o": {"type": "object"}}}}


@pytest.mark.parametrize("form", ["kimi_k3", "qwen3_coder"])
def test_values_that_are_no_strings_are_searched_once(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces of about a token; beginnings of the mark that ends them are a part of them."""
    value = {"o": {"k": list(range(1000)), "t": "\n</para\n <|clo"}}
    text = WRITERS[form]([("add", value)])
    searched = 0
    find = ValueEnd.find

    def counting(text: str, *markers: str) -> tuple[int, str | None]:
        nonlocal searched
        searched += len(text)
        return find_marker(text, *markers)

    def counting_end(
        end: ValueEnd, text: str, at: int, kept: Sequence[str], is_last: bool
    ) -> tuple[int, bool]:
        nonlocal searched
        searched += len(text) - at
        return find(end, text, at, kept, is_last)

    monkeypatch.setattr(tags, "find_marker", counting)
    monkeypatch.setattr(ValueEnd, "find", counting_end)
    whole = found(lambda: CallParser(CALL_FORMATS[form], TOOLS), text, (4,))
    assert [(name, json.loads(arguments)) for name, arguments in whole.calls] == [("add", value)]
    assert len(text) // 2 < searched < 2 * len(text)


def test_what_may_end_a_call_is_waited_for_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """After marks that may belong to a value: neither held for ever nor read again for ever."""
    parser = CallParser(CALL_FORMATS["qwen3_coder"], {"add": {"properties": {"s": {}}}})
    begin = "<tool_call>\n<function=add>\n<parameter=s>\nx\n</function>\n</tool_call>\n"
    longest = 0
    for piece in [begin, *["word "] * 4000]:
        parser.feed(piece)
        longest = max(longest, len(parser._held))
    assert 4000 < longest < 5000
    assert len(parser._held) < 400
