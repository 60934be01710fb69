"""What stands in the signatures of thinking blocks.

At Anthropic, a signature shows that a block is theirs. Here it shows nothing, and is not checked:
it is there because clients take a block without one for none. Of thinking that the client did not
want to see, it holds the text, so that a conversation goes on with it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping

_HIDDEN = "specc.text."


class Signature:
    """Of one block, whose text comes in pieces.

    Args:
        is_hidden: the block itself has no text.
    """

    def __init__(self, is_hidden: bool) -> None:
        self._text = bytearray()
        self._digest = hashlib.sha256()
        self._is_hidden = is_hidden

    def add(self, text: str) -> None:
        data = text.encode("utf-8", "replace")
        if self._is_hidden:
            self._text += data
        self._digest.update(data)

    def __str__(self) -> str:
        if self._is_hidden:
            return _HIDDEN + base64.b64encode(self._text).decode()
        return self._digest.hexdigest()


def thinking_in(block: Mapping[str, str]) -> str:
    """The text of a block that comes back: its own, or what its signature holds."""
    text, signature = block["thinking"], block["signature"]
    if text or not signature.startswith(_HIDDEN):
        return text
    try:
        return base64.b64decode(signature.removeprefix(_HIDDEN), validate=True).decode()
    except (binascii.Error, ValueError):
        return text  # somebody else's
