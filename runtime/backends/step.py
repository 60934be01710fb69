"""What the runner calls: models, and steps of plans, whatever backend has made them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from specc.runtime.backends.captured.graph_device import Event
from specc.runtime.backends.captured.step_scores import StepExtras
from specc.runtime.backends.step_io import BeforeAccept, Drafted, StepInputs, StepResult
from specc.speculation.plans import SpecPlan


class Model(Protocol):
    """A model's program; inputs and result as of `ModelProgram.forward`."""

    def __call__(self, *inputs: Tensor | None) -> Tensor: ...


class Step(Protocol):
    """One plan's step.

    What more can be done with it than to run it as a whole, and wait, it says itself: `staged`,
    `queued` and `repeated` are the step again, or None.

    `before_accept`, where set, is called with all values between verification and acceptance.
    """

    plan: SpecPlan
    before_accept: BeforeAccept | None

    @property
    def staged(self) -> StagedStep | None:
        """The step, where the host can run its stages apart; None where it cannot."""
        ...

    @property
    def queued(self) -> QueuedStep | None:
        """The step, where a device runs what is queued on it; None where the host runs it."""
        ...

    @property
    def repeated(self) -> RepeatedStep | None:
        """The step, where it can run several times in a row; None where it cannot."""
        ...

    def advance(
        self, inputs: StepInputs, slabs: Mapping[str, Tensor], reads: Sequence[str] = ()
    ) -> StepResult:
        """Run the step for requests that are known on the host, and wait for it.

        Args:
            inputs: of the host.
            slabs: caches and history under their names in the environment.
            reads: names of values that the caller wants to see.
        """
        ...


class RepeatedStep(Step, Protocol):
    """A step that the host can run several times before anybody looks at a result."""

    def advance_often(
        self, inputs: StepInputs, slabs: Mapping[str, Tensor], count: int, ends: Sequence[int]
    ) -> list[StepResult]:
        """`advance` up to `count` times, each time from where the last one has ended.

        Args:
            inputs: of the first step, without masks; the others have its block table, whose blocks
                are enough for all of them.
            slabs: see `Step.advance`.
            count: 1 or more.
            ends: tokens; a step that brings a request one of them is the last.
        Returns:
            of each step that ran.
        """
        ...


class StagedStep(Step, Protocol):
    """A step over flat tokens, whose nodes somebody else can pass through the target."""

    def draft(self, inputs: StepInputs, slabs: Mapping[str, Tensor]) -> Drafted:
        """Run what comes before the target's pass; see `Drafted`."""
        ...

    def another(self) -> StagedStep:
        """A step of the same plan that can be drafted while this one waits for the target.

        The step itself, where it keeps nothing of what it has drafted.
        """
        ...


class BegunStep(StagedStep, Protocol):
    """A step of a `StagedModel`."""

    def begin(self, inputs: StepInputs, slabs: Mapping[str, Tensor]) -> FinishStep:
        """Draft, and begin the target's pass."""
        ...


# waits for the target's pass, and runs the rest; given names of values that the caller wants to see
FinishStep = Callable[[Sequence[str]], StepResult]


class QueuedStep(Step, Protocol):
    """A step that a device replays as a whole, so that others can be queued after it."""

    @property
    def buckets(self) -> Sequence[int]:
        """Requests that its graphs take, ascending: a batch takes the smallest that holds it."""
        ...

    @property
    def is_split(self) -> bool:
        """A hook comes between its stages, which then are replayed one by one."""
        ...

    @property
    def takes_masks(self) -> bool:
        """Masks can be part of what is replayed."""
        ...

    @property
    def takes_live(self) -> bool:
        """The target can verify a part of each request's tree, see `StepInputs.extra`."""
        ...

    def pass_rows(self, batch: int, num_live: int) -> int:
        """Rows of the target's pass for a batch of which so many nodes are live together."""
        ...

    def submit(
        self,
        inputs: StepInputs,
        requests: Sequence[object] = (),
        is_carried: Sequence[bool] = (),
        extras: StepExtras | None = None,
    ) -> PendingStep:
        """Queue a step; nothing waits for the device, unless what it drafts decides on the rest.

        Where rows are carried, such a step is queued up to its verification, or to the first pass
        of a draft that obeys a grammar: see `complete`.

        Args:
            inputs: on the host. A carried row has any last tokens, and at least as many committed
                rows as the device has.
            requests: whose rows these are, where later steps are to go on from what this one
                leaves; else ().
            is_carried: which of them go on from what their last step leaves.
            extras: what it does besides.
        Raises:
            EngineError: the step would leave the cache, or cannot run at all.
        """
        ...

    def submit_next(
        self,
        batch: int,
        places: Sequence[int] | None = None,
        extras: StepExtras | None = None,
    ) -> PendingStep:
        """Queue a step that goes on where the last one ended, which the host may not know yet.

        Args:
            batch: requests, those of the step that was queued last.
            places: their rows, as that step had them.
            extras: what it does besides; see `submit`.
        """
        ...

    def can_follow(
        self, blocks: Sequence[int], carried: Sequence[object], extras: StepExtras | None = None
    ) -> bool:
        """Whether it can be queued while steps of its requests are on their way.

        It has to be a replay; see `PendingStep.complete` where masks come in between.

        Args:
            blocks: the first block of each request.
            carried: requests that go on from what a step leaves.
            extras: what it would do besides.
        """
        ...

    def capture(self, bucket: int) -> float:
        """Have a graph for batches of this size, if one can be had; returns seconds."""
        ...

    def is_captured(self, bucket: int) -> bool:
        """Whether a step of this size is a replay; False before `capture`."""
        ...

    def mark(self) -> Event:
        """An event after everything that has been queued on the device."""
        ...

    def seconds_since(self, begin_s: float) -> float:
        """Seconds up to now, or since the host saw the last step end where that is less."""
        ...


class PendingStep(Protocol):
    """A step that was queued."""

    @property
    def places(self) -> Sequence[int] | None:
        """Row of each request; None is their order."""
        ...

    @property
    def can_go_on(self) -> bool:
        """Whether `QueuedStep.submit_next` is the step after this one."""
        ...

    def since(self, begin_s: float) -> PendingStep:
        """The same, with seconds counted from here on."""
        ...

    def complete(self) -> PendingStep | None:
        """Queue what is left of it; to be called when the step before it is committed.

        Returns:
            the whole step; None where another step was queued meanwhile, and it has to be submitted
            again.
        """
        ...

    def result(self) -> StepResult:
        """Wait for it, which is complete; once."""
        ...
