"""What the host adds to an iteration, besides the passes that are timed."""

from __future__ import annotations

import statistics
from collections import deque

from specc.runtime.policies.goodput.constants import TUNED


class HostSeconds:
    """Seconds of scheduling, of inputs that the host puts together, and of handing tokens out.

    Learned apart for two kinds of iterations: those whose step runs as it is, often several before
    anybody looks at requests, and those whose groups, or parts of trees, the host brings together
    in one pass of the target. On a small model that costs as much as a third of a pass.

    Args:
        known: seconds of any iteration, until enough of its kind were measured.
    """

    def __init__(self, known: float) -> None:
        self._known = known
        self._seen: dict[bool, deque[float]] = {}
        # measurements of the other kind since the last of this one
        self._age = {False: 0, True: 0}

    def observe(self, is_together: bool, seconds: float) -> None:
        """Take a measurement; the median of the last ones counts, so that pauses do not.

        Args:
            is_together: groups, or parts of trees, shared a pass.
            seconds: of the iteration, less those of its stages.
        """
        seen = self._seen.setdefault(is_together, deque(maxlen=TUNED.ratio_memory))
        seen.append(seconds)
        self._age[is_together] = 0
        self._age[not is_together] += 1
        if self._age[not is_together] > TUNED.host_memory:
            # of another load, or of a machine that was busy: it is found out anew
            self._seen.pop(not is_together, None)

    def __call__(self, is_together: bool) -> float:
        """Seconds of an iteration of this kind, 0 or more."""
        seen = self._seen.get(is_together, ())
        if len(seen) < TUNED.host_steps:
            return self._known
        return max(0.0, statistics.median(seen))
