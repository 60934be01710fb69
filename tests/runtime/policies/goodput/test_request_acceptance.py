"""What a request accepts: shared rates, and what is its own."""

from __future__ import annotations

import math
import random

import pytest

from specc.cost.acceptance import expected_tokens
from specc.runtime.policies.goodput.plan_prior import PlanPrior
from specc.runtime.policies.goodput.request_acceptance import RequestAcceptance, _Spread, shift
from specc.speculation.plans import DynamicTree, SpecPlan

CHAINS = {length: SpecPlan.from_widths((1,) * length) for length in (1, 2, 4, 8)}
TREE = SpecPlan.from_widths((3, 1))


def test_expected_tokens_are_those_of_dice():
    """Learned from steps of one chain, asked of the others, and cut where a request ends."""
    chooser, rates = random.Random(3), [0.9, 0.6, 0.8, 0.3, 0.5, 0.5, 0.5, 0.5]
    model = RequestAcceptance(CHAINS.values(), PlanPrior({}))

    def run(depth: int) -> int:
        return next((d for d in range(depth) if chooser.random() >= rates[d]), depth)

    for _ in range(1500):
        model.observe(CHAINS[8], {str(i): run(8) for i in range(8)})
    for length, most in [(1, 9), (2, 9), (4, 9), (4, 3), (8, 2)]:
        drawn = [min(run(length) + 1, most) for _ in range(20_000)]
        mean = sum(drawn) / len(drawn)
        assert model.tokens(CHAINS[length], "new", most) == pytest.approx(mean, rel=0.06)


def test_a_request_differs_from_the_others_for_all_lengths():
    chooser = random.Random(5)
    model = RequestAcceptance(CHAINS.values(), PlanPrior({}))
    for _ in range(60):
        good = {str(i): 2 if chooser.random() < 0.9 else 0 for i in range(7)}
        model.observe(CHAINS[2], good | {"bad": 0})
    assert model.tokens(CHAINS[4], "bad", 9) < 1.3 < 2.5 < model.tokens(CHAINS[4], "0", 9)
    model.forget(["bad"])
    assert model.tokens(CHAINS[4], "bad", 9) == model.tokens(CHAINS[4], "unknown", 9)


@pytest.mark.parametrize("correlation", [0.05, 0.3])
def test_how_much_requests_differ_is_their_tokens_correlation(correlation):
    """Rates drawn from a beta distribution, of which that is known."""
    chooser, spread = random.Random(4), _Spread()
    both = 1 / correlation - 1
    for _ in range(3000):
        rate = chooser.betavariate(0.7 * both, 0.3 * both)
        count = sum(chooser.random() < rate for _ in range(16))
        spread.add(16, count - 0.7 * 16, 0.7 * 0.3 * 16)
    assert spread.alike == pytest.approx(both / 2, rel=0.35)


@pytest.mark.parametrize("rates", [(0.7, 0.7), (0.95, 0.1)])
def test_luck_is_told_from_requests_that_differ(rates):
    """Where all requests have the same dice, the lucky ones promise no more than the others."""
    chooser = random.Random(5)
    chain = CHAINS[4]
    acceptance = RequestAcceptance([chain], PlanPrior({}))
    for _ in range(60):
        outcomes = {}
        for i in range(16):
            depth = next((d for d in range(4) if chooser.random() >= rates[i % 2]), 4)
            outcomes[str(i)] = depth
        acceptance.observe(chain, outcomes)
    tokens = [[acceptance.tokens(chain, str(i), 5) for i in range(k, 16, 2)] for k in range(2)]
    if rates[0] == rates[1]:
        true = sum(rates[0] ** d for d in range(5))
        assert all(0.9 * true < found < 1.1 * true for found in (*tokens[0], *tokens[1]))
    else:
        assert min(tokens[0]) > 3.5 > 1.5 > max(tokens[1])


def test_shift_multiplies_odds():
    assert shift(0.5, math.log(3)) == pytest.approx(0.75)
    assert (shift(0.0, 5.0), shift(1.0, -5.0)) == (0.0, 1.0)


def test_a_trees_prior_is_that_of_the_profile_s_rows():
    rows = [[0.6, 0.2, 0.1], [0.5, 0.25, 0.05]]
    prior = PlanPrior({"draft_0": rows})
    rates = prior.rates(TREE, {"draft_0": [0.6, 0.5]})
    assert 1 + rates[0] + rates[0] * rates[1] == pytest.approx(expected_tokens(TREE.tree, rows))
    dynamic = SpecPlan.from_dynamic(DynamicTree(6, 2, 3))
    found = prior.rates(dynamic, {"draft_0": [0.6, 0.5, 0.5]})
    assert len(found) == 3
    assert found[0] == pytest.approx(0.8)
