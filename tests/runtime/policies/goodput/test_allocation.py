"""Allocation of plans to requests, against exhaustive search."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from specc.runtime.policies.goodput.allocation import GroupLoad, PlanOption, allocate


def cost_of(draft: float, verify: float, fixed: float, nodes: list[int]):
    """Levels once a plan that is in use, and a pass that costs more the more nodes it has."""

    def cost(loads: Sequence[GroupLoad]) -> float:
        counts = [load.size for load in loads]
        used = [place for place, count in enumerate(counts) if count and place]
        total = sum(count * size for count, size in zip(counts, nodes, strict=True))
        return fixed + draft * sum(nodes[p] - 1 for p in used) + verify * total**1.3

    return cost


@pytest.mark.parametrize("seed", range(40))
def test_one_plan_beside_off_is_allocated_as_exhaustive_search_does(seed):
    chooser = random.Random(seed)
    nodes = [1, chooser.randint(2, 6)]
    cost = cost_of(chooser.uniform(0, 0.3), chooser.uniform(0.01, 0.3), 1.0, nodes)
    options = [
        [PlanOption(1.0), PlanOption(chooser.uniform(1, nodes[1]), chooser.choice([0.0, 0.05]))]
        for _ in range(6)
    ]
    budget = chooser.choice([None, 8, 14])
    found = allocate(options, cost, nodes, budget)
    assert found.goodput == pytest.approx(exhaustive(options, cost, nodes, budget), rel=1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_chains_with_falling_gains_come_within_a_few_percent_of_exhaustive_search(seed):
    chooser = random.Random(seed)
    nodes = [1, 2, 4]
    cost = cost_of(chooser.uniform(0, 0.1), chooser.uniform(0.01, 0.3), 1.0, nodes)
    options = []
    for _ in range(5):
        rate = chooser.random()
        gains = [sum(rate**d for d in range(size)) for size in nodes]
        options.append([PlanOption(tokens) for tokens in gains])
    best = exhaustive(options, cost, nodes, None)
    found = allocate(options, cost, nodes)
    assert 0.97 * best <= found.goodput <= best * (1 + 1e-9)
    chosen = [own[place] for own, place in zip(options, found.plans, strict=True)]
    tokens = sum(option.tokens for option in chosen)
    assert found.goodput == pytest.approx(tokens / cost(loads_of(chosen, found.plans, 3)))


def loads_of(chosen: Sequence[PlanOption], plans: Sequence[int], num_plans: int) -> list[GroupLoad]:
    loads = [GroupLoad()] * num_plans
    for option, place in zip(chosen, plans, strict=True):
        loads[place] = loads[place].plus(option)
    return loads


@pytest.mark.parametrize("seed", range(40))
def test_sequences_of_different_contexts_are_allocated_as_exhaustive_search_does(seed):
    """Each has its own rows, which cost more the more nodes attend to them."""
    chooser = random.Random(seed)
    nodes = [1, chooser.randint(2, 5)]
    alone = cost_of(chooser.uniform(0, 0.3), chooser.uniform(0.01, 0.2), 1.0, nodes)
    row_s = [1e-4, 1e-4 * chooser.uniform(1, nodes[1])]

    def cost(loads: Sequence[GroupLoad]) -> float:
        rows = sum(load.context * each for load, each in zip(loads, row_s, strict=True))
        return alone(loads) + rows + sum(load.drafting_s for load in loads)

    options = []
    for _ in range(6):
        context = chooser.choice([100, 1000, 20_000])
        read_s = 1e-4 * nodes[1] * min(context, 500)
        tokens = chooser.uniform(1, nodes[1])
        options.append([PlanOption(1.0, context=context), PlanOption(tokens, 0.0, context, read_s)])
    found = allocate(options, cost, nodes)
    assert found.goodput == pytest.approx(exhaustive(options, cost, nodes, None), rel=1e-9)


def exhaustive(options, cost, nodes, budget) -> float:
    best = 0.0
    for plans in itertools.product(range(len(nodes)), repeat=len(options)):
        used = sum(nodes[place] for place in plans)
        if budget is not None and used > budget and any(plans):
            continue
        chosen = [own[place] for own, place in zip(options, plans, strict=True)]
        seconds = cost(loads_of(chosen, plans, len(nodes))) + sum(
            option.seconds for option in chosen
        )
        best = max(best, sum(option.tokens for option in chosen) / seconds)
    return best


def test_without_mixing_all_that_can_run_one_plan():
    options = [
        [PlanOption(1.0), PlanOption(3.0)],
        [PlanOption(1.0), PlanOption(1.01)],
        [PlanOption(1.0), None],
    ]
    found = allocate(options, cost_of(0.01, 0.01, 1.0, [1, 4]), [1, 4], mixes=False)
    assert found.plans == (1, 1, 0)
