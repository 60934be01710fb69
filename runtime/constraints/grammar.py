"""Where one request is in its grammar: what may follow, and what has come."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from specc.runtime.constraints.drafted_places import DraftedPlaces
from specc.runtime.constraints.grammar_compile import DEAD_END, Ends, error_of
from specc.runtime.constraints.mask_maker import MaskMaker

if TYPE_CHECKING:
    from llguidance import LLMatcher


class GrammarState:
    """Where one request is in its grammar; for one thread.

    Its matcher sees what plain decoding shows it, whatever drafts look at: after each token of the
    output the mask of what follows, then the next token. So masks, the library's limits and the
    seconds that masks may take are those of plain decoding with any plan. `drafted` looks ahead,
    on copies.

    Args:
        matcher: at the root of the request's next tree; owned from now on.
        vocab_size: V.
        ends: tokens that end an output.
        ahead: the same grammar at its beginning, sharing nothing with the matcher, to look ahead
            with, and what compiles one more; without them, copies of the matcher are used.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        vocab_size: int,
        ends: Ends,
        ahead: tuple[LLMatcher, Callable[[], LLMatcher]] | None = None,
    ) -> None:
        self._matcher = matcher
        self._begin = ahead or (matcher.deep_copy(), matcher.deep_copy)
        self._output: list[int] = []
        self._vocab_size = vocab_size
        self._ends = ends
        self._maker = MaskMaker(vocab_size, ends)
        self._refused: int | None = None
        # of this place, once it was asked for
        self._mask: bytes | None = None
        self._has_mask = False
        self._drafted: DraftedPlaces | None = None
        self.is_over = False

    @property
    def vocab_size(self) -> int:
        """V."""
        return self._vocab_size

    @property
    def error(self) -> str | None:
        """Why nothing can follow although the output is not complete."""
        if self._matcher.is_error():
            return error_of(self._matcher)
        if self._maker.is_slow:
            return f"{self._maker.cost}, which others waited for"
        if self._refused is not None and self.mask() is None:
            # tokens that would follow have ids beyond the model's
            return DEAD_END
        if self._refused is not None:
            return f"the grammar does not allow token {self._refused}"
        return None

    def advance(self, token_id: int) -> bool:
        """Take a token that is to be put out.

        Sets `is_over` where the output ends with it: after EOS, or, of a model without, where
        nothing but an end may follow.

        Returns:
            False where the output ends before it, because of `error`: the token is not allowed, or
            nothing can follow.
        """
        mask = self.mask()
        is_allowed = mask is not None and not self._maker.is_slow and _has(mask, token_id)
        # complete: the library takes EOS there without counting it
        if not is_allowed or not (
            self._matcher.is_stopped() or self._matcher.try_consume_tokens([token_id]) == 1
        ):
            self._refused = token_id
            self.is_over = True
            return False
        self._has_mask = False
        self._output.append(token_id)
        if self._drafted is not None:
            self._drafted.follow(token_id)
        self.is_over = token_id in self._ends.ids or (self._ends.is_own and self._is_complete)
        return True

    def mask(self) -> bytes | None:
        """Tokens that may follow: bit v % 8 of byte v // 8 for token v, V bits or more.

        None where no token may: a complete output of a model without EOS, or an `error`.
        """
        if not self._has_mask:
            self._mask = None if self._maker.is_slow else self._maker.make(self._matcher)
            self._has_mask = True
        return self._mask

    @property
    def drafted(self) -> DraftedPlaces:
        """What may follow the tokens of drafts from here."""
        if self._drafted is None:
            base, again = self._begin
            self._drafted = DraftedPlaces(
                base.deep_copy(), again, self._vocab_size, self._ends, self._output
            )
        return self._drafted

    @property
    def may_look_ahead(self) -> bool:
        """Whether steps of this request may draft: looking ahead did not take too long so far."""
        return self._drafted is None or not self._drafted.is_slow

    def goes_on(self, mask: bytes, token_id: int) -> bool:
        """Whether a mask allows a token that does not end the output."""
        is_token = 0 <= token_id < self._vocab_size and token_id not in self._ends.ids
        return is_token and _has(mask, token_id)

    @property
    def _is_complete(self) -> bool:
        return self.mask() is None and self.error is None


def _has(mask: bytes, token_id: int) -> bool:
    place = token_id >> 3
    return place < len(mask) and bool(mask[place] >> (token_id & 7) & 1)
