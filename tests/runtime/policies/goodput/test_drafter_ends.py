"""What steps yield and cost where drafters end trees, beside dice whose rates are known."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from specc.runtime.policies.goodput.drafter_ends import DrafterEnds, ShownLevels
from specc.runtime.policies.goodput.plan_prior import PlanPrior
from specc.runtime.policies.goodput.request_acceptance import RequestAcceptance
from specc.speculation.live_nodes import nodes_by_depth
from specc.speculation.plans import DynamicTree, SpecPlan

CHAINS = {length: SpecPlan.from_widths((1,) * length) for length in (2, 4, 6)}
TREE = SpecPlan.from_widths((3, 2, 1))


class Dice:
    """A drafter that is surer of what is accepted.

    A path is good or not; the drafter is sure of its levels, and the target accepts them, more
    often where it is. So those that were accepted so far are good ones mostly.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def step(self, allowed: int) -> ShownLevels:
        verified = accepted = 0
        is_sure = is_accepted = True
        is_good = self._random.random() < 0.5
        for _ in range(allowed):
            is_sure = is_sure and self._random.random() < (0.9 if is_good else 0.4)
            is_accepted = is_accepted and self._random.random() < (0.8 if is_good else 0.3)
            verified += is_sure
            accepted += is_sure and is_accepted
        return ShownLevels(allowed, verified, accepted)


def means(dice: Dice, allowed: int, nodes: tuple[int, ...]) -> tuple[float, float]:
    """Tokens of a step, and nodes that it verifies."""
    steps = [dice.step(allowed) for _ in range(20_000)]
    tokens = sum(step.accepted + 1 for step in steps)
    return tokens / len(steps), sum(nodes[step.verified] for step in steps) / len(steps)


@pytest.mark.parametrize("plan", [CHAINS[6], TREE], ids=lambda plan: plan.name)
def test_tokens_and_nodes_are_those_of_dice(plan: SpecPlan) -> None:
    """Learned where the policy allows now this much of a tree and now that, asked of any part."""
    chooser, dice = random.Random(7), Dice(8)
    ends = DrafterEnds([*CHAINS.values(), TREE])
    acceptance = RequestAcceptance([*CHAINS.values(), TREE], PlanPrior({}), ends)
    levels = range(plan.max_depth + 1)
    found_tokens, found_nodes = ([0.0] * len(levels) for _ in range(2))
    num_steps = 3000
    for number in range(num_steps):
        shown = [dice.step(chooser.randint(0, plan.max_depth)) for _ in range(4)]
        ends.observe(plan, shown)
        accepted = {str(i): step.accepted for i, step in enumerate(shown)}
        verified = {str(i): step.verified for i, step in enumerate(shown)}
        acceptance.observe(plan, accepted, verified)
        # counts fade, so that what is known at one time is dice, too
        if number >= num_steps // 3:
            share = 1.5 / num_steps
            tokens = acceptance.tokens_by_depth(plan, "new", plan.max_depth + 1)
            for depth in levels:
                found_tokens[depth] += share * tokens[depth]
                found_nodes[depth] += share * ends.nodes(plan)[depth]
    for depth in levels:
        mean_tokens, mean_nodes = means(dice, depth, nodes_by_depth(plan))
        assert found_tokens[depth] == pytest.approx(mean_tokens, rel=0.03)
        assert found_nodes[depth] == pytest.approx(mean_nodes, rel=0.03)
    # what was verified is accepted as often as it is: the drafter is sure of good tokens
    good = 0.45 / (0.45 + 0.2)
    assert acceptance.rates(plan)[0] == pytest.approx(good * 0.8 + (1 - good) * 0.3, abs=0.05)


def test_chains_of_a_drafter_end_alike() -> None:
    ends = DrafterEnds(CHAINS.values())
    for _ in range(300):
        ends.observe(CHAINS[4], [ShownLevels(4, 1, 1)])
    for chain in CHAINS.values():
        assert ends.ends(chain)
        assert ends.nodes(chain) == pytest.approx([1, *[2] * chain.max_depth], abs=0.05)
        # what no chain has asked for is like the level before
        assert ends.going_on(chain) == pytest.approx([1, *[0] * (chain.max_depth - 1)], abs=0.03)


def test_where_drafters_have_no_say() -> None:
    """Whole trees, whatever is shown of them, and parts that the policy chooses alone."""
    dynamic = SpecPlan.from_dynamic(DynamicTree(6, 3, 3))
    tiled = replace(SpecPlan.from_widths((1, 1)), tile=1)
    ends = DrafterEnds([TREE, dynamic, tiled])
    ends.observe(TREE, [ShownLevels(0, 0, 0)])
    ends.observe(dynamic, [ShownLevels(3, 1, 1)])
    ends.observe(tiled, [ShownLevels(2, 1, 1)])
    for plan in (TREE, dynamic, tiled):
        assert not ends.ends(plan)
        assert ends.going_on(plan) == [1] * plan.max_depth
    assert ends.nodes(TREE) == nodes_by_depth(TREE)
    for plan in (dynamic, tiled):
        assert ends.nodes(plan) == (plan.num_nodes,)
    ends.observe(TREE, [ShownLevels(3, 0, 0)])
    assert ends.ends(TREE)
    assert 1 < ends.nodes(TREE)[-1] < TREE.num_nodes
