"""What a chat's outputs are read with, and how what is read is written down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from specc.server.config import ServeConfig
from specc.server.parsers.message import Delta, MessageParser
from specc.server.parsers.reasoning import FORMATS, ReasoningParser
from specc.server.protocol import ChatRequest

# characters of a prompt whose end is looked at; a marker and white space after it are fewer
_END = 256


class MessageReader:
    """Of one request, for all of its outputs.

    Args:
        config: parsers of the server.
        wanted: the request, with all of its fields.
        prompt: rendered.
    """

    def __init__(self, config: ServeConfig, wanted: ChatRequest, prompt: str) -> None:
        # what a grammar has made begins with its form: such an output does not think
        is_free = not has_structure(wanted)
        self._thinks = FORMATS.get(config.reasoning_parser or "") if is_free else None
        self._has_reasoning = config.reasoning_parser is not None
        self._shows_reasoning = wanted.include_reasoning is not False
        self._prompt = prompt[-_END:]

    @property
    def markers(self) -> Sequence[str]:
        """What the parsers look for, special tokens or not."""
        return self._thinks.markers if self._thinks else ()

    def parser(self) -> MessageParser:
        """For one output."""
        thinks = self._thinks
        return MessageParser(ReasoningParser(thinks, self._prompt) if thinks else None)

    def message(self, whole: Delta) -> dict[str, Any]:
        """Fields of a message: null is a content that is not there, beside something else."""
        fields: dict[str, Any] = {"content": whole.content}
        if not whole.content and whole.reasoning:
            fields["content"] = None
        if self._has_reasoning:
            fields |= self._reasoning(whole.reasoning or None)
        return fields

    def delta(self, news: Delta) -> dict[str, Any]:
        """Fields of a chunk's delta."""
        fields: dict[str, Any] = {"content": news.content} if news.content else {}
        return fields | (self._reasoning(news.reasoning) if news.reasoning else {})

    def _reasoning(self, text: str | None) -> dict[str, Any]:
        # vLLM's name of today, and the one before it, which DeepSeek's API has
        return {"reasoning": text, "reasoning_content": text} if self._shows_reasoning else {}


def has_structure(wanted: ChatRequest) -> bool:
    """Whether a request says which form its outputs have."""
    form = wanted.response_format
    guided = (
        wanted.guided_json, wanted.guided_regex, wanted.guided_choice, wanted.guided_grammar,
        wanted.structured_outputs,
    )  # fmt: skip
    has_guide = any(value is not None for value in guided)
    return has_guide or (form is not None and form.type != "text")


def token_ids_of(tokenizer: Tokenizer | None, markers: Sequence[str]) -> frozenset[int]:
    """Markers that are tokens of their own: as special tokens, texts would leave them out."""
    if tokenizer is None:
        return frozenset()
    found = (tokenizer.token_to_id(marker) for marker in markers)
    return frozenset(token_id for token_id in found if token_id is not None)
