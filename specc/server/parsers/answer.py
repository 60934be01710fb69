"""The answer after thinking, where models write marks around it that are no text."""

from __future__ import annotations

import enum

from specc.server.parsers.events import Blanks, find_marker


class _At(enum.Enum):
    """Where in a text it is."""

    BEGIN = enum.auto()
    OPENED = enum.auto()
    INSIDE = enum.auto()
    CLOSED = enum.auto()
    OVER = enum.auto()


class Answer:
    """Takes one pair of marks off a text that comes in pieces of any size.

    The first mark counts where only white space stands before it. That goes with it, and so do a
    line break after it, one before the second mark, and white space after that. Any other text is
    handed out as it is.

    Args:
        marks: pairs of them; without any, all text is handed out at once.
    """

    def __init__(self, marks: tuple[tuple[str, str], ...]) -> None:
        self._marks = marks
        self._closing = ""
        self._place = _At.BEGIN if marks else _At.OVER
        self._held = ""
        # before it, where the first mark may stand
        self._blanks = Blanks()

    def feed(self, text: str) -> str:
        """What has become certain with these characters."""
        self._held += text
        if self._place is _At.BEGIN and not self._open():
            return ""
        if self._place is _At.OPENED and self._held:
            self._held = self._held.removeprefix("\n")
            self._place = _At.INSIDE
        found = self._inside() if self._place is _At.INSIDE else ""
        if self._place is _At.CLOSED:
            self._held = self._held.lstrip()
            self._place = _At.OVER if self._held else _At.CLOSED
        if self._place is not _At.OVER:
            return found
        rest, self._held = self._held, ""
        return found + rest

    def finish(self) -> str:
        """What was held back; called once, after all text."""
        return self._blanks.pop() + self._held

    def _open(self) -> bool:
        """Look for the first mark; False where more text is needed for that."""
        begin = self._held = self._blanks.take(self._held)
        if any(len(begin) < len(mark) and mark.startswith(begin) for mark, _ in self._marks):
            return False
        pair = next((pair for pair in self._marks if begin.startswith(pair[0])), None)
        blanks = self._blanks.pop()
        if pair is None:
            self._place, self._held = _At.OVER, blanks + begin
        else:
            self._place, self._closing = _At.OPENED, pair[1]
            self._held = begin.removeprefix(pair[0])
        return True

    def _inside(self) -> str:
        """Text up to the second mark, without what may be the line break before it."""
        size, marker = find_marker(self._held, self._closing)
        text = self._held[:size].removesuffix("\n")
        if marker is None:
            self._held = self._held[len(text) :]
        else:
            self._held = self._held[size + len(marker) :]
            self._place = _At.CLOSED
        return text
