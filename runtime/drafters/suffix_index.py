"""Proposals of the host: what followed the longest suffix of a request when it came before.

The same as the operator `specc::lookup` (kernels/reference/trees.py), but for suffixes of any
length, at a cost that does not grow with the context, and over earlier outputs, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from specc.errors import ConfigError
from specc.runtime.drafters.suffix_automaton import SuffixAutomaton

_SEPARATOR = -1


class SuffixIndex:
    """Tokens of one request."""

    def __init__(self) -> None:
        self._automaton = SuffixAutomaton()
        # where the suffixes ended before: see `SuffixAutomaton.take`
        self._places: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._automaton)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens, ids of 0 and above."""
        automaton = self._automaton
        for token in tokens:
            automaton.append(token)
            self._places = automaton.take()

    def propose(self, num_tokens: int, max_ngram: int | None = None) -> tuple[list[int], int]:
        """What followed the longest suffix that ended earlier, too, at its latest such place.

        Where that reaches the end of the request, it goes on with the proposals themselves, as a
        repetition does.

        Args:
            num_tokens: proposals.
            max_ngram: longest suffix to be looked up; None is no limit.
        Returns:
            `num_tokens` tokens and the length of the suffix; none and 0 where there is none.
        """
        if not self._places or num_tokens < 1:
            return [], 0
        length, place = self._places[0]
        if max_ngram is not None and max_ngram < length:
            if max_ngram < 1:
                return [], 0
            length = max_ngram
            # the last pair that is long enough has the latest place
            place = max(place for longest, place in self._places if longest >= length)
        found = self._automaton.tokens[place : place + num_tokens].tolist()
        period = len(self._automaton) - place
        for i in range(len(found), num_tokens):
            found.append(found[i - period])
        return found, length


class OutputIndex:
    """Tokens of earlier requests, shared by those that run.

    Two generations: texts go into the young one, and when that has half of `max_tokens`, it
    becomes the old one, and what was old is dropped.

    Args:
        max_tokens: that are kept; of a longer text, the last half of them.
        longest: suffix that is looked up; a longer one counts as one of this length.
    Raises:
        ConfigError: `max_tokens` or `longest` is too small.
    """

    def __init__(self, max_tokens: int = 1 << 17, longest: int = 128) -> None:
        if max_tokens < 4 or longest < 1:
            raise ConfigError(
                f"an index of {max_tokens} tokens, suffixes of {longest}",
                "4 tokens or more, suffixes of 1 or more",
                "keep the defaults",
            )
        self._half = max_tokens // 2
        self._longest = longest
        # the young one first: of equal matches, the latest counts
        self._generations = [SuffixAutomaton()]

    def __len__(self) -> int:
        """Tokens kept, separators included."""
        return sum(map(len, self._generations))

    def add(self, tokens: Sequence[int]) -> None:
        """Append the text of a request that has ended; ids are 0 and above."""
        tokens = tokens[max(0, len(tokens) - self._half + 1) :]
        if len(self._generations[0]) + len(tokens) + 1 > self._half:
            self._generations = [SuffixAutomaton(), self._generations[0]]
        young = self._generations[0]
        for token in tokens[:-1]:
            young.append(token)
            young.take()
        # nothing follows the last token, so it is no place at which a suffix could be found
        for token in (*tokens[-1:], _SEPARATOR):
            young.append(token)

    def propose(self, tokens: Sequence[int], num_tokens: int) -> tuple[list[int], int]:
        """What followed the longest suffix of `tokens` in an earlier text, at its latest place.

        A place counts if a token of the same text follows.

        Args:
            tokens: of the request so far.
            num_tokens: proposals at most; fewer where the text ends.
        Returns:
            tokens and the length of the suffix; none and 0 where there is none.
        """
        best: tuple[int, int, SuffixAutomaton | None] = (0, 0, None)
        for automaton in self._generations if num_tokens > 0 else ():
            length, place = self._match(automaton, tokens)
            if length > best[0]:
                best = (length, place, automaton)
        length, place, found_in = best
        if found_in is None:
            return [], 0
        found = found_in.tokens[place : place + num_tokens].tolist()
        if _SEPARATOR in found:
            found = found[: found.index(_SEPARATOR)]
        return found, length

    def _match(self, automaton: SuffixAutomaton, tokens: Sequence[int]) -> tuple[int, int]:
        """Longest suffix of `tokens`, and its latest place."""
        # most matches are short: look at few tokens, and at more where all of them matched
        window = 8
        while True:
            window = min(window, self._longest, len(tokens))
            state, length = 0, 0
            for token in tokens[len(tokens) - window :]:
                state, length = automaton.follow(state, length, token)
            if length < window or window in (self._longest, len(tokens)):
                break
            window *= 4
        while state:
            if place := automaton.find(state):
                return length, place
            state, length = automaton.shorten(state)
        return 0, 0
