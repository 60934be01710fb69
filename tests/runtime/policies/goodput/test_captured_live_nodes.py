"""How much of each request's tree a captured step verifies: what its graphs have rows for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specc.cost.draft_levels import draft_levels
from specc.cost.latency_table import LatencyTable, PassPart, PassSeconds, StepShape
from specc.runtime.backends.step_io import StepResult
from specc.runtime.policies.goodput.allocation import GroupLoad
from specc.runtime.policies.goodput.latency_correction import LatencyCorrection
from specc.runtime.policies.goodput.policy import GoodputPolicy
from specc.runtime.policies.goodput.step_cost import StepCost
from specc.runtime.scheduling.batch import Batch, RunResult, StepGroup
from specc.runtime.scheduling.request import Request
from specc.speculation.plans import OFF
from tests.runtime.live_rig import SLOW
from tests.runtime.policies.goodput.test_live_nodes import CHAINS, STATS, make_requests, new_policy


def captured_policy(**options: object) -> tuple[GoodputPolicy, list[Request]]:
    """Of captured steps: a pass for each plan, and two requests, one of which ends soon."""
    policy = new_policy(
        CHAINS[6], acceptance={"draft_0": [[0.95]]}, table=SLOW, shares_pass=False, **options
    )
    requests = [*make_requests(1), *make_requests(1, max_tokens=3)]
    requests[1].request_id = "ends"
    return policy, requests


def test_captured_passes_cost_by_the_rows_of_their_graphs() -> None:
    """Quarters of whole trees: nodes that fill one up are free."""
    policy, requests = captured_policy()
    policy.choose_each(requests, STATS)
    assert policy.live_nodes(CHAINS[6], requests) == (5, 3)
    # where every node costs, the first request is verified to its end
    pass_s = SLOW.target([PassPart(2, 8, 600)])
    assert policy.decision.seconds == pytest.approx(pass_s + 6 * 0.01)
    # a node less than all of them saves nothing
    cost = StepCost(policy._seconds, policy._plans, {})
    cut_pass = cost.cut_pass([GroupLoad(), GroupLoad(2, 600.0)])
    assert cut_pass is not None
    assert cut_pass.plan == 1
    found = [cut_pass.pass_s(count, 0.0, 0.0) for count in (8, 9, 12, 13, 14)]
    assert found[0] < found[1] == found[2] < found[3] == found[4]
    assert found[4] == pytest.approx(SLOW.target([PassPart(2, 14, 0)]))


def test_captured_passes_have_rows_of_nobody() -> None:
    """Five requests run in the graph of eight, whatever is verified of them, and learn so."""
    policy, _ = captured_policy(graph_sizes=(1, 2, 4, 8))
    seconds, loads = policy._seconds, [GroupLoad(), GroupLoad(5, 1500.0)]
    cost = StepCost(seconds, policy._plans, {})
    drafting_s = seconds.table.draft_s(StepShape(CHAINS[6], 5, 0.0))
    whole_s = SLOW.target([PassPart(5, 8 * 7, 0)]) + 1500 * SLOW.target.row_s(7)
    assert cost(loads) == pytest.approx(drafting_s + whole_s)
    cut_pass = cost.cut_pass(loads)
    assert cut_pass is not None
    # quarters of eight trees of seven nodes
    found = [cut_pass.pass_s(count, 0.0, 0.0) for count in (5, 16, 17, 32, 33)]
    assert found[0] == found[1] == pytest.approx(SLOW.target([PassPart(8, 16, 0)]))
    assert found[1] < found[2] == found[3] < found[4]
    # a machine that is as fast as the table says, whole or cut
    requests = make_requests(5)
    whole = StepGroup(CHAINS[6], requests)
    for group, tokens in ((whole, 56), (replace(whole, live=(4, 4, 3, 3, 3)), 32)):
        part = PassPart(5, tokens, 1500)
        shape = StepShape(CHAINS[6], 5, 1500.0)
        passed_s = seconds.table.draft_s(shape) + SLOW.target([part])
        step = StepResult([0] * 5, [], [301] * 5, {}, {"step": passed_s})
        for _ in range(40):
            policy.observe_batch(Batch([], [group]), RunResult(steps=[step]))
    for is_cut in (False, True):
        assert seconds.ratio_of_whole(CHAINS[6], is_cut)(5) == pytest.approx(1.0)
    # more than the largest are as many as there are
    assert [seconds.graph_size(count) for count in (1, 3, 8, 9)] == [1, 4, 8, 9]


# a draft's token takes as long as one of the target; rows of context do by tokens of a sequence
SLOW_DRAFTS = LatencyTable(
    PassSeconds({1: 1.0, 101: 11.0}, {1: 0.001, 11: 0.011}, "target"),
    {"draft_0": PassSeconds({1: 1.0, 101: 11.0}, {1: 0.0}, "draft_0")},
)


def test_captured_batches_draft_in_the_graph_that_holds_them() -> None:
    """Five requests draft eight sequences, as it is predicted, decided in the long run, learned."""
    chain = CHAINS[1]
    policy = new_policy(chain, table=SLOW_DRAFTS, shares_pass=False, graph_sizes=(4, 8))
    seconds, requests = policy._seconds, make_requests(5)
    (levels,) = (own for _, own in draft_levels(chain))
    drafting_s = sum(SLOW_DRAFTS.drafts["draft_0"]([PassPart(8, 8 * n, 0)]) for n in levels)
    target_s = SLOW_DRAFTS.target([PassPart(5, 10, 1500), PassPart(3, 6, 0)])
    loads = [GroupLoad(), GroupLoad(5, 1500.0)]
    assert StepCost(seconds, policy._plans, {})(loads) == pytest.approx(drafting_s + target_s)
    found = seconds.iteration([StepShape(chain, 5, 1500.0)])
    assert found == pytest.approx(drafting_s + target_s)
    # a machine that is as fast as the table says
    step = StepResult([0] * 5, [], [301] * 5, {}, {"step": drafting_s + target_s})
    for _ in range(40):
        batch = Batch([], [StepGroup(chain, requests)])
        policy.observe_batch(batch, RunResult(steps=[step]))
    assert seconds.ratio_of_whole(chain)(5) == pytest.approx(1.0)
    assert StepCost(seconds, policy._plans, {})(loads) == pytest.approx(drafting_s + target_s)


def test_rows_of_nobody_read_nothing() -> None:
    """Neither of whole trees, nor of trees that are cut: only tokens of requests read context."""
    chain = CHAINS[6]
    policy = new_policy(chain, table=SLOW_DRAFTS, shares_pass=False, graph_sizes=(8,))
    seconds, requests = policy._seconds, make_requests(5)
    size = StepShape(chain, 5, 1500.0, size=8)
    for live, tokens in (((), 56), ((4, 4, 3, 3, 3), 32)):
        group = StepGroup(chain, requests, live=live)
        own = group.num_nodes
        # sums of both: tokens without context, and rows of context by tokens of a request
        target_s = SLOW_DRAFTS.target.tokens_s(tokens) + 1500 * 0.001 * own / 5
        step_s = seconds.table.draft_s(size) + target_s
        step = StepResult([0] * 5, [], [301] * 5, {}, {"step": step_s})
        for _ in range(40):
            policy.observe_batch(Batch([], [group]), RunResult(steps=[step]))
        assert seconds.ratio_of_whole(chain, bool(live))(5) == pytest.approx(1.0)


def test_captured_steps_whose_drafter_ends_trees_are_timed_so() -> None:
    """By the rows of their graphs, apart from those that verify whole trees."""
    policy, _ = captured_policy(adapts_verification=False, graph_sizes=(4, 8))
    requests, chain = make_requests(5), CHAINS[6]
    seconds, drafting_s = policy._seconds, 6 * 0.01
    off = StepGroup(OFF, requests)
    off_step = StepResult([0] * 5, [], [301] * 5, {}, {"step": 3.0})
    # of another plan's whole trees, which those that were cut are not like
    seconds._wholes["chain-2", False] = LatencyCorrection()
    for _ in range(60):
        for live, rows in (((2, 2, 2, 2, 1), 16), ((4, 4, 4, 4, 4), 32)):
            group = StepGroup(chain, requests).ended(live)
            taken = 2.0 * (drafting_s + SLOW.target([PassPart(5, rows, 1500)]))
            step = StepResult([0] * 5, [], [301] * 5, {}, {"step": taken})
            policy.observe(group, step)
            policy.observe_batch(Batch([], [group]), RunResult(steps=[step]))
            policy.observe_batch(Batch([], [off]), RunResult(steps=[off_step]))
    ratio = seconds.ratio_of_whole(chain)
    assert ratio is not None
    assert ratio(5) == pytest.approx(2.0, rel=0.05)
    nodes = seconds.nodes_of(chain)
    assert 2.5 < nodes < 3.5
    # quarters of eight trees of seven nodes, and of four
    tokens = seconds.pass_tokens(chain, 5)
    assert tokens == 16 >= 5 * nodes
    assert seconds.pass_tokens(chain, 8) == 32 >= 8 * nodes > 16
    assert seconds.pass_tokens(chain, 3) == 16 >= 3 * nodes > 8
    cost = StepCost(seconds, policy._plans, {})
    drafting_s = seconds.table.draft_s(StepShape(chain, 5, 0.0))
    wanted = ratio(5) * (drafting_s + SLOW.target([PassPart(5, tokens, 1500.0)]))
    assert cost([GroupLoad(), GroupLoad(5, 1500.0)]) == pytest.approx(wanted)


def test_plain_requests_beside_a_captured_pass_have_one_of_their_own() -> None:
    policy, _ = captured_policy()
    cost = StepCost(policy._seconds, policy._plans, {})
    alone = cost.cut_pass([GroupLoad(), GroupLoad(2, 600.0)])
    beside = cost.cut_pass([GroupLoad(3, 900.0), GroupLoad(2, 600.0)])
    assert alone is not None
    assert beside is not None
    plain_s = SLOW.target([PassPart(3, 3, 900)])
    assert beside.besides == pytest.approx(alone.besides + plain_s)
    assert beside.pass_s(10, 0.0, 0.0) == alone.pass_s(10, 0.0, 0.0)
    # nobody drafts
    assert cost.cut_pass([GroupLoad(3, 900.0), GroupLoad()]) is None


def test_captured_steps_that_cut_are_timed_apart() -> None:
    """Their graphs have launches more: where these take longer than is saved, trees are whole."""
    policy, requests = captured_policy()
    policy.choose_each(requests, STATS)
    assert policy.live_nodes(CHAINS[6], requests)
    whole = StepGroup(CHAINS[6], requests)
    # seven nodes in eight rows
    live = (4, 3)
    drafting_s = 0.06
    for group, rows, factor in ((whole, 14, 1.0), (replace(whole, live=live), 8, 1.5)):
        seconds = factor * (drafting_s + SLOW.target([PassPart(2, rows, 600)]))
        step = StepResult([0, 0], [], [301, 301], {}, {"step": seconds})
        for _ in range(40):
            policy.observe_batch(Batch([], [group]), RunResult(steps=[step]))
    seconds = policy._seconds
    assert seconds.ratio_of_whole(CHAINS[6])(2) == pytest.approx(1.0)
    assert seconds.ratio_of_whole(CHAINS[6], is_cut=True)(2) == pytest.approx(1.5)
    policy._decide(requests)
    assert policy.live_nodes(CHAINS[6], requests) == ()
