"""What may follow tokens that a request has not put out: those of its drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specc.runtime.constraints.grammar_compile import Ends
from specc.runtime.constraints.mask_maker import MaskMaker

if TYPE_CHECKING:
    from llguidance import LLMatcher


class DraftedPlaces:
    """The places of a tree of drafted tokens, and what may follow each; for one thread.

    Place 0 is where the request is. A mask is made once for each place: drafts and the target ask
    for the same ones.

    Nothing that happens here reaches the request's own matcher, which is only copied: an error
    stays with a matcher for good, and an empty mask is one. Nor does a matcher ever go back: after
    a rollback the library (1.9) may give the mask of another branch, which it keeps by the number
    of its parser's row and the state of its lexer, and both branches may have the same. A copy
    costs 2 µs, and 35 ns for each token of the output.

    Args:
        matcher: the request's own, where it is, and wherever it will be.
        vocab_size: V.
        ends: tokens that end an output.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, ends: Ends) -> None:
        self._own = matcher
        self._maker = MaskMaker(vocab_size, ends)
        self._copy: LLMatcher | None = None
        # tokens by which the copy is ahead of the request
        self._ahead: list[int] = []
        self._forget()

    @property
    def is_slow(self) -> bool:
        """Looking ahead holds up all other requests: this one should not draft any more."""
        return self._maker.is_slow

    def after(self, place: int, token_id: int) -> int:
        """The place after another one and a token that its mask allows, and that is no end."""
        found = self._children.setdefault((place, token_id), len(self._steps))
        if found == len(self._steps):
            self._steps.append((place, token_id))
        return found

    def mask(self, place: int) -> bytes | None:
        """Tokens that may follow a place, a bit for each; the request's own has been asked for.

        None where none may: there plain decoding would end.
        """
        if place not in self._made:
            path: list[int] = []
            at = place
            while at:
                at, token_id = self._steps[at]
                path.append(token_id)
            self._made[place] = self._make(path[::-1])
        return self._made[place]

    def follow(self, token_id: int) -> None:
        """The request has put out a token, which its own matcher has taken."""
        self._forget()
        if self._ahead[:1] == [token_id]:
            del self._ahead[0]
        elif self._copy is not None and not self._ahead:
            if self._copy.try_consume_tokens([token_id]) != 1:
                self._copy = None
        else:
            self._copy = None

    def _forget(self) -> None:
        # the place above each, and the token between; none above place 0
        self._steps: list[tuple[int, int]] = [(0, -1)]
        self._children: dict[tuple[int, int], int] = {}
        self._made: dict[int, bytes | None] = {}

    def _make(self, path: list[int]) -> bytes | None:
        if self._copy is None or self._ahead != path[: len(self._ahead)]:
            self._copy, self._ahead = self._own.deep_copy(), []
        rest = path[len(self._ahead) :]
        if self._copy.try_consume_tokens(rest) == len(rest):
            self._ahead = path
            mask = self._maker.make(self._copy)
            if mask is not None or not self._copy.is_error():
                return mask
        self._copy = None
        return self._make_plainly(path)

    def _make_plainly(self, path: Sequence[int]) -> bytes | None:
        """The mask as plain decoding would come to it, whose every place has one before it goes on.

        What else was looked at leaves its marks in a matcher: an error of another branch, or fuel
        that tokens without masks have used up.
        """
        matcher, mask = self._own.deep_copy(), None
        for token_id in path:
            if matcher.try_consume_tokens([token_id]) != 1:
                return None
            mask = self._maker.make(matcher)
        return mask
