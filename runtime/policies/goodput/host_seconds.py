"""What the host adds to an iteration, besides the passes that are timed."""

from __future__ import annotations

import statistics
from collections import deque
from enum import IntEnum

from specc.runtime.policies.goodput.constants import TUNED


class Kind(IntEnum):
    """Of iterations: plain decoding; one plan that drafts; what the host brings together.

    The last are groups, or parts of trees, that share a pass of the target.
    """

    PLAIN = 0
    DRAFTED = 1
    TOGETHER = 2

    @classmethod
    def of(cls, drafts: bool, is_together: bool) -> Kind:
        return cls.TOGETHER if is_together else cls.DRAFTED if drafts else cls.PLAIN


class HostSeconds:
    """Seconds of scheduling, of inputs that the host puts together, and of handing tokens out.

    Learned apart for each kind of iterations. A plain step runs as it is, often several before
    anybody looks at requests; of one that drafts the host counts what came of each level; groups,
    and parts of trees, it brings together in one pass of the target. On a small model that is a
    sixth of a plain step, a fifth of a drafted one, and up to a third of the last: with one figure
    for all, whatever is in use looks faster, or slower, beside the others than it is.

    Args:
        known: seconds of any iteration, until enough of its kind were measured.
    """

    def __init__(self, known: float) -> None:
        self._known = known
        self._seen: dict[Kind, deque[float]] = {}
        # measurements of other kinds since the last of this one
        self._age = dict.fromkeys(Kind, 0)

    def observe(self, kind: Kind, seconds: float) -> None:
        """Take a measurement; the median of the last ones counts, so that pauses do not.

        Args:
            seconds: of the iteration, less those of its stages.
        """
        seen = self._seen.setdefault(kind, deque(maxlen=TUNED.ratio_memory))
        seen.append(seconds)
        for other in Kind:
            self._age[other] = 0 if other == kind else self._age[other] + 1
            if self._age[other] > TUNED.host_memory:
                # of another load, or of a machine that was busy: it is found out anew
                self._seen.pop(other, None)

    def __call__(self, kind: Kind) -> float:
        """Seconds of an iteration of this kind, 0 or more."""
        seen = self._seen.get(kind, ())
        if len(seen) < TUNED.host_steps:
            return self._known
        return max(0.0, statistics.median(seen))
