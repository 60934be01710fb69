"""When to give a sign of life, and whether this process itself has stood still."""

from __future__ import annotations

import time

# of the time limit: signs that come late are not taken for none
_OF_LIMIT = 10
_MOST_S = 0.5
# a loop on a busy machine may take this much longer than it means to
_SLACK_S = 1.0


class Ticks:
    """Rounds of a loop that waits for some of `seconds` in each.

    A process that was stopped and goes on (Ctrl-Z and fg) must not take the others' silence
    meanwhile for theirs.

    Args:
        limit_s: after which silence counts.
    """

    def __init__(self, limit_s: float) -> None:
        self.seconds = min(_MOST_S, limit_s / _OF_LIMIT)
        self._last_s = self._beat_s = time.monotonic()

    def begin(self) -> None:
        """What was before does not count."""
        self._last_s = time.monotonic()

    def pass_by(self) -> float:
        """Once a round: the seconds that it took too long; 0 where it did not."""
        now = time.monotonic()
        took_s, self._last_s = now - self._last_s, now
        return took_s if took_s > self.seconds + _SLACK_S else 0.0

    def is_time_for_beat(self) -> bool:
        """Once every `seconds`, whatever wakes the loop besides."""
        now = time.monotonic()
        if now - self._beat_s < self.seconds:
            return False
        self._beat_s = now
        return True
