"""Texts in pieces, and messages put together from what parsers make of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from specc.server.parsers.message import Delta, MessageParser


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
    return whole
