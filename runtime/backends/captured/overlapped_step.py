"""A step in two halves of its batch: the second drafts while the target verifies the first.

    draft of the first half, then of the second       (one branch)
                        and verification of the first (the other one), until both are done,
    then verification of the second half.

Each half is a whole step of its sequences: what it writes of caches and history lies in their own
blocks, and of inputs and results in their rows. Blocks of common prefixes are read; the first level
of a draft may write rows of them once more, in the draft's cache, of which the other branch moves
rows of its own sequences and reads no others. One branch runs drafts and the other the target, each
with its own weights and caches. So what kernels keep beside these (`specc.kernels.cuda.arrivals`)
serves one launch at a time: both drafts run one after the other, and so do both verifications.
Noise is a function of seed, position and purpose, whoever draws it.

It is one replay as any other step: what comes before and after it knows nothing of the halves.
"""

from __future__ import annotations

from collections.abc import Callable

from specc.runtime.backends.captured.bound_step import BoundStep
from specc.runtime.backends.graph_device import SideStream
from specc.speculation.plans import SpecPlan

# rows of a half at least, and that the second one begins at a multiple of: every input and result
# of a row takes 4 bytes or more, and kernels are compiled for pointers to multiples of 16
ROWS = 4
# sequences of a step that is run in halves, at least
FEWEST = 2 * ROWS
# the draft, and all that follows
_DRAFT = 1


def halves_of(bucket: int) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """First and last row of both halves of so many sequences, or None: they are too few."""
    if bucket < FEWEST:
        return None
    middle = (bucket + ROWS) // FEWEST * ROWS
    return (0, middle), (middle, bucket)


def whole_reason(plan: SpecPlan) -> str:
    """Why steps of a plan stay whole; empty: they can be run in halves.

    Self-drafts are passes of the target: what its kernels keep beside its caches and weights would
    be used by both branches at once.
    """
    if not plan.speculates:
        return "drafts nothing"
    if plan.self_drafts:
        return f"drafts with the target itself ({', '.join(x.option for x in plan.self_drafts)})"
    if not plan.models:
        return "drafts by lookups alone, which take no time"
    return ""


class OverlappedStep:
    """See the module.

    Args:
        first: of one half of the sequences; one of a plan that `whole_reason` says nothing about.
        second: of the other half.
        side: where the second half drafts.
    """

    def __init__(self, first: BoundStep, second: BoundStep, side: SideStream) -> None:
        self._first, self._second, self._side = first, second, side

    @property
    def parts(self) -> list[Callable[[], None]]:
        """The whole step: nothing stands between its stages."""
        return [self.run]

    def run(self) -> None:
        """The whole step.

        Raises:
            OperatorError: an operator failed. The branches are not joined then: what is under way
                ends with its capture.
        """
        try:
            self._first.run_parts(0, _DRAFT)
            with self._side.forked():
                self._second.run_parts(0, _DRAFT)
            self._first.run_parts(_DRAFT)
            self._side.join()
            self._second.run_parts(_DRAFT)
        finally:
            self._first.let_go()
            self._second.let_go()
