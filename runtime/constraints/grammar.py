"""Where one request is in its grammar: what may follow, and what has come."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from specc.runtime.constraints.grammar_compile import Ends, shortened

if TYPE_CHECKING:
    from llguidance import LLMatcher
# seconds of the processor for the masks of one request: at all, and more for each
_MAX_MASKS_S, _MAX_MASK_S = 1.0, 0.005


class GrammarState:
    """Where one request is in its grammar; for one thread.

    `push` and `pop` look ahead along a draft's tokens, `advance` takes what the request put out.
    A mask is made once for each place: drafts and the target ask for the same ones.

    Args:
        matcher: at the root of the request's next tree; owned from now on.
        vocab_size: V.
        ends: tokens that end an output.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, ends: Ends) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._ends = ends
        self._refused: int | None = None
        self._num_masks, self._mask_s = 0, 0.0
        # tokens ahead of the output, and masks that were made, by these
        self._ahead: list[int] = []
        self._made: dict[tuple[int, ...], bytes | None] = {}
        self.is_over = False

    @property
    def vocab_size(self) -> int:
        """V."""
        return self._vocab_size

    @property
    def error(self) -> str | None:
        """Why nothing can follow although the output is not complete."""
        if self._matcher.is_error():
            return shortened(self._matcher.get_error())
        if self._refused is not None:
            return f"the grammar does not allow token {self._refused}"
        if self._is_slow:
            return f"{self._num_masks} masks took {self._mask_s:.1f} s, which others waited for"
        return None

    def advance(self, token_id: int) -> bool:
        """Take a token that was put out.

        Returns:
            whether the output ends here: after EOS, or, of a model without, where nothing but an
            end may follow; or because of `error`.
        """
        if self.is_over or self._is_slow:
            self.is_over = True
            return True
        is_end = token_id in self._ends.ids
        if self._matcher.is_stopped():
            # complete: the library takes EOS there without counting it
            self._refused = None if is_end else token_id
            self.is_over = True
        elif not self.push(token_id):
            self._refused = token_id
            self.is_over = True
        else:
            self._ahead.clear()
            made = self._made.items()
            self._made = {path[1:]: mask for path, mask in made if path[:1] == (token_id,)}
            self.is_over = is_end or (self._ends.is_own and self.mask() is None)
        return self.is_over

    def mask(self) -> bytes | None:
        """Tokens that may follow: bit v % 8 of byte v // 8 for token v, V bits or more.

        None where no token may: a complete output of a model without EOS, or an `error`.
        """
        if self._is_slow:
            return None
        place = tuple(self._ahead)
        if place not in self._made:
            self._made[place] = self._make_mask()
        return self._made[place]

    def _make_mask(self) -> bytes | None:
        begin_s = time.thread_time()
        mask = self._matcher.compute_bitmask()
        self._num_masks += 1
        self._mask_s += time.thread_time() - begin_s
        # of a matcher that failed, the mask would look like that of a complete output
        if self._matcher.is_error():
            return None
        if self._ends.is_own:
            mask = _without(mask, self._ends.ids[0])
        return mask if _has_bit(mask, self._vocab_size) else None

    @property
    def _is_slow(self) -> bool:
        """It holds up all other requests of the engine."""
        return self._mask_s > _MAX_MASKS_S + _MAX_MASK_S * self._num_masks

    def push(self, token_id: int) -> bool:
        """Look one token ahead; False, and nothing changed, where the grammar does not allow it."""
        if self._matcher.try_consume_tokens([token_id]) != 1:
            return False
        self._ahead.append(token_id)
        return True

    def pop(self) -> None:
        """Take back the last token of `push`."""
        self._matcher.rollback(1)
        self._ahead.pop()

    def goes_on(self, mask: bytes, token_id: int) -> bool:
        """Whether this state, whose mask it is, allows a token that does not end the output."""
        is_token = 0 <= token_id < self._vocab_size and token_id not in self._ends.ids
        return is_token and bool(mask[token_id >> 3] >> (token_id & 7) & 1)


def _without(mask: bytes, token_id: int) -> bytes:
    changed = bytearray(mask)
    changed[token_id >> 3] &= ~(1 << (token_id & 7))
    return bytes(changed)


def _has_bit(mask: bytes, count: int) -> bool:
    """Whether one of the first `count` bits is set."""
    whole, rest = divmod(count, 8)
    return mask.count(0, 0, whole) < whole or bool(rest and mask[whole] & (1 << rest) - 1)
