"""How much of each request's tree is verified: the best levels, whatever they cost."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from specc.cost.latency_table import PassPart, StepShape
from specc.cost.roofline import roofline
from specc.runtime.backends.step_io import StepResult
from specc.runtime.policies.goodput.allocation import GroupLoad
from specc.runtime.policies.goodput.live_nodes import Levels, cut_levels
from specc.runtime.policies.goodput.policy import GoodputPolicy
from specc.runtime.policies.goodput.step_cost import StepCost
from specc.runtime.scheduling.batch import Batch, RunResult, StepGroup
from specc.runtime.scheduling.request import Request
from specc.sampling.params import SamplingParams
from specc.speculation.metrics import SpecStats
from specc.speculation.plans import OFF, SpecPlan
from tests.runtime.live_rig import SLOW
from tests.runtime.policies.goodput.dice_engine import DiceEngine

CHAINS = {length: SpecPlan.from_widths((1,) * length) for length in (1, 2, 6)}
TREE = SpecPlan.from_widths((3, 1, 1))
STATS = SpecStats()


def geometric(rate: float, depth: int, context: float = 0.0, width: int = 1) -> Levels:
    tokens = list(itertools.accumulate(rate**d for d in range(depth + 1)))
    nodes = [1 + width * d for d in range(depth + 1)]
    return Levels(tokens, nodes, nodes, context)


def goodput(sequences: Sequence[Levels], depths: Sequence[int], cost: tuple[float, ...]) -> float:
    besides, fixed, token_s, row_s = cost
    pairs = list(zip(sequences, depths, strict=True))
    tokens = sum(own.tokens[depth] for own, depth in pairs)
    nodes = sum(own.nodes[depth] for own, depth in pairs)
    rows_s = sum(own.context * row_s * own.nodes[depth] for own, depth in pairs)
    return tokens / (besides + fixed + token_s * nodes + rows_s)


@pytest.mark.parametrize("seed", range(30))
def test_levels_are_those_of_exhaustive_search(seed: int) -> None:
    """Where every node costs the same, the likeliest ones down to a bar are best."""
    chooser = random.Random(seed)
    sequences = [geometric(chooser.uniform(0.05, 0.95), chooser.randint(0, 4)) for _ in range(4)]
    cost = chooser.uniform(0, 1), 1.0, chooser.choice([0.0, 0.02, 0.1, 0.5]), 0.0
    found = cut_levels(
        sequences,
        cost[0],
        lambda nodes: 0.0,
        lambda tokens, rows_s, besides: cost[1] + cost[2] * tokens + rows_s,
    )
    every = itertools.product(*(range(len(own.nodes)) for own in sequences))
    best = max(goodput(sequences, depths, cost) for depths in every)
    assert found.tokens / found.seconds == pytest.approx(best)
    assert goodput(sequences, found.depths, cost) == pytest.approx(best)


def test_committed_rows_and_a_budget_count() -> None:
    sequences = [geometric(0.9, 4, context) for context in (0.0, 50.0)]

    def cut(row_s: float, budget: int | None = None) -> list[int]:
        found = cut_levels(
            sequences,
            0.0,
            lambda nodes: row_s * nodes,
            lambda tokens, rows_s, besides: 1.0 + 0.01 * tokens + rows_s,
            budget,
        )
        assert found.tokens / found.seconds == pytest.approx(
            goodput(sequences, found.depths, (0.0, 1.0, 0.01, row_s))
        )
        return found.depths

    assert cut(0.0) == [4, 4]
    assert sum(cut(0.02)) < 8
    assert sum(cut(0.0, budget=6)) == 4


def test_wide_levels_count_by_their_nodes() -> None:
    """A level of three nodes has to yield three times as much."""
    narrow, wide = geometric(0.5, 3), geometric(0.6, 3, width=3)
    found = cut_levels(
        [narrow, wide], 0.0, lambda n: 0.0, lambda tokens, rows_s, besides: 1 + 0.1 * tokens
    )
    assert found.depths[0] > found.depths[1]


def test_a_step_that_jumps_is_looked_at_beyond_its_worst() -> None:
    """As seconds of tiles do: the fifth token costs a lot, those after it nothing."""
    found = cut_levels(
        [geometric(0.95, 8)],
        0.0,
        lambda n: 0.0,
        lambda tokens, rows_s, besides: 1 + 0.3 * (tokens > 4),
    )
    assert found.depths == [8]


def new_policy(*plans: SpecPlan, **options: object) -> GoodputPolicy:
    by_name = {plan.name: plan for plan in (OFF, *plans)}
    adapting = {"adapts_verification": True, "table": roofline()} | options
    return GoodputPolicy(by_name, clock=lambda: 0.0, **adapting)  # type: ignore[arg-type]


def make_requests(count: int, max_tokens: int = 100_000) -> list[Request]:
    made = []
    for i in range(count):
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        request = Request(str(i), [0] * 8, params, max_seq_len=200_000, num_drafts=1)
        request.cache_len, request.draft_lens = 300, [300]
        made.append(request)
    return made


@pytest.mark.parametrize("plan", [CHAINS[6], TREE], ids=lambda plan: plan.name)
def test_good_requests_are_verified_further_than_bad_ones_of_the_same_plan(plan: SpecPlan) -> None:
    policy = new_policy(plan)
    engine = DiceEngine(policy, policy._seconds.table)
    requests, rates = make_requests(48), [0.9] * 24 + [0.35] * 24
    for _ in range(120):
        engine.step(requests, rates)
    live = [engine.live[-1].get(request.request_id, 1) for request in requests]
    good, bad = (sum(own) / 24 for own in (live[:24], live[24:]))
    assert good > 1.5 * bad
    # one group drafts for all that do
    assert {name for name in engine.names[-1] if name != OFF.name} == {plan.name}
    # a decision says what an iteration takes, dead nodes not counted
    assert policy.decision.seconds == pytest.approx(engine.last_s, rel=0.02)


def test_what_is_not_verified_teaches_nothing() -> None:
    policy = new_policy(CHAINS[6])
    learned = policy._acceptance
    before = learned.rates(CHAINS[6])
    requests = {str(i): 2 for i in range(40)}
    for _ in range(20):
        # all that was verified was accepted
        learned.observe(CHAINS[6], requests, dict.fromkeys(requests, 2))
    after = learned.rates(CHAINS[6])
    assert min(after[:2]) > 0.98
    # of deeper ones nobody has seen that they are refused
    assert min(after[2:]) >= min(before)
    # nor is a request worse than others for it
    known, unknown = (learned.tokens(CHAINS[6], name, 7) for name in ("0", "unknown"))
    assert known >= unknown
    # nor is anything seen by roots alone
    learned.observe(CHAINS[6], {"a": 0, "b": 0}, {"a": 0, "b": 0})
    assert learned.rates(CHAINS[6]) == after
    assert learned.num_observed("a", CHAINS[6]) == 0


def test_no_level_is_verified_that_a_request_has_no_tokens_left_for() -> None:
    policy = new_policy(CHAINS[6], acceptance={"draft_0": [[0.95]]}, table=SLOW)
    requests = [*make_requests(1), *make_requests(1, max_tokens=3)]
    requests[1].request_id = "ends"
    policy.choose_each(requests, STATS)
    assert policy.live_nodes(CHAINS[6], requests) == (7, 3)
    assert policy.live_nodes(CHAINS[6], requests[:1]) == ()
    requests[1].append([1])
    # also between decisions
    assert policy.live_nodes(CHAINS[6], requests) == (7, 2)
    # those of which nothing was decided yet
    newer = make_requests(1)
    newer[0].request_id = "newer"
    assert policy.live_nodes(CHAINS[6], newer) == ()


def test_a_cut_is_worth_what_the_host_does_for_it() -> None:
    """Its passes are timed apart: where they take longer than they save, all nodes are verified."""
    policy = new_policy(CHAINS[6], acceptance={"draft_0": [[0.95]]}, table=SLOW)
    requests = [*make_requests(1), *make_requests(1, max_tokens=3)]
    requests[1].request_id = "ends"
    policy.choose_each(requests, STATS)
    live = policy.live_nodes(CHAINS[6], requests)
    assert live == (7, 3)
    group = StepGroup(CHAINS[6], requests, live=live)
    step = StepResult([0, 0], [], [301, 301], {}, {"draft": 0.06})
    for _ in range(40):
        seconds = 1.5 * SLOW.target([PassPart(2, 10, 600)])
        policy.observe_batch(Batch([], [group]), RunResult(steps=[step], pass_s=seconds))
    assert policy._seconds.pass_s(10, 0.0, is_cut=True) == pytest.approx(seconds)
    assert policy._seconds.pass_s(10, 0.0) == pytest.approx(seconds / 1.5)
    policy._decide(requests)
    assert policy.live_nodes(CHAINS[6], requests) == ()


def test_without_the_option_every_node_is_verified() -> None:
    policy = new_policy(CHAINS[6], adapts_verification=False)
    requests = make_requests(2, max_tokens=3)
    policy.choose_each(requests, STATS)
    assert policy.live_nodes(CHAINS[6], requests) == ()


@pytest.mark.parametrize("adapts", [False, True])
def test_where_a_drafter_ends_its_trees_a_level_gives_nothing(adapts: bool) -> None:
    """No tokens are expected of it, though nobody has seen that it is refused."""
    chain, (request,) = CHAINS[6], make_requests(1)
    step = StepResult([0], [], [301], {}, {})
    policy = new_policy(chain, adapts_verification=adapts)
    learned = policy._acceptance
    before = learned.tokens(chain, request.request_id, 7), learned.rates(chain)
    for _ in range(40):
        # the policy itself leaves everything out
        policy.observe(StepGroup(chain, [request], live=(1,)), step)
    assert (learned.tokens(chain, request.request_id, 7), learned.rates(chain)) == before
    for _ in range(40):
        policy.observe(StepGroup(chain, [request]).ended([1]), step)
    assert 1.0 < learned.tokens(chain, request.request_id, 7) < 1.2
    assert learned.rates(chain) == before[1]
    policy = new_policy(chain, adapts_verification=adapts)
    for _ in range(300):
        policy.observe(StepGroup(chain, [request]).ended([3]), step._replace(num_accepted=[2]))
    first, second, third, *_ = policy._acceptance.rates(chain)
    assert min(first, second, third) > 0.9
    found = policy._acceptance.tokens_by_depth(chain, "another", 7)
    assert found[2] > 2.8
    assert found[6] - found[2] < 0.1


def test_trees_that_their_drafter_ends_cost_what_is_verified() -> None:
    """Seconds of whole trees would have goodput draft less than pays."""
    policy = new_policy(CHAINS[6], adapts_verification=False, table=SLOW)
    requests = make_requests(2)
    loads = [GroupLoad(), GroupLoad(2, 600.0)]
    drafting_s = 6 * 0.01
    whole_s = SLOW.target([PassPart(2, 14, 600)]) + drafting_s
    assert StepCost(policy._seconds, policy._plans, {})(loads) == pytest.approx(whole_s)
    # three nodes of a request in the mean, and passes half as long again as the table says
    step = StepResult([1, 1], [], [302, 302], {}, {"draft": drafting_s})
    for _ in range(300):
        for live in ((2, 3), (3, 4)):
            group = StepGroup(CHAINS[6], requests).ended(live)
            policy.observe(group, step)
            pass_s = 1.5 * SLOW.target([PassPart(2, sum(live), 600)])
            policy.observe_batch(Batch([], [group]), RunResult(steps=[step], pass_s=pass_s))
    part_s = 1.5 * SLOW.target([PassPart(2, 6, 600)]) + drafting_s
    found = StepCost(policy._seconds, policy._plans, {})(loads)
    assert found == pytest.approx(part_s, rel=0.02)
    # so are those by which it is decided whether drafts read prompts
    shapes = [StepShape(CHAINS[6], 2, 600.0)]
    assert policy._seconds.iteration(shapes) == pytest.approx(found)
    # what goodput cuts itself is no property of a plan
    adapting = new_policy(CHAINS[6], table=SLOW)
    adapting.observe(StepGroup(CHAINS[6], requests, live=(2, 2)), step)
    assert adapting._seconds.nodes_of(CHAINS[6]) == 7


def test_levels_cost_as_many_nodes_as_drafters_leave() -> None:
    """A drafter that ends most trees at once, and is right where it goes on: then levels pay."""
    policy, chain = new_policy(CHAINS[6], table=SLOW), CHAINS[6]
    others = make_requests(8)
    shown = StepResult([0, 0, 0, 6] * 2, [], [301, 301, 301, 307] * 2, {}, {})
    for _ in range(100):
        policy.observe(StepGroup(chain, others).ended([1, 1, 1, 7] * 2), shown)
    requests = [*make_requests(4), *make_requests(4, max_tokens=2)]
    for number, request in enumerate(requests):
        request.request_id = f"unknown {number}"
    names = policy.choose_each(requests, STATS)
    assert names == [chain.name] * 8
    # those that end soon have no use for more
    assert policy.live_nodes(chain, requests) == (7, 7, 7, 7, 2, 2, 2, 2)
    nodes = policy._ends.nodes(chain)
    assert nodes[-1] == pytest.approx(1 + 6 * 0.25, rel=0.1)
    pass_s = SLOW.target([PassPart(8, 4 * (nodes[6] + nodes[1]), 2400)])
    assert policy.decision.seconds == pytest.approx(pass_s + 6 * 0.01)


def test_a_budget_bounds_what_drafters_may_be_sure_of() -> None:
    """Not what is expected of them: a step never has more nodes."""
    policy = new_policy(CHAINS[6], acceptance={"draft_0": [[0.95]]}, token_budget=20)
    requests = make_requests(8)
    for _ in range(50):
        group = StepGroup(CHAINS[6], requests).ended([2] * 8)
        policy.observe(group, StepResult([1] * 8, [], [302] * 8, {}, {}))
    names = policy.choose_each(requests, STATS)
    drafting = [s for s, name in zip(requests, names, strict=True) if name != OFF.name]
    assert drafting
    live = policy.live_nodes(CHAINS[6], drafting) or (7,) * len(drafting)
    assert sum(live) + len(requests) - len(drafting) <= 20


def test_a_budget_bounds_what_is_verified() -> None:
    policy = new_policy(CHAINS[6], acceptance={"draft_0": [[0.95]]}, token_budget=20)
    requests = make_requests(8)
    names = policy.choose_each(requests, STATS)
    drafting = [s for s, name in zip(requests, names, strict=True) if name != OFF.name]
    assert len(drafting) > 20 // CHAINS[6].num_nodes
    live = policy.live_nodes(CHAINS[6], drafting)
    assert sum(live) + len(requests) - len(drafting) <= 20
