"""What the runner calls: models, and steps of plans, whatever backend has made them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from specc.runtime.backends.step_io import BeforeAccept, Drafted, StepInputs, StepResult
from specc.speculation.plans import SpecPlan


class Model(Protocol):
    """A model's program; inputs and result as of `ModelProgram.forward`."""

    def __call__(self, *inputs: Tensor | None) -> Tensor: ...


class Step(Protocol):
    """One plan's step.

    `before_accept`, where set, is called with all values between verification and acceptance.
    """

    plan: SpecPlan
    before_accept: BeforeAccept | None

    def advance(
        self, inputs: StepInputs, slabs: Mapping[str, Tensor], reads: Sequence[str] = ()
    ) -> StepResult:
        """Run the step for requests that are known on the host, and wait for it.

        Args:
            slabs: caches and history under their names in the environment.
            reads: names of values that the caller wants to see.
        """
        ...


class RepeatedStep(Step, Protocol):
    """A step that a `RepeatedRunner` runs several times before anybody looks at a result."""

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
    """A step over flat tokens, whose nodes a `SharedRunner` passes through the target."""

    def draft(self, inputs: StepInputs, slabs: Mapping[str, Tensor]) -> Drafted:
        """Run what comes before the target's pass; see `Drafted`."""
        ...

    def another(self) -> StagedStep:
        """A step of the same plan that can be drafted while this one waits for the target.

        The step itself, where it keeps nothing of what it has drafted.
        """
        ...


class BegunStep(StagedStep, Protocol):
    """A step of a `BegunModel`."""

    def begin(self, inputs: StepInputs, slabs: Mapping[str, Tensor]) -> FinishStep:
        """Draft, and begin the target's pass."""
        ...


# waits for the target's pass, and runs the rest; given names of values that the caller wants to see
FinishStep = Callable[[Sequence[str]], StepResult]
