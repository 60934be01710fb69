"""Predicted text: what a caller expects the output to be, as a draft of that request alone.

An edited file is mostly the file. Where output and prediction agree, the prediction proposes what
follows in it. Where they part, the last tokens of the output are looked for in it: the longest
match counts, of equal ones the next that follows on from where the output was. A guess that the
very next token refutes doubles the tokens that have to match, so a prediction that is wrong costs a
few steps and then nothing; eight tokens that come as predicted make up for that.

Where the output is follows from its tokens alone, not from the steps that brought them: what is
told of a prediction says nothing of other drafts, nor of other requests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

# tokens that have to match, at first and at most
LEAST, MOST = 2, 32
# tokens that come as predicted after a guess, from which on guesses are trusted as at first
TRUST = 8
# places that are compared, on either side of where the output was
_PLACES = 64
# tokens after the last one that came as predicted, for which each step is worth a look
_PATIENCE = 64


class Coverage(NamedTuple):
    """Of a prediction: tokens that the output has, and tokens that it does not have."""

    accepted: int
    rejected: int


class Prediction:
    """Tokens that a request's output may have, and where the output is among them.

    A place n is before token n.

    Args:
        token_ids: of the predicted text.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = list(token_ids)
        # pair of tokens → places after it, rising
        self._places: dict[tuple[int, int], list[int]] = {}
        for place, pair in enumerate(zip(self.token_ids, self.token_ids[1:], strict=False), 2):
            self._places.setdefault(pair, []).append(place)
        # tokens that came as predicted
        self._came = bytearray(len(self.token_ids))
        # tokens of the output that were read
        self._num_read = 0
        # the place of what comes next, while the output follows; else where it left
        self._at = 0
        self._follows = bool(self.token_ids)
        # tokens that matched when it was found, and that came as predicted since; the beginning is
        # taken on trust
        self._length, self._confirmed = MOST, 0
        self._needed = LEAST
        self._num_lost = 0
        # what it has in the step that is on its way; empty where another draft has more to say
        self.proposed: list[int] = []

    @property
    def is_awake(self) -> bool:
        """Whether the next token may have it propose: each step is worth a look."""
        return self._follows or self._num_lost < _PATIENCE

    def propose(self, output: Sequence[int], num_tokens: int) -> tuple[list[int], int]:
        """What the prediction has after an output.

        Args:
            output: all tokens so far; those of earlier calls and what came since.
            num_tokens: proposals at most.
        Returns:
            tokens, and how many tokens before them match; none and 0 where nothing does.
        """
        for count in range(self._num_read + 1, len(output) + 1):
            self._read(output, count)
        if not self._follows:
            return [], 0
        return self.token_ids[self._at : self._at + num_tokens], self._length + self._confirmed

    def coverage(self, output: Sequence[int]) -> Coverage:
        """How much of the prediction an output has.

        Args:
            output: see `propose`.
        """
        self.propose(output, 0)
        accepted = sum(self._came)
        return Coverage(accepted, len(self._came) - accepted)

    def _read(self, output: Sequence[int], count: int) -> None:
        """Take a token of the output, the last one of the first `count`."""
        self._num_read = count
        if self._follows:
            if self.token_ids[self._at] == output[count - 1]:
                self._came[self._at] = 1
                self._at += 1
                self._confirmed += 1
                self._num_lost = 0
                self._follows = self._at < len(self.token_ids)
                return
            self._follows = False
            if not self._confirmed:
                self._needed = min(2 * self._needed, MOST)
            elif self._confirmed >= TRUST:
                self._needed = LEAST
        self._num_lost += 1
        self._find(output, count)

    def _find(self, output: Sequence[int], count: int) -> None:
        """Look for the last tokens of the first `count`."""
        if count < self._needed:
            return
        places = self._places.get((output[count - 2], output[count - 1]), ())
        middle = bisect_left(places, self._at)
        # those that follow on come first, the nearest of them first: of equal matches they count
        near = (
            *places[middle : middle + _PLACES],
            *reversed(places[max(0, middle - _PLACES) : middle]),
        )
        found, best = 0, self._needed - 1
        for place in near:
            if place < len(self.token_ids):
                length = self._match(place, output, count)
                if length > best:
                    found, best = place, length
        if found:
            self._at, self._follows = found, True
            self._length, self._confirmed = best, 0

    def _match(self, place: int, output: Sequence[int], count: int) -> int:
        """How many of the last tokens stand before a place, `MOST` at most; it is after a pair."""
        length, most = LEAST, min(MOST, place, count)
        while length < most and self.token_ids[place - length - 1] == output[count - length - 1]:
            length += 1
        return length
