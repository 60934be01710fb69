"""The simulator: seconds and tokens against sums by hand, dice against their rates, same bytes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import pytest

from specc.cost.acceptance import expected_tokens
from specc.cost.latency_table import LatencyTable, PassPart, PassSeconds, StepShape
from specc.cost.roofline import roofline
from specc.errors import ConfigError, RequestError
from specc.runtime.policies.base import FixedPolicy
from specc.runtime.policies.goodput.policy import GoodputPolicy
from specc.simulate.comparison import compare, make_simulated_policy
from specc.simulate.load import Drafting, Lengths, Load, SimulatedRequest, make_load, uniform
from specc.simulate.simulator import Iteration, Limits, SimulationReport, simulate
from specc.speculation.plans import OFF, DynamicTree, SpecPlan

CHAIN = SpecPlan.from_widths((1, 1, 1))
TREE = SpecPlan.from_widths((2, 2))
DYNAMIC = SpecPlan.from_dynamic(DynamicTree(6, 3, 3))
PLANS = {plan.name: plan for plan in (OFF, CHAIN, TREE, DYNAMIC)}
ROWS = [[0.6, 0.2], [0.5, 0.3]]
GOOD = Drafting({"draft_0": ROWS})
RIGHT, WRONG = Drafting({"draft_0": [[1.0]]}), Drafting({"draft_0": [[0.0]]})
SMALL = Limits(max_num_seqs=4, max_seq_len=512, prefill_chunk=32)


def table() -> LatencyTable:
    """1 s a pass of the target and 0.01 a token; 0.1 s a pass of the draft; no context."""
    target = PassSeconds({1: 1.01, 101: 2.01}, {1: 0.0}, "target")
    return LatencyTable(target, {"draft_0": PassSeconds({1: 0.1, 1000: 0.1}, {1: 0.0}, "draft_0")})


def one(prompt: int, output: int, drafting: Drafting = GOOD, arrival: float = 0.0) -> Load:
    return Load([SimulatedRequest(arrival, prompt, output, drafting)])


def run(load: Load, plan: str, limits: Limits = SMALL) -> SimulationReport:
    return simulate(load, table(), PLANS, FixedPolicy(plan), limits)


def test_plain_decoding_takes_a_pass_a_token():
    report = run(one(10, 6, arrival=3.0), "off")
    # the prompt's pass of 10 tokens gives the first token, then five passes of one token
    assert report.ttft_s == pytest.approx([1.1])
    assert report.latency_s == pytest.approx([1.1 + 5 * 1.01])
    assert report.tpot_s == pytest.approx([1.01])
    assert report.end_s == pytest.approx(3 + report.latency_s[0])
    assert report.busy_s == pytest.approx(report.latency_s[0])


def test_a_long_prompt_goes_in_chunks():
    report = run(one(80, 1), "off")
    assert report.ttft_s == pytest.approx([1.32 + 1.32 + 1.16])


@pytest.mark.parametrize("shares_pass", [True, False])
def test_a_draft_that_is_always_right(shares_pass):
    limits = dataclasses.replace(SMALL, shares_pass=shares_pass)
    report = run(one(10, 9, RIGHT), CHAIN.name, limits)
    # the prompt through both, then two steps of four tokens: three levels and four nodes each
    assert report.latency_s == pytest.approx([1.1 + 0.1 + 2 * (0.3 + 1.04)])
    assert report.stats.mean_acceptance_length == 4


def test_a_draft_that_is_never_right():
    report = run(one(10, 4, WRONG), CHAIN.name)
    assert report.latency_s == pytest.approx([1.1 + 0.1 + 3 * (0.3 + 1.04)])
    assert report.stats.mean_acceptance_length == 1


def test_prompts_and_steps_share_a_pass_or_do_not():
    """The second request comes while the first one decodes."""
    late = SimulatedRequest(1.2, 10, 2, GOOD)
    load = Load([SimulatedRequest(0.0, 10, 4, GOOD), late])
    shared = run(load, "off")
    # 1.1, 1.01 | 1.11 with a prompt of 10, 1.02 for both
    assert shared.latency_s == pytest.approx([1.1 + 1.01 + 1.11 + 1.02, 2.11 - 1.2 + 1.11 + 1.02])
    split = run(load, "off", dataclasses.replace(SMALL, shares_pass=False))
    assert split.latency_s[0] == pytest.approx(1.1 + 1.01 + (1.1 + 1.01) + 1.02)


class Alternating(FixedPolicy):
    """Off for some steps, then a chain."""

    needs_results = True

    def __init__(self, num_off: int) -> None:
        super().__init__("off")
        self._num_off = num_off

    def choose(self, num_running, stats):
        return "off" if stats.num_steps < self._num_off else CHAIN.name


def test_a_draft_reads_what_it_has_missed():
    report = simulate(one(10, 11, RIGHT), table(), PLANS, Alternating(2), SMALL)
    # first token, two plain steps; then the draft reads 12 rows in a pass; two steps of four
    seconds = 1.1 + 2 * 1.01 + 0.1 + 2 * (0.3 + 1.04)
    assert report.latency_s == pytest.approx([seconds])


@pytest.mark.parametrize("plan", [CHAIN, TREE])
def test_trees_accept_as_their_rows_say(plan):
    report = run(one(4, 450), plan.name)
    many = [run(dataclasses.replace(one(4, 450), seed=seed), plan.name) for seed in range(12)]
    steps = sum(r.stats.num_spec_steps for r in [report, *many])
    accepted = sum(r.stats.num_accepted_tokens for r in [report, *many])
    assert 1 + accepted / steps == pytest.approx(expected_tokens(plan.tree, ROWS), rel=0.04)


def test_longer_plans_accept_what_shorter_ones_do_at_the_same_places():
    """The dice belong to positions: they do not depend on what throws them."""
    load = make_load(1.0, 4, [(1, GOOD)], Lengths(20), Lengths(30), seed=3)
    ranks = {
        (request, position): load.rank(request, "draft_0", 0, position)
        for request in range(4)
        for position in range(20, 50)
    }
    assert set(ranks.values()) == {0, 1, None}
    again = make_load(9.0, 4, [(1, GOOD)], Lengths(20), Lengths(30), seed=3)
    assert all(again.rank(r, "draft_0", 0, p) == rank for (r, p), rank in ranks.items())
    assert any(
        dataclasses.replace(load, seed=4).rank(r, "draft_0", 0, p) != rank
        for (r, p), rank in ranks.items()
    )


def test_uniform_numbers_are_uniform():
    values = [uniform(5, 4, i, j) for i in range(50) for j in range(200)]
    assert sum(values) / len(values) == pytest.approx(0.5, abs=0.01)
    assert sum(v * v for v in values) / len(values) == pytest.approx(1 / 3, abs=0.01)
    assert len(set(values)) == len(values)


def test_arrivals_and_lengths_have_their_means():
    load = make_load(
        5.0, 4000, [(1, GOOD), (3, WRONG)], Lengths(100, 0.5), Lengths(50, 0.0), plain_share=0.25
    )
    requests = load.requests
    assert requests[-1].arrival_s == pytest.approx(800, rel=0.05)
    mean = sum(r.num_prompt_tokens for r in requests) / 4000
    variance = sum((r.num_prompt_tokens - mean) ** 2 for r in requests) / 4000
    assert (mean, math.sqrt(variance)) == (pytest.approx(100, rel=0.03), pytest.approx(50, rel=0.1))
    assert {r.num_output_tokens for r in requests} == {50}
    assert sum(r.drafting is WRONG for r in requests) == pytest.approx(3000, rel=0.05)
    assert sum(not r.speculative for r in requests) == pytest.approx(1000, rel=0.1)
    gaps = [b.arrival_s - a.arrival_s for a, b in itertools.pairwise(requests)]
    assert all(gap >= 0 for gap in gaps)


def test_bursts_come_together_at_the_same_rate():
    load = make_load(5.0, 4000, [(1, GOOD)], Lengths(8), Lengths(8), burst=10)
    times = [request.arrival_s for request in load.requests]
    assert len(set(times)) == 400
    assert times[-1] == pytest.approx(800, rel=0.15)


def test_acceptance_drifts_over_an_output_or_over_the_load():
    within = Drafting({"draft_0": [[1.0]]}, {"draft_0": [[0.0]]})
    assert within.bounds("draft_0", 5, 0.25) == [0.75]
    ranks = [one(400, 1000, within).rank(0, "draft_0", 0, 400 + i) for i in range(1000)]
    assert ranks[:100].count(0) > 85 > 15 > ranks[-100:].count(0)
    over = dataclasses.replace(within, over="load")
    load = make_load(1.0, 400, [(1, over)], Lengths(8), Lengths(8))
    ranks = [load.rank(i, "draft_0", 0, 9) for i in range(400)]
    assert ranks[:50].count(0) > 40 > 10 > ranks[-50:].count(0)


def test_the_same_seed_gives_the_same_bytes():
    load = make_load(30.0, 40, [(1, GOOD)], Lengths(50, 0.5), Lengths(40, 0.5), seed=2)
    plans = {plan.name: plan for plan in (OFF, CHAIN)}

    def served() -> str:
        # by the host's clock the policy decides less often where deciding takes long
        policy = GoodputPolicy(plans, roofline(), clock=lambda: 0.0)
        return json.dumps(simulate(load, roofline(), plans, policy, noise=0.1).to_json())

    found = served()
    assert served() == found
    assert "NaN" not in found


def test_a_trace_adds_up():
    load = make_load(1.0, 12, [(1, GOOD)], Lengths(20, 0.5), Lengths(12, 0.5), seed=2)
    seen: list[Iteration] = []
    report = simulate(load, table(), PLANS, FixedPolicy(CHAIN.name), SMALL, trace=seen.append)
    requests = load.requests
    assert sum(i.num_tokens for i in seen) == sum(r.num_output_tokens for r in requests)
    assert sum(i.num_prefill_tokens for i in seen) == sum(r.num_prompt_tokens for r in requests)
    assert sum(i.seconds for i in seen) == pytest.approx(report.busy_s)
    assert seen[-1].start_s + seen[-1].seconds == pytest.approx(report.end_s)
    data = report.to_json()
    assert data["plan_shares"] == {CHAIN.name: 1.0}
    assert data["num_requests"] == 12
    assert data["p50_latency_s"] <= data["p90_latency_s"] <= data["p99_latency_s"]


def test_what_cannot_be_simulated_is_refused():
    merged = SpecPlan.from_widths((1, 1), ("draft_0", "draft_1"), "merge")
    for plan in (merged, SpecPlan.from_widths((1, 1), ("lookup-3",))):
        with pytest.raises(ConfigError, match="plan"):
            simulate(one(4, 4), table(), {"off": OFF, plan.name: plan}, FixedPolicy("off"), SMALL)
    with pytest.raises(RequestError, match="blocks"):
        run(one(40, 100), "off", dataclasses.replace(SMALL, pool_blocks=2))
    with pytest.raises(ConfigError, match="a load of"):
        make_load(0.0, 4, [(1, GOOD)], Lengths(8), Lengths(8))
    with pytest.raises(ConfigError, match="lengths"):
        Lengths(8, least=9, most=4)


def test_a_comparison_serves_everyone_with_the_same_load():
    plans = {plan.name: plan for plan in (OFF, CHAIN)}
    # one at a time, a draft is worth it
    load = make_load(2.0, 25, [(1, Drafting({"draft_0": [[0.8]]}))], Lengths(64), Lengths(64))
    (row,) = compare({"idle": load}, roofline(), plans, Limits())
    assert row.name == "idle"
    data = row.to_json()
    assert (data["best_fixed"], data["worst_fixed"]) == (CHAIN.name, "off")
    assert data["goodput_over_best"] < 1.05
    assert data["goodput_over_off"] == pytest.approx(
        row.latency("goodput") / row.latency("off"), abs=1e-4
    )


@pytest.mark.slow
def test_at_saturation_goodput_is_not_worse_than_off():
    plans = {plan.name: plan for plan in (OFF, SpecPlan.from_widths((1,) * 4))}
    load = make_load(60.0, 240, [(1, GOOD)], Lengths(512, 0.5), Lengths(128, 0.5), seed=4)
    (row,) = compare({"busy": load}, roofline(), plans, Limits(max_num_seqs=64))
    assert row.latency("goodput") < 1.03 * row.latency("off")
    assert row.latency("chain-4") > 1.1 * row.latency("goodput")


def test_adaptive_finds_the_length_that_pays():
    """One request at a time: a draft that is right is used, one that never is goes off."""
    chains = [OFF, *(SpecPlan.from_widths((1,) * length) for length in (2, 4))]
    plans = {plan.name: plan for plan in chains}
    for drafting, wanted in ((RIGHT, "chain-4"), (WRONG, "off")):
        load = make_load(0.01, 6, [(1, drafting)], Lengths(8), Lengths(200))
        policy = make_simulated_policy("adaptive", plans, table(), SMALL)
        shares = simulate(load, table(), plans, policy, SMALL).to_json()["plan_shares"]
        assert shares[wanted] > 0.7


def test_a_self_draft_reads_of_each_request_what_its_window_holds():
    """A short and a long request in one step."""
    plan = SpecPlan.from_widths((1, 1), ("self_w60_s4",))
    truth = LatencyTable(PassSeconds({1: 1.0, 1000: 1.5}, {1: 1e-2, 3: 2e-2}, "target"))
    drafting = Drafting({"self_w60_s4": [[1.0]]})
    load = Load([SimulatedRequest(0.0, n, 7, drafting) for n in (16, 400)])
    found: list[Iteration] = []
    plans = {one.name: one for one in (OFF, plan)}
    limits = dataclasses.replace(SMALL, prefill_chunk=1024)
    simulate(load, truth, plans, FixedPolicy(plan.name), limits, trace=found.append)
    # the prompts, then two steps of three tokens each
    steps = [one.seconds for one in found if not one.num_prefill_tokens]
    for seconds, more in zip(steps, (0, 3), strict=True):
        shape = StepShape.of(plan, [16 + more, 400 + more])
        assert seconds == pytest.approx(truth.iteration([shape]))
    read = 2 * 1e-2 * (16 + 64)
    passes = 2 * truth.target([PassPart(2, 2, 0)]) + truth.target([PassPart(2, 6, 0)])
    assert steps[0] == pytest.approx(passes + read + 2e-2 * 416)


class TwoNodes(FixedPolicy):
    """The first two nodes of every tree."""

    def live_nodes(self, plan, requests):
        return (2,) * len(requests)


def test_dead_nodes_take_no_time_and_are_not_accepted():
    report = simulate(one(10, 9, RIGHT), table(), PLANS, TwoNodes(CHAIN.name), SMALL)
    # all three levels are drafted, the target has two nodes a step, which bring two tokens
    assert report.latency_s == pytest.approx([1.1 + 0.1 + 4 * (0.3 + 1.02)])
    assert report.stats.mean_acceptance_length == 2
    assert report.stats.num_draft_tokens == 4


class ThreeNodes(TwoNodes):
    def live_nodes(self, plan, requests):
        return (3,) * len(requests)


@pytest.mark.parametrize(("shares_pass", "num_rows"), [(True, 3), (False, 4)])
def test_captured_passes_take_as_long_as_their_rows(shares_pass, num_rows):
    """Of eight nodes a graph has two, four, six or eight rows, and some are nobody's."""
    limits = dataclasses.replace(SMALL, shares_pass=shares_pass)
    chain = SpecPlan.from_widths((1,) * 7)
    plans = {**PLANS, chain.name: chain}
    report = simulate(one(10, 10, RIGHT), table(), plans, ThreeNodes(chain.name), limits)
    assert report.latency_s == pytest.approx([1.1 + 0.1 + 3 * (0.7 + 1 + 0.01 * num_rows)])
    assert report.stats.mean_acceptance_length == 3
