"""Captured passes whose nodes are expected ones: rows of the graphs that hold them."""

from __future__ import annotations

import pytest

from specc.cost.latency_table import PassPart
from specc.runtime.policies.goodput.allocation import GroupLoad
from specc.runtime.policies.goodput.drafter_ends import DrafterEnds, ShownLevels
from specc.runtime.policies.goodput.predicted_seconds import PredictedSeconds
from specc.runtime.policies.goodput.step_cost import StepCost
from specc.speculation.live_nodes import expected_rows
from specc.speculation.plans import OFF, SpecPlan
from tests.runtime.live_rig import SLOW

# trees of seven nodes: quarters of 2, 4, 6 and 7 rows each
CHAIN = SpecPlan.from_widths((1,) * 6)


@pytest.mark.parametrize(
    ("expected", "rows"),
    [(0.2, 4), (4.0, 4), (4 + 1e-9, 4), (4.2, 8), (7.9, 8), (12.4, 14), (14 + 1e-9, 14), (15, 14)],
)
def test_rows_hold_the_nodes(expected: float, rows: int) -> None:
    """A little more than one holds takes the next; what sums are off by does not."""
    assert expected_rows(CHAIN.num_nodes, 2, expected) == rows


def test_passes_of_expected_nodes_cost_by_the_graph_that_holds_them() -> None:
    ends = DrafterEnds([CHAIN])
    seconds = PredictedSeconds(SLOW, shares_pass=False, graph_sizes=(1, 2), ends=ends)
    # of five trees four end after their first level, and one a level later
    shown = [ShownLevels(6, 1, 1)] * 4 + [ShownLevels(6, 2, 2)]
    for _ in range(200):
        ends.observe(CHAIN, shown)
    nodes = seconds.nodes_of(CHAIN)
    assert 2.1 < nodes < 2.4
    for count in (1, 2):
        assert seconds.pass_tokens(CHAIN, count) == 4 * count
    cut_pass = StepCost(seconds, [OFF, CHAIN], {}).cut_pass([GroupLoad(), GroupLoad(2, 600.0)])
    assert cut_pass is not None
    found = [cut_pass.pass_s(count, 0.0, 0.0) for count in (4.0, 4.2, 8.0, 14.5)]
    wanted = [SLOW.target([PassPart(2, rows, 0)]) for rows in (4, 8, 8, 14)]
    assert found == pytest.approx(wanted)
