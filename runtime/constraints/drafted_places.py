"""What may follow tokens that a request has not put out: those of its drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from specc.runtime.constraints.grammar_compile import Ends, is_dead_end
from specc.runtime.constraints.mask_maker import MaskMaker

if TYPE_CHECKING:
    from llguidance import LLMatcher


class DraftedPlaces:
    """The places of a tree of drafted tokens, and what may follow each; for one thread.

    Place 0 is where the request is. A mask is made once for each place: drafts and the target ask
    for the same ones.

    Nothing that happens here reaches the request's own matcher. An error stays with a matcher for
    good, and an empty mask is one; copies share the library's lexer, and so its states, its fuel
    and its errors, which is why places have a compiled grammar of their own. Nor does a matcher
    ever go back: after a rollback the library (1.9) may give the mask of another branch, which it
    keeps by the number of its parser's row and the state of its lexer, and both branches may have
    the same. A copy costs 2 µs, and 35 ns for each token of the output.

    Args:
        base: at the beginning of the output; owned from now on.
        compile: the grammar once more, at its beginning, which shares nothing.
        vocab_size: V.
        output: tokens that the request has put out.
    """

    def __init__(
        self,
        base: LLMatcher,
        compile: Callable[[], LLMatcher],
        vocab_size: int,
        ends: Ends,
        output: Sequence[int],
    ) -> None:
        self._base = base
        self._compile = compile
        self._maker = MaskMaker(vocab_size, ends)
        self._output = [*output]
        self._has_failed = base.try_consume_tokens(self._output) != len(output)
        self._copy: LLMatcher | None = None
        # tokens by which the copy is ahead of the request
        self._ahead: list[int] = []
        self._forget()

    @property
    def is_slow(self) -> bool:
        """Looking ahead fails, or holds up all others: the request should not draft any more."""
        return self._has_failed or self._maker.is_slow

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
        """The request has put out a token."""
        self._forget()
        self._output.append(token_id)
        if not self._has_failed:
            self._has_failed = self._base.try_consume_tokens([token_id]) != 1
        if self._ahead[:1] == [token_id]:
            del self._ahead[0]
        else:
            self._copy = None

    def _forget(self) -> None:
        # the place above each, and the token between; none above place 0
        self._steps: list[tuple[int, int]] = [(0, -1)]
        self._children: dict[tuple[int, int], int] = {}
        self._made: dict[int, bytes | None] = {}

    def _make(self, path: list[int]) -> bytes | None:
        if not self._has_failed:
            if self._copy is None or self._ahead != path[: len(self._ahead)]:
                self._copy, self._ahead = self._base.deep_copy(), []
            matcher, rest = self._copy, path[len(self._ahead) :]
            if matcher.try_consume_tokens(rest) == len(rest):
                self._ahead = path
                mask = self._maker.make(matcher)
                if not matcher.is_error():
                    return mask
            self._copy = None
            if is_dead_end(matcher):
                return None
            self._has_failed = True
        return self._make_plainly(path)

    def _make_plainly(self, path: Sequence[int]) -> bytes | None:
        """The mask as plain decoding would come to it: each place has one before it goes on.

        Where the library gives up: what else was looked at leaves its marks in a lexer.
        """
        matcher = self._compile()
        mask = self._maker.make(matcher)
        for token_id in (*self._output, *path):
            if matcher.try_consume_tokens([token_id]) != 1:
                return None
            mask = self._maker.make(matcher)
        return mask
