"""Which plan the next step runs: what a policy is asked, and what it is told."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from specc.errors import ConfigError
from specc.speculation.live_nodes import can_cut
from specc.speculation.metrics import SpecStats

if TYPE_CHECKING:
    from specc.cost.latency_table import LatencyTable
    from specc.runtime.backends.step_io import StepResult
    from specc.runtime.scheduling.batch import Batch, RunResult, StepGroup
    from specc.runtime.scheduling.request import Request
    from specc.speculation.plans import SpecPlan


class Decision(NamedTuple):
    """What a policy chose last, and why.

    Args:
        plans: plan → requests that run it.
        goodput: predicted tokens a second, prompts not counted.
        seconds: predicted, of the iteration without prompts.
        tokens: expected of it.
        acceptance: probability that the first draft token of the main plan is accepted, over all
            requests; where all are off, of the plan with the fewest nodes.
        is_probe: made to learn, for one iteration.
        plain: tokens a second of plain decoding for the same requests; 0 where there are none.
    """

    plans: Mapping[str, int]
    goodput: float
    seconds: float
    tokens: float
    acceptance: float
    is_probe: bool = False
    plain: float = 0.0


class Policy(ABC):
    """Chooses a plan before every step; all but `choose` has a default.

    Before an iteration it is asked `choose`, then `choose_each`; after its commit it is told of
    each group's step (`observe`), then of the iteration as a whole (`observe_batch`).
    """

    @property
    def needs_results(self) -> bool:
        """Whether the choice depends on what the last step did; by default it does.

        False promises that it follows from the number of requests, and from the requests that take
        part, alone: the next step may then be queued before the results of the last one are known.
        It is read before every iteration, so a policy can keep to its choice for a while. Where it
        is False, one choice may hold for several steps in a row (up to 8), of each of which the
        policy is told.
        """
        return True

    @property
    def chooses_late(self) -> bool:
        """Whether a policy that needs results may be asked while they are on their way.

        It then chooses by those before, and takes the outcome of an iteration after it was asked
        for the next one. Where a choice cannot be made without those results after all, it is asked
        for the same iteration again. By default it may not.
        """
        return False

    @property
    def decision(self) -> Decision | None:
        """What was decided last, for metrics and traces; None of a policy that predicts nothing."""
        return None

    # most need none
    def use_latency(self, table: LatencyTable) -> None:  # noqa: B027
        """Take measured seconds in place of those that were guessed; while no request runs."""

    @abstractmethod
    def choose(self, num_running: int, stats: SpecStats) -> str:
        """Name of a plan.

        Args:
            num_running: requests that will take part.
            stats: what the engine has counted so far.
        """

    def choose_each(self, requests: list[Request], stats: SpecStats) -> Sequence[str] | None:
        """Names of plans, one for each request that will take part.

        None, the default, is what `choose` has named, for all of them. Where names are given, what
        `choose` has named is only what requests that wait for their first step are prepared for.
        """
        return None

    # does not have to be there
    def choose_again(self) -> None:  # noqa: B027
        """What was chosen last is not run: results in flight come first.

        Both are asked again, for the same iteration, when these are known.
        """

    def live_nodes(self, plan: SpecPlan, requests: Sequence[Request]) -> tuple[int, ...]:
        """How many nodes of each request's tree the target verifies: the first ones.

        Asked after plans are chosen, and before anything of the step is drawn, of plans whose trees
        are no data (`can_cut`), where one pass of the target takes all requests, or a captured step
        verifies parts of trees. What it answers must follow from what earlier steps showed, or the
        output may not be the target's own; see `specc.speculation.live_nodes`.

        Returns:
            B numbers of 1 … nodes of the plan; (), the default, is all nodes of all of them.
        """
        return ()

    # neither has to be there
    def observe(self, group: StepGroup, step: StepResult) -> None:  # noqa: B027
        """Take the outcome of a group's step, after its commit."""

    def observe_batch(self, batch: Batch, result: RunResult) -> None:  # noqa: B027
        """Take the outcome of a whole iteration, prompts and steps of all plans together."""


def check_policy(policy: object) -> None:
    """Raises ConfigError: no `Policy`."""
    if not isinstance(policy, Policy):
        raise ConfigError(
            f"a policy of type {type(policy).__name__}",
            "a subclass of specc.runtime.policies.base.Policy, or a policy's name",
            "derive the class from Policy, whose defaults stand for what it leaves out",
        )


def live_nodes_of(policy: Policy, group: StepGroup) -> tuple[int, ...]:
    """Nodes of each request's tree that the policy has the target verify; none: all of them.

    Raises:
        ConfigError: the policy answers what no tree of this plan has.
    """
    plan, requests = group.plan, group.requests
    live = tuple(policy.live_nodes(plan, requests)) if can_cut(plan) else ()
    if live and (len(live) != len(requests) or not 1 <= min(live) <= max(live) <= plan.num_nodes):
        raise ConfigError(
            f"live nodes {list(live)} for {len(requests)} requests of plan {plan.name}",
            f"one number of 1 … {plan.num_nodes} for each of them, or none at all",
            f"correct live_nodes of {type(policy).__name__}",
        )
    return live


class FixedPolicy(Policy):
    """Always the same plan."""

    needs_results = False

    def __init__(self, plan: str) -> None:
        self._plan = plan

    def choose(self, num_running: int, stats: SpecStats) -> str:
        return self._plan
