"""Committed rows of sequences that run together: each its own, for passes that read only some."""

from __future__ import annotations

from collections.abc import Sequence


class Contexts:
    """Committed rows of several sequences, or a sample of what they are.

    A pass of the target reads all of them, so that their mean tells what it costs. A self-draft
    reads at most its budget of each: that of 1,024 and 32,768 rows is not that of two means.

    Args:
        rows: of each sequence, 0 or more; one sequence at least.
    """

    def __init__(self, rows: Sequence[float]) -> None:
        assert rows, "one sequence at least"
        self.rows = tuple(rows)
        self.mean = sum(self.rows) / len(self.rows)
        self._read: dict[float, float] = {}

    def read(self, most: float) -> float:
        """Mean rows that are read of a sequence by what reads at most so many of each."""
        found = self._read.get(most)
        if found is None:
            found = sum(min(rows, most) for rows in self.rows) / len(self.rows)
            self._read[most] = found
        return found
