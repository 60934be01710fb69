"""L*: the formula against a search of the crossing, row by row, of whole iterations."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from specc.cost.acceptance import expected_tokens
from specc.cost.critical_length import CriticalLength, best_critical_length, critical_length
from specc.cost.latency_table import LatencyTable, PassSeconds, StepShape
from specc.drafters.views import View
from specc.speculation.plans import OFF, SpecPlan
from specc.speculation.tree import TokenTree

MOST = 40_000


def synthetic(chooser: random.Random) -> LatencyTable:
    """A pass that reads weights, then works on tokens; rows that cost more the more attend."""
    weights, token = chooser.uniform(1, 30), chooser.uniform(0.01, 2)
    row, further = chooser.uniform(1e-4, 2e-3), chooser.uniform(0, 1)
    sizes = (1, 2, 3, 5, 9, 17, 64)
    return LatencyTable(
        PassSeconds(
            {size: weights + token * size for size in sizes},
            {size: row * (1 + further * (size - 1)) for size in sizes},
            "target",
        ),
        iteration_s=chooser.choice([0.0, 0.5, 20.0]),
        step_s=chooser.choice([0.0, 0.3]),
    )


def pays(table: LatencyTable, plan: SpecPlan, tokens: float, batch: int, rows: int) -> bool:
    """Whether a step of so many rows a sequence yields more tokens a second than plain decoding."""
    shapes = (StepShape(OFF, batch, batch * rows), StepShape(plan, batch, batch * rows))
    off, own = (table.iteration([shape]) for shape in shapes)
    return tokens * off > own


@pytest.mark.parametrize("widths", [(1,), (1, 1, 1), (1,) * 8, (3, 2, 1), (2, 1, 1, 1)])
def test_the_formula_is_where_whole_iterations_cross(widths):
    """Searched by doubling and halving, with no formula; never is the longest of all contexts."""
    chooser = random.Random(len(widths))
    outcomes = set()
    for _ in range(60):
        table, batch = synthetic(chooser), chooser.choice([1, 3, 8])
        view = View(chooser.choice([128, 512, 1024]), 4)
        plan = SpecPlan.from_widths(widths, (view.name,))
        rate = chooser.uniform(0.3, 0.95)
        rows = [[rate * 0.5**rank for rank in range(3)]] if rate < 0.5 else [[rate]]
        tokens = expected_tokens(plan.tree, rows)
        found = critical_length(table, view, plan.tree, tokens, batch)
        if found is None:
            outcomes.add("never")
            assert not pays(table, plan, tokens, batch, 10**8)
            continue
        outcomes.add("always" if found == 0 else "from there on")
        if found == 0:
            assert all(pays(table, plan, tokens, batch, n) for n in (0, 1, 64, view.num_rows, MOST))
            continue
        low, high = 0, 1
        while not pays(table, plan, tokens, batch, high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (
                (low, middle) if pays(table, plan, tokens, batch, middle) else (middle, high)
            )
        assert low <= found <= high + 1e-6
    assert {"never", "from there on"} <= outcomes


def test_what_a_hand_computes():
    """A table without fixed costs, a chain of 2, b = 100, B = 2; every number by hand."""
    table = LatencyTable(PassSeconds({2: 10.0, 6: 14.0}, {1: 0.01, 3: 0.015}, "target"))
    view, tree = View(96, 4), TokenTree.chain(2)
    # 2 passes of 10 + 0.01 * 2 * 100, one of 14, less 2.5 passes of 10; a row: 2 * (0.025 - 0.015)
    assert critical_length(table, view, tree, 2.5, 2) == pytest.approx((24 + 14 - 25) / 0.02)
    assert critical_length(table, view, tree, 1.5, 2) is None
    assert critical_length(table, view, tree, 1.4, 2) is None


def test_it_falls_with_the_batch_and_rises_with_the_budget():
    table = LatencyTable(PassSeconds({1: 10.0, 4: 11.0, 64: 60.0}, {1: 1e-3, 4: 1.2e-3}, "target"))
    chain = TokenTree.chain(3)
    lengths = [critical_length(table, View(512, 4), chain, 3.4, batch) for batch in (1, 2, 8)]
    # bound by weights: what a sequence needs is shared by all of them
    assert all(a is not None and b is not None and a > b for a, b in itertools.pairwise(lengths))
    wide, narrow = (critical_length(table, View(w, 4), chain, 3.4, 8) for w in (1024, 128))
    assert wide is not None
    assert narrow is not None
    assert wide > narrow


def test_the_best_chain_is_the_one_that_pays_first():
    table = LatencyTable(
        PassSeconds({1: 10.0, 9: 12.0}, {1: 1e-3, 9: 3e-3}, "target"), iteration_s=0.1
    )
    best = best_critical_length(table, View(128), [[0.9, 0.05]], 2)
    every = [
        critical_length(
            table,
            View(128, 4),
            TokenTree.chain(n),
            expected_tokens(TokenTree.chain(n), [[0.9]]),
            2,
        )
        for n in range(1, 9)
    ]
    known = [rows for rows in every if rows is not None]
    assert best.rows == min(known)
    assert every[best.num_draft_tokens - 1] == best.rows
    never = best_critical_length(table, View(128), [[0.0]], 2)
    assert never.rows is None
    for one in (best, never):
        assert CriticalLength.from_json(json.loads(json.dumps(one.to_json()))) == one
