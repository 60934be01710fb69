"""Latency tables: recovered from measurements, summed over a step, kept in JSON."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from specc.cost.critical_length import critical_length
from specc.cost.draft_levels import draft_levels
from specc.cost.latency_table import LatencyTable, PassPart, PassPoint, PassSeconds, StepShape
from specc.cost.roofline import LLAMA_1B, LLAMA_8B, Device, roofline
from specc.cost.step_seconds import StepSeconds
from specc.drafters.registry import drafter_of
from specc.drafters.views import View
from specc.errors import ConfigError, EngineError
from specc.speculation.plans import OFF, DynamicTree, SpecPlan
from specc.speculation.tree import TokenTree

CHAIN = SpecPlan.from_widths((1, 1, 1))
TREE = SpecPlan.from_widths((3, 2))


def table() -> LatencyTable:
    """Seconds that no two sums share by accident."""
    target = PassSeconds({1: 10.0, 101: 110.0}, {1: 0.001, 10: 0.01}, "target")
    draft = PassSeconds({1: 1.0, 101: 2.0}, {1: 0.0001}, "draft_0")
    return LatencyTable(target, {"draft_0": draft}, iteration_s=0.5, step_s=0.25)


def test_recovers_what_points_were_made_of():
    """Tokens cost 3 + 2 a token; a row of context costs as many as a sequence has tokens."""
    points = [
        PassPoint(rows, rows * width, rows * context, 3 + 2 * rows * width + width * rows * context)
        for rows, width in [(1, 1), (4, 1), (1, 4), (4, 4), (16, 1)]
        for context in (10, 50, 100)
    ]
    found = PassSeconds.from_points(points, "target")
    for rows, width, context in [(1, 1, 0), (2, 3, 70), (3, 4, 1000), (8, 1, 20)]:
        part = PassPart(rows, rows * width, rows * context)
        assert found([part]) == pytest.approx(3 + 2 * rows * width + width * rows * context)


def test_one_context_says_nothing_about_rows():
    found = PassSeconds.from_points([PassPoint(1, 1, 10, 2.0), PassPoint(4, 4, 40, 3.0)], "target")
    assert found([PassPart(1, 1, 10**6)]) == 2.0


def test_tokens_cost_what_a_pass_after_a_short_context_says():
    """Rows of four sequences cost a third more than those of one; tokens do not pay for it."""
    points = [
        PassPoint(rows, rows, rows * context, 2.0 + 0.5 * rows + slope * rows * context)
        for rows, slope in ((1, 3e-3), (2, 3e-3), (4, 4e-3))
        for context in (1, 10_000)
    ]
    found = PassSeconds.from_points(points, "target")
    for rows in (1, 2, 4):
        assert found([PassPart(rows, rows, 0)]) == pytest.approx(2.0 + 0.5 * rows, rel=2e-3)


def test_parts_share_the_weights_but_not_the_context():
    seconds = table().target
    parts = [PassPart(2, 2, 100), PassPart(1, 10, 1000)]
    assert seconds(parts) == pytest.approx(10 + 11 + 100 * 0.001 + 1000 * 0.01)
    assert seconds([]) == 0.0


def named_levels(plan):
    return tuple((draft.name, rows) for draft, rows in draft_levels(plan))


def test_levels_read_what_a_step_left_and_each_frontier():
    assert named_levels(OFF) == ()
    assert named_levels(CHAIN) == (("draft_0", (2, 1, 1)),)
    # the nodes of the first level have children, those of the second have none
    assert named_levels(TREE) == (("draft_0", (2, 3)),)
    dynamic = SpecPlan.from_dynamic(DynamicTree(8, 4, 3))
    assert named_levels(dynamic) == (("draft_0", (2, 4, 4)),)
    assert named_levels(SpecPlan.from_widths((1, 1), ("lookup-3",))) == ()
    # a view is fed the root alone, however many tokens a model beside it missed
    view = SpecPlan.from_widths((3, 2), ("self_w64_s4",))
    assert named_levels(view) == (("self_w64_s4", (1, 3)),)
    mixed = SpecPlan.from_widths((1, 1), ("self_w64_s4", "draft_0"), "merge")
    assert named_levels(mixed) == (("self_w64_s4", (1, 1)), ("draft_0", (3, 1)))
    two = SpecPlan.from_widths((1, 1), ("draft_0", "draft_1"), "merge")
    assert named_levels(two) == (("draft_0", (3, 1)), ("draft_1", (3, 1)))


def test_an_iteration_is_levels_and_one_pass():
    both = [StepShape(CHAIN, 2, 100.0), StepShape(OFF, 3, 300.0)]
    # levels of 2 x 2, 2 and 2 tokens; 100 rows of context cost by tokens of a sequence: 2, 1, 1
    drafting = 0.25 + 1.03 + 1.01 + 1.01 + (2 + 1 + 1) * 0.01
    shared = 10 + 10 + 100 * 0.001 * (1 + 3) + 300 * 0.001
    assert table().iteration(both) == pytest.approx(0.5 + drafting + shared)
    alone = (10 + 7 + 0.4) + (10 + 2 + 0.3)
    assert table().iteration(both, shares_pass=False) == pytest.approx(0.5 + drafting + alone)
    assert table().iteration([]) == 0.0


def test_json_keeps_every_figure():
    data = json.loads(json.dumps(table().to_json()))
    assert LatencyTable.from_json(data).to_json() == data
    shapes = [StepShape(TREE, 5, 1234.0), StepShape(OFF, 1, 7.0)]
    assert LatencyTable.from_json(data).iteration(shapes) == table().iteration(shapes)


@pytest.mark.parametrize("change", [{"schema_version": 2}, {"target": {}}, {"drafts": []}])
def test_refuses_other_files(change):
    with pytest.raises(EngineError, match="latency table"):
        LatencyTable.from_json(table().to_json() | change)
    with pytest.raises(EngineError, match="schema None"):
        LatencyTable.from_json([])


def test_refuses_seconds_that_are_none():
    data = table().to_json()
    data["target"]["seconds_by_tokens"] = {"1": -1.0}
    with pytest.raises(ConfigError, match="target"):
        LatencyTable.from_json(data)


def test_scaling_multiplies_passes_alone():
    shapes = [StepShape(CHAIN, 2, 100.0)]
    plain, scaled = table(), table().scaled(target=2, drafts=3)
    assert scaled.target_s(shapes) == pytest.approx(2 * plain.target_s(shapes))
    assert scaled.draft_s(shapes[0]) - 0.25 == pytest.approx(3 * (plain.draft_s(shapes[0]) - 0.25))


def test_roofline_is_bound_by_memory_then_by_arithmetic():
    device = Device(layer_s=0, pass_s=0)
    target = roofline(LLAMA_8B, {"draft_0": LLAMA_1B}, device).target
    reading, multiplying = 8.03e9 * 2 / (4.8e12 * 0.85), 2 * 8.03e9 / (990e12 * 0.7)
    assert target([PassPart(1, 1, 0)]) == pytest.approx(reading)
    assert target([PassPart(4096, 4096, 0)]) == pytest.approx(4096 * multiplying)
    # 128 KiB of keys and values for each row
    row = target([PassPart(1, 1, 1000)]) - target([PassPart(1, 1, 0)])
    assert row == pytest.approx(1000 * 131072 / (4.8e12 * 0.85))


def test_a_view_costs_passes_of_the_target_over_what_it_sees():
    known = table()
    plan = SpecPlan.from_widths((1, 1), ("self_w60_s4",))
    for rows, context in [(1, 1000.0), (3, 3000.0), (2, 100.0)]:
        seen = min(context, rows * 64)
        wanted = known.step_s + 2 * known.target([PassPart(rows, rows, seen)])
        assert known.draft_s(StepShape(plan, rows, context)) == pytest.approx(wanted)
    # a table of an engine without draft models
    alone = LatencyTable(known.target)
    assert StepSeconds(alone, drafter_of("self_w60_s4"), 3, 1000.0).level(0, 1) == pytest.approx(
        known.target([PassPart(3, 3, 192)])
    )


def test_a_view_reads_of_each_sequence_what_it_has_up_to_its_budget():
    """1,000 and 31,000 rows are not two of 16,000."""
    known = table()
    lengths = [16, 31, 1000, 31_000]
    view = SpecPlan.from_widths((2, 1), ("self_w60_s4",))
    shape = StepShape.of(view, lengths)
    assert (shape.rows, shape.context) == (4, sum(lengths))
    read = 16 + 31 + 64 + 64
    levels = [PassPart(4, 4, read), PassPart(4, 8, read)]
    wanted = known.step_s + sum(known.target([part]) for part in levels)
    assert known.draft_s(shape) == pytest.approx(wanted)
    # what each of them adds is what all of them add
    both = SpecPlan.from_widths((1, 1), ("self_w60_s4", "draft_0"), "merge")
    for plan in (view, both, CHAIN, OFF):
        rows = known.draft_rows(plan)
        added = sum(row_s * min(length, most) for length in lengths for most, row_s in rows)
        without = known.draft_s(StepShape(plan, 4, 0.0))
        assert known.draft_s(StepShape.of(plan, lengths)) == pytest.approx(without + added)
    # models read all rows
    assert known.draft_s(StepShape.of(CHAIN, lengths)) == known.draft_s(
        StepShape(CHAIN, 4, sum(lengths))
    )


def test_votes_cost_what_a_step_shares_of_them():
    """Of a plan that chooses blocks; as often as steps that accept all come by so many rows."""
    votes = PassSeconds({1: 0.0, 16: 15e-4}, {1: 1e-6, 4: 4e-6}, "votes")
    table = LatencyTable(LatencyTable.neutral([]).target, votes=votes)
    plain = dataclasses.replace(table, votes=None)
    window, blocks = (
        SpecPlan.from_widths((1, 1, 1), (name,)) for name in ("self_w64_s4", "self_w64_s4_b64")
    )
    shape = StepShape.of(blocks, [1000, 3000])
    share = 4 / 64
    expected = share * (table.votes.tokens_s(8) + 4000 * 4e-6)
    assert table.draft_s(shape) - plain.draft_s(shape) == pytest.approx(expected)
    assert table.draft_s(shape, with_votes=False) == plain.draft_s(shape)
    assert table.draft_s(shape._replace(plan=window)) == plain.draft_s(shape._replace(plan=window))
    # goodput counts the rows of each request apart
    assert dict(table.draft_rows(blocks))[math.inf] == pytest.approx(share * 4e-6)
    assert math.inf not in dict(plain.draft_rows(blocks))
    # of a window of 8, nodes vote every 32 rows; of 1024, every 256
    for name, every in (("self_w8_s0_b8", 32), ("self_w1024_s4_b64", 256)):
        own = SpecPlan.from_widths((1, 1, 1), (name,))
        found = table.draft_s(StepShape(own, 1, 0.0)) - plain.draft_s(StepShape(own, 1, 0.0))
        assert found == pytest.approx(4 / every * table.votes.tokens_s(4))
    assert LatencyTable.from_json(table.to_json()).to_json() == table.to_json()
    assert table.scaled(2.0).draft_s(shape) == pytest.approx(2 * table.draft_s(shape))


def test_votes_count_where_plans_are_chosen():
    votes = PassSeconds({1: 2e-3}, {1: 1e-6}, "votes")
    table = LatencyTable(LatencyTable.neutral([]).target, votes=votes)
    plain = dataclasses.replace(table, votes=None)
    tree = TokenTree.chain(3)
    for name, counts in (("self_w64_s4", False), ("self_w64_s4_b64", True)):
        slow, fast = (StepSeconds(one, drafter_of(name), 2, 500).of(tree) for one in (table, plain))
        assert (slow > fast) == counts
        view = View.named(name)
        longer, shorter = (critical_length(one, view, tree, 3.0, 2) for one in (table, plain))
        assert (longer > shorter) == counts
        if not counts:
            continue
        # at that length, tokens at the price of plain decoding cost what the step costs
        off = StepSeconds(table, drafter_of("suffix"), 2, longer).off
        assert StepSeconds(table, drafter_of(name), 2, longer).of(tree) == pytest.approx(
            3.0 * off, rel=1e-6
        )


def test_nodes_that_are_verified_are_what_a_pass_counts() -> None:
    table = roofline()
    part, drafts = StepShape.of(CHAIN, [100, 300], 5.0), StepShape.of(CHAIN, [100, 300])
    assert table.target_s([part]) == table.target([PassPart(2, 5, 400)])
    # drafts propose all the same
    assert table.draft_s(part) == table.draft_s(drafts)
