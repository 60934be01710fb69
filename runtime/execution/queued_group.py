"""How groups of a batch are queued on a device, and what was queued last."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from specc.runtime.backends.captured.step_scores import StepExtras
from specc.runtime.backends.step import PendingStep, QueuedStep
from specc.runtime.scheduling.batch import StepGroup


class QueuedGroup(NamedTuple):
    """How a group's step is queued.

    Args:
        step: of its plan.
        group: that runs it.
        extras: what it does besides; None is nothing.
    """

    step: QueuedStep
    group: StepGroup
    extras: StepExtras | None

    @property
    def is_half(self) -> bool:
        """What the host adds follows from a step in flight: see `PendingStep.complete`."""
        return self.extras is not None and self.extras.kind.is_parted and any(self.group.ahead)


class LastQueued(NamedTuple):
    """The step that was queued last, and the block table that it had."""

    own: QueuedGroup
    table: Tensor
    pending: PendingStep

    def leads_to(self, own: QueuedGroup, table: Tensor) -> bool:
        """The same step for the same requests, all of which go on from its state."""
        before, group = self.own.group, own.group
        return (
            all(group.ahead or [0])
            and (before.plan, before.requests) == (group.plan, group.requests)
            and before.live == group.live
            and self.table is table
            and self.pending.can_go_on
        )
