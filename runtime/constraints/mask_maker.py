"""Masks of a grammar, and what making them has taken."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from specc.runtime.constraints.grammar_compile import Ends

if TYPE_CHECKING:
    from llguidance import LLMatcher

# seconds of the processor for the masks of one request: at all, and more for each
_MAX_MASKS_S, _MAX_MASK_S = 1.0, 0.005


class MaskMaker:
    """Asks matchers what may follow, and counts the seconds; for one thread.

    Args:
        vocab_size: V.
        ends: tokens that end an output.
    """

    def __init__(self, vocab_size: int, ends: Ends) -> None:
        self._vocab_size = vocab_size
        self._ends = ends
        self._num_masks, self._seconds = 0, 0.0

    @property
    def is_slow(self) -> bool:
        """The masks hold up all other requests of the engine."""
        return self._seconds > _MAX_MASKS_S + _MAX_MASK_S * self._num_masks

    @property
    def cost(self) -> str:
        return f"{self._num_masks} masks took {self._seconds:.1f} s"

    def make(self, matcher: LLMatcher) -> bytes | None:
        """The tokens that may follow, a bit for each; None where none may, or the matcher fails."""
        begin_s = time.thread_time()
        mask = matcher.compute_bitmask()
        self._num_masks += 1
        self._seconds += time.thread_time() - begin_s
        # of a matcher that failed, the mask would look like that of a complete output
        if matcher.is_error():
            return None
        if self._ends.is_own:
            mask = _without(mask, self._ends.ids[0])
        return mask if _has_bit(mask, self._vocab_size) else None


def _without(mask: bytes, token_id: int) -> bytes:
    changed = bytearray(mask)
    changed[token_id >> 3] &= ~(1 << (token_id & 7))
    return bytes(changed)


def _has_bit(mask: bytes, count: int) -> bool:
    """Whether one of the first `count` bits is set."""
    whole, rest = divmod(count, 8)
    return mask.count(0, 0, whole) < whole or bool(rest and mask[whole] & (1 << rest) - 1)
