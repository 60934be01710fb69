"""Requests in the order in which they are served."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from specc.runtime.scheduling.sequence import Sequence

# a request is served as if it had arrived so many seconds later for each level of its priority:
# however many urgent requests follow it, those that come later than that are after it
_S_PER_LEVEL = 10.0


def turn_of(sequence: Sequence) -> float:
    """When a request's turn is, in seconds of its clock; fixed from its arrival on.

    A total order that time does not change: the first of all can only be served and leave,
    so none waits for ever, and none that gives up blocks for another takes them back from it.
    """
    return sequence.arrival_s + sequence.priority * _S_PER_LEVEL


class RequestQueue:
    """Requests that wait, the next one first; equal turns in order of arrival here."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __contains__(self, sequence: object) -> bool:
        return any(other is sequence for other in self._sequences)

    @property
    def first(self) -> Sequence:
        return self._sequences[0]

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self._sequences, sequence, key=turn_of)

    def add_again(self, sequence: Sequence) -> None:
        """A sequence that was served before goes ahead of those with the same turn."""
        index = bisect.bisect_left(self._sequences, turn_of(sequence), key=turn_of)
        self._sequences.insert(index, sequence)

    def pop(self) -> Sequence:
        return self._sequences.pop(0)

    def remove(self, sequence: Sequence) -> None:
        del self._sequences[next(i for i, s in enumerate(self._sequences) if s is sequence)]
