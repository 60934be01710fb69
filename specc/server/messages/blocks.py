"""The blocks of a message, whole and as events: one after the other, in the order of the text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from typing import Any

from specc.server.messages.signature import Signature
from specc.server.parsers.events import Text
from specc.server.parsers.message import CallDelta

Piece = Text | CallDelta


class BlockEvents:
    """Makes events of the pieces of a message; a block is what follows another kind of block.

    Args:
        hides_thinking: blocks of thinking have a signature alone.
    """

    def __init__(self, hides_thinking: bool = False) -> None:
        self._hides_thinking = hides_thinking
        self._num_blocks = 0
        # `type` of the open block; None where none is
        self._kind: str | None = None
        self._signature = Signature(hides_thinking)

    def take(self, pieces: Iterable[Piece]) -> Iterator[dict[str, Any]]:
        """The events that they make."""
        for piece in pieces:
            if isinstance(piece, CallDelta):
                if piece.id is not None:
                    call: dict[str, Any] = {
                        "type": "tool_use",
                        "id": piece.id,
                        "name": piece.name,
                        "input": {},
                    }
                    yield from self._begin(call)
                if piece.arguments:
                    yield self._delta("input_json_delta", "partial_json", piece.arguments)
            else:
                yield from self._text(piece)

    def close(self) -> Iterator[dict[str, Any]]:
        """End the open block, if there is one."""
        if self._kind == "thinking":
            yield self._delta("signature_delta", "signature", str(self._signature))
        if self._kind is not None:
            yield {"type": "content_block_stop", "index": self._num_blocks - 1}
        self._kind = None

    def _text(self, piece: Text) -> Iterator[dict[str, Any]]:
        if not piece.is_reasoning:
            if self._kind != "text":
                yield from self._begin({"type": "text", "text": ""})
            yield self._delta("text_delta", "text", piece.text)
            return
        if self._kind != "thinking":
            yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
            self._signature = Signature(self._hides_thinking)
        self._signature.add(piece.text)
        if not self._hides_thinking:
            yield self._delta("thinking_delta", "thinking", piece.text)

    def _begin(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self.close()
        self._kind = block["type"]
        self._num_blocks += 1
        yield {
            "type": "content_block_start",
            "index": self._num_blocks - 1,
            "content_block": block,
        }

    def _delta(self, kind: str, field: str, text: str) -> dict[str, Any]:
        delta = {"type": kind, field: text}
        return {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta}


def blocks_of(pieces: Iterable[Piece], hides_thinking: bool = False) -> list[dict[str, Any]]:
    """The same as whole blocks, as clients put them together."""
    events = BlockEvents(hides_thinking)
    blocks: list[dict[str, Any]] = []
    # texts of the last block, by field
    texts: dict[str, list[str]] = {}

    def end() -> None:
        for name, texts_of in texts.items():
            text = "".join(texts_of)
            if name == "partial_json":
                blocks[-1]["input"] = _object(text)
            else:
                blocks[-1][name] = text
        texts.clear()

    for event in (*events.take(pieces), *events.close()):
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_stop":
            end()
        else:
            ((name, text),) = ((k, v) for k, v in event["delta"].items() if k != "type")
            texts.setdefault(name, []).append(text)
    return blocks


def _object(text: str) -> dict[str, Any]:
    """Arguments of a call; of one that was cut, those that were there, as clients read them.

    What clients could not read in a stream either, such as thousands of levels, is an object of
    nothing.
    """
    try:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            # the client's own reader, which comes with its package
            from jiter import from_json

            found = from_json(text.encode("utf-8", "replace"), partial_mode=True)
        return _finite(found)  # type: ignore[no-any-return]
    except (ValueError, RecursionError):
        return {}


def _finite(value: Any) -> Any:
    """With texts for numbers that are too large for one: JSON has no word for them."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
