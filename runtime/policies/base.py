"""Which plan the next step runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from specc.speculation.metrics import SpecStats

if TYPE_CHECKING:
    from specc.runtime.backends.program import StepResult
    from specc.runtime.runner import RunResult
    from specc.runtime.scheduling.batch import Batch, StepGroup
    from specc.runtime.scheduling.sequence import Sequence


class Policy(Protocol):
    """Chooses a plan before every step.

    Args:
        needs_results: the choice depends on what the last step did. False promises that it follows
            from `num_running` (and, of an `EachPolicy`, from the sequences that take part) alone:
            the next step may then be queued before the results of the last one are known. A
            policy without it counts as one that needs results. It is read before every iteration,
            so a policy can keep to its choice for a while.

    A policy that needs results, and has an attribute `chooses_late` that is True, may be asked all
    the same while the results of one iteration are on their way: it chooses by those before, and
    takes the outcome of an iteration after it was asked for the next one. Where a choice cannot be
    made without those results after all, it is asked for the same iteration again.
    """

    @property
    def needs_results(self) -> bool: ...

    def choose(self, num_running: int, stats: SpecStats) -> str:
        """Name of a plan.

        Args:
            num_running: sequences that will take part.
            stats: what the engine has counted so far.
        """
        ...


@runtime_checkable
class EachPolicy(Policy, Protocol):
    """Chooses a plan for every sequence, from what steps have done."""

    def choose_each(self, sequences: list[Sequence], stats: SpecStats) -> list[str]:
        """Names of plans, one for each sequence that will take part."""
        ...

    def observe(self, group: StepGroup, step: StepResult) -> None:
        """Take the outcome of a step, after its commit."""
        ...


@runtime_checkable
class WholePolicy(Policy, Protocol):
    """Learns from whole iterations, prompts and steps of all plans together."""

    def observe_batch(self, batch: Batch, result: RunResult) -> None:
        """Take the outcome of an iteration, after its commit and after `EachPolicy.observe`."""
        ...


class FixedPolicy:
    """Always the same plan."""

    needs_results = False

    def __init__(self, plan: str) -> None:
        self._plan = plan

    def choose(self, num_running: int, stats: SpecStats) -> str:
        return self._plan
