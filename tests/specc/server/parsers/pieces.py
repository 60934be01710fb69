"""Texts in pieces, and messages put together from what parsers make of them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from specc.server.parsers.events import Parser
from specc.server.parsers.message import CallDelta, Delta, MessageParser


def cut(text: str, sizes: Sequence[int]) -> list[str]:
    """A text in pieces of these sizes, over and over."""
    pieces, at = [], 0
    for size in itertools.cycle(sizes):
        if at >= len(text):
            return pieces
        pieces.append(text[at : at + size])
        at += size
    raise AssertionError("no sizes")


def joined(parser: MessageParser, pieces: Sequence[str]) -> Delta:
    """What a client has who puts all deltas of a stream together."""
    whole = Delta()
    for index, piece in enumerate([*pieces, ""]):
        news = parser.feed(piece, is_last=index == len(pieces))
        whole.content += news.content
        whole.reasoning += news.reasoning
        for call in news.calls:
            if call.id is not None:
                assert call.name is not None
                whole.calls.append(CallDelta(call.index, call.id, call.name))
            whole.calls[call.index].arguments += call.arguments
            assert [one.index for one in whole.calls] == list(range(len(whole.calls)))
    return whole


def counted() -> Callable[[], str]:
    """Ids that are the same each time."""
    numbers = itertools.count()
    return lambda: f"call_{next(numbers)}"


@dataclass(frozen=True)
class Found:
    """A message as a client has it: content, (name, arguments) of each call, none is cut."""

    content: str
    calls: list[tuple[str, str]]
    is_whole: bool


def found(make: Callable[[], Parser], text: str, sizes: Sequence[int] = ()) -> Found:
    """What a parser of calls makes of a text, at once or in pieces of these sizes."""
    parser = MessageParser(calls=make(), make_id=counted())
    message = joined(parser, cut(text, sizes or [max(1, len(text))]))
    assert [call.id for call in message.calls] == [f"call_{i}" for i in range(len(message.calls))]
    calls = [(call.name or "", call.arguments) for call in message.calls]
    return Found(message.content, calls, parser.has_whole_calls)


def check_pieces(
    read: Callable[[str, tuple[int, ...]], Found], parts: st.SearchStrategy[str], count: int
) -> None:
    """Texts of such parts read the same in pieces of any sizes, and calls are JSON or content."""

    @settings(max_examples=count, deadline=None)
    @given(
        st.lists(parts, max_size=8).map("".join),
        st.lists(st.integers(1, 9), min_size=1, max_size=9).map(tuple),
    )
    def run(text: str, sizes: tuple[int, ...]) -> None:
        whole = read(text, ())
        assert read(text, sizes) == whole
        if whole.is_whole:
            assert all(isinstance(json.loads(arguments), dict) for _, arguments in whole.calls)
        if not whole.calls:
            assert whole.content == text

    run()
