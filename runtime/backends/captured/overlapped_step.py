"""A step in two halves of its batch: the second drafts while the target verifies the first.

    draft of the first half, then of the second       (one branch)
                        and verification of the first (the other one), until both are done,
    then verification of the second half.

The halves are data-race free: each is a complete step that writes only cache and history blocks,
inputs and results of its sequences. Blocks of shared prefixes are read; the first level of a draft
may rewrite their rows in the draft's cache, where the other branch only moves rows of its own
sequences. One branch runs the draft and the other the target, each with its weights and caches, so
scratch memory of kernels (`specc.kernels.cuda.arrivals`) serves one launch at a time: drafts run
one after the other, and so do verifications. Noise is a function of seed, position and purpose.

The step is one graph replay: callers do not see the halves.
"""

from __future__ import annotations

from collections.abc import Callable

from specc.runtime.backends.captured.bound_step import BoundStep
from specc.runtime.backends.graph_device import SideStream
from specc.speculation.plans import SpecPlan

# least rows of a half, and alignment of the second one: inputs and results take at least 4 bytes
# a row, and kernels are compiled for pointers to multiples of 16 bytes
ROWS = 4
# least sequences of an overlapped step
FEWEST = 2 * ROWS
# the draft, and everything after it
_DRAFT = 1


def halves_of(bucket: int) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Row ranges of both halves of a bucket; None if it has too few sequences."""
    if bucket < FEWEST:
        return None
    middle = (bucket + ROWS) // FEWEST * ROWS
    return (0, middle), (middle, bucket)


def whole_reason(plan: SpecPlan) -> str:
    """Why steps of a plan cannot overlap; empty if they can.

    Self-drafts are passes of the target: both branches would use the scratch memory of its kernels
    at the same time.
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
        first, second: steps of the two halves; `whole_reason` of their plan is empty.
        side: stream on which the second half drafts.
    """

    def __init__(self, first: BoundStep, second: BoundStep, side: SideStream) -> None:
        self._first, self._second, self._side = first, second, side

    @property
    def parts(self) -> list[Callable[[], None]]:
        """All stages at once: no hook runs between them."""
        return [self.run]

    def run(self) -> None:
        """Queue the whole step.

        Raises:
            OperatorError: an operator failed. The branches are not joined then; the capture that is
                under way ends.
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
