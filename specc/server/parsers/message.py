"""The message of one output, as its text comes."""

from __future__ import annotations

from dataclasses import dataclass

from specc.server.parsers.events import Event, Parser, Text


@dataclass
class Delta:
    """What is new about a message; of a whole text, the message."""

    content: str = ""
    reasoning: str = ""

    @property
    def says_something(self) -> bool:
        return bool(self.content or self.reasoning)


class MessageParser:
    """Thinking first, and then what follows it.

    Args:
        reasoning: of thinking; None takes all text for content.
    """

    def __init__(self, reasoning: Parser | None = None) -> None:
        self._reasoning = reasoning

    def feed(self, text: str, is_last: bool) -> Delta:
        """Take a part of the text.

        Args:
            text: new characters.
            is_last: none will follow.
        """
        delta = Delta()
        for event in self._read(text, is_last):
            if event.is_reasoning:
                delta.reasoning += event.text
            else:
                delta.content += event.text
        return delta

    def _read(self, text: str, is_last: bool) -> list[Event]:
        if self._reasoning is None:
            return [Text(text)]
        events = self._reasoning.feed(text)
        return events + self._reasoning.finish() if is_last else events
