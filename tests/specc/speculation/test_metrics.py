"""SpecStats: derived rates, trimming, merging."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specc.speculation.metrics import SpecStats
from specc.speculation.plans import SpecPlan

# off, a chain, trees, two merged trees, dynamic trees
LEVELS = st.sampled_from(
    [(), (1, 1, 1, 1), (3, 6, 6), (2,), (4, 4, 2), (4, 11, 0, 0), (1, 1, 0, 0, 0)]
)


@st.composite
def steps(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    levels = draw(LEVELS)
    accepted = draw(st.integers(0, min(len(levels), sum(levels))))
    return levels, accepted, draw(st.integers(1, accepted + 1))


def check_invariants(stats: SpecStats) -> None:
    """What holds for any request and any engine."""
    assert 0 <= stats.num_accepted_tokens <= stats.num_draft_tokens or not stats.num_spec_steps
    assert sum(stats.accepted_at_depth) == stats.num_accepted_tokens
    assert stats.accepted_at_depth == sorted(stats.accepted_at_depth, reverse=True)
    assert all(count <= stats.num_spec_steps for count in stats.accepted_at_depth)
    assert stats.num_spec_steps <= stats.num_steps
    assert stats.num_output_tokens == (
        stats.num_first_tokens + stats.num_steps + stats.num_accepted_tokens
    )
    assert 0 <= stats.acceptance_rate <= 1
    assert stats.mean_acceptance_length == pytest.approx(1 + sum(stats.accepted_per_depth))


@given(st.lists(steps()))
def test_invariants(history: list[tuple[tuple[int, ...], int, int]]) -> None:
    stats = SpecStats()
    stats.record_first_token(0.5)
    for levels, accepted, emitted in history:
        stats.record_step(levels, accepted, emitted)
    check_invariants(stats)
    verified = sum(accepted + 1 for _, accepted, _ in history)
    assert stats.num_output_tokens + stats.num_trimmed_tokens == 1 + verified


@given(st.lists(steps()), st.lists(steps()))
def test_merge_equals_one_history(
    first: list[tuple[tuple[int, ...], int, int]], second: list[tuple[tuple[int, ...], int, int]]
) -> None:
    one, parts = SpecStats(), [SpecStats(), SpecStats()]
    for part, history in zip(parts, (first, second), strict=True):
        for step in history:
            one.record_step(*step)
            part.record_step(*step)
    parts[0].merge(parts[1])
    assert parts[0] == one


def test_rates_of_a_chain() -> None:
    stats = SpecStats()
    stats.record_first_token(0.25)
    for accepted in (4, 2, 0):
        stats.record_step((1, 1, 1, 1), accepted, accepted + 1)
        stats.record_step_pass({"draft": 0.004, "verify": 0.010, "accept_commit": 0.001})
    stats.record_prefill_pass(0.1)
    stats.elapsed_s = 2.0
    assert stats.mean_acceptance_length == 3.0
    assert stats.acceptance_rate == 0.5
    assert stats.accepted_per_depth == pytest.approx([2 / 3, 2 / 3, 1 / 3, 1 / 3])
    assert stats.num_output_tokens == 10
    assert stats.target_passes == 4
    assert stats.tokens_per_target_pass == 2.5
    assert stats.tokens_per_s == 5.0
    assert stats.time_to_first_token == 0.25
    assert stats.draft_ms_per_step == pytest.approx(4)
    assert stats.verify_ms_per_step == pytest.approx(10)
    assert stats.commit_ms_per_step == pytest.approx(1)
    assert stats.ms_per_step == pytest.approx(15)


def test_tree_counts_all_nodes_as_drafted() -> None:
    stats = SpecStats()
    stats.record_step(SpecPlan.from_widths((3, 2, 1)).level_sizes, 1, 2)
    assert stats.num_draft_tokens == 3 + 6 + 6
    assert stats.accepted_per_depth == [1.0, 0.0, 0.0]
    assert stats.acceptance_rate == pytest.approx(1 / 15)


def test_trimmed_tree_counts_the_levels_that_count() -> None:
    """Three of four tokens are put out: those of two levels were drafted for them."""
    stats = SpecStats()
    stats.record_step((3, 6, 6), 3, 3)
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (3 + 6, 2)
    assert stats.accepted_at_depth == [1, 1, 0]


def test_trimmed_step_flatters_nothing() -> None:
    """Five tokens verified, two emitted: the step counts for two, and drafted only one."""
    stats = SpecStats()
    stats.record_step((1, 1, 1, 1), 4, 2)
    assert stats.mean_acceptance_length == 2.0
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (1, 1)
    assert stats.num_trimmed_tokens == 3
    stats.record_step((1, 1, 1, 1), 4, 1)
    assert stats.mean_acceptance_length == 1.5
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (1, 1)


def test_a_step_that_ends_with_its_bonus_token_is_not_trimmed() -> None:
    stats = SpecStats()
    stats.record_step((1, 1), 1, 2)
    assert stats.num_trimmed_tokens == 0
    assert stats.num_draft_tokens == 2


def test_off_steps_do_not_dilute_acceptance() -> None:
    stats = SpecStats()
    stats.record_step((1,), 1, 2)
    stats.record_step((), 0, 1)
    assert stats.mean_acceptance_length == 2.0
    assert (stats.num_steps, stats.num_spec_steps, stats.num_output_tokens) == (2, 1, 3)


def test_nothing_counted_yet() -> None:
    stats = SpecStats()
    assert stats.mean_acceptance_length == 1.0
    assert stats.acceptance_rate == stats.tokens_per_s == stats.ms_per_step == 0.0
    assert stats.accepted_per_depth == []


def test_copy_is_independent_and_as_dict_is_json() -> None:
    stats = SpecStats()
    stats.record_step((1,), 1, 2)
    copy = stats.copy()
    stats.record_step((1,), 1, 2)
    assert copy.accepted_at_depth == [1]
    data = json.loads(json.dumps(stats.as_dict()))
    assert data["mean_acceptance_length"] == 2.0
    assert data["num_steps"] == 2
