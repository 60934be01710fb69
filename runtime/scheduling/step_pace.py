"""How many steps fit between two looks at the requests."""

from __future__ import annotations

from specc.runtime.scheduling.batch import Batch

# more gain nothing: what comes once for all of them is an eighth of a step's share by then
_MOST = 8


class StepPace:
    """Seconds of the last steps, by plan and number of requests.

    Args:
        interval_s: seconds after which requests are looked at again; 0 is after each step.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._seconds: dict[tuple[str, int], float] = {}

    def most(self, batch: Batch) -> int:
        """Steps of the batch that end before requests are to be looked at; 1 where unknown."""
        if not self._interval_s or len(batch.groups) != 1:
            return 1
        seconds = self._seconds.get(_kind(batch))
        return 1 if seconds is None else max(1, min(_MOST, int(self._interval_s / seconds)))

    def took(self, batch: Batch, seconds: float, num_steps: int) -> None:
        """Learn how long steps of this kind take.

        Args:
            batch: that ran.
            seconds: of all steps.
            num_steps: 1 or more.
        """
        if self._interval_s and len(batch.groups) == 1 and not batch.prefill:
            self._seconds[_kind(batch)] = seconds / num_steps


def _kind(batch: Batch) -> tuple[str, int]:
    group = batch.groups[0]
    return group.plan.name, len(group.requests)
