"""What parsers find in a text, in the order of the text."""

from __future__ import annotations

import abc
from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    """Characters of the content, or of the thinking before it."""

    text: str
    is_reasoning: bool = False


@dataclass(frozen=True)
class CallBegin:
    """A call of a tool that the request has; the calls of an output come one after the other.

    Args:
        id: that the model has given to the call, of formats that have such.
    """

    name: str
    id: str | None = None


@dataclass(frozen=True)
class CallArguments:
    """More of the last call's arguments: all of them, joined, are a JSON object."""

    text: str


@dataclass(frozen=True)
class CallEnd:
    """The last call has ended; where it is not whole, its arguments are only a beginning."""

    is_whole: bool


Event = Text | CallBegin | CallArguments | CallEnd


class Parser(abc.ABC):
    """Takes a text in pieces of any size; what it makes of them does not depend on the pieces.

    A text that comes at once is a text of one piece, so that a whole answer and a stream cannot
    differ. A step of speculation brings several tokens: markers come whole, with text on both
    sides, or in parts. What may still become a marker is held back, and handed out by `finish` at
    the latest. No text is an error: what is not of the parser's form is content.
    """

    @abc.abstractmethod
    def feed(self, text: str) -> list[Event]:
        """What has become certain with these characters."""

    @abc.abstractmethod
    def finish(self) -> list[Event]:
        """What was held back; called once, after all text."""


class HeldParser(Parser):
    """A parser that goes from place to place in what it holds, until that is too little."""

    _held = ""  # text that nothing has been made of yet

    def feed(self, text: str) -> list[Event]:
        self._held += text
        events: list[Event] = []
        while self._held and self._advance(events):
            pass
        return events

    @abc.abstractmethod
    def _advance(self, events: list[Event]) -> bool:
        """Go on to the next place; False where more text is needed for that."""


class Blanks:
    """White space at the beginning of a text that comes in pieces, each of which is read once.

    Held back with the rest, it would be read again with every piece: by the square of its length.
    """

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def take(self, text: str, chars: str | None = None) -> str:
        """Keep what is white at the beginning; returns the rest.

        Args:
            chars: that count as white; None are all that Unicode counts so.
        """
        rest = text.lstrip(chars)
        if len(rest) < len(text):
            self._pieces.append(text[: len(text) - len(rest)])
        return rest

    def pop(self) -> str:
        """All that was kept, which is held no longer."""
        held = "".join(self._pieces)
        self._pieces.clear()
        return held


def find_marker(text: str, *markers: str) -> tuple[int, str | None]:
    """The first of some markers, none of which holds another, or where one may have begun.

    Returns:
        characters before the marker, and the marker; where there is none, characters of which no
        further text can make a part of one, and None.
    """
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    if found:
        return min(found, key=lambda item: item[0])
    held = 0
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), held, -1):
            if text.endswith(marker[:size]):
                held = size
                break
    return len(text) - held, None
