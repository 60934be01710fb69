"""The goodput policy: expectations by dice, decisions."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping

import pytest

from specc.cost.latency_table import LatencyTable, PassSeconds, StepShape
from specc.cost.roofline import roofline
from specc.runtime.backends.step_io import StepResult
from specc.runtime.policies.goodput.policy import GoodputPolicy
from specc.runtime.scheduling.batch import Batch, RunResult, Span, StepGroup
from specc.runtime.scheduling.request import Request
from specc.sampling.params import SamplingParams
from specc.speculation.metrics import SpecStats
from specc.speculation.plans import OFF, DynamicTree, SpecPlan

CHAINS = {length: SpecPlan.from_widths((1,) * length) for length in (1, 2, 4, 8)}
TREE = SpecPlan.from_widths((3, 1))
PLANS = {plan.name: plan for plan in (OFF, *CHAINS.values(), TREE)}
STATS = SpecStats()


def new_policy(plans: Mapping[str, SpecPlan], *args: object, **options: object) -> GoodputPolicy:
    """How long a decision holds must not depend on the machine: deciding takes no time."""
    return GoodputPolicy(plans, *args, clock=lambda: 0.0, **options)  # type: ignore[arg-type]


class Engine:
    """Runs what a policy chooses: seconds of a table, acceptance by dice."""

    def __init__(self, policy: GoodputPolicy, table: LatencyTable, seed: int = 1) -> None:
        self.policy, self.table = policy, table
        self.random = random.Random(seed)
        self.seconds, self.probe_s = 0.0, 0.0
        # a trial takes so many times as long as by the table
        self.slow_trials = 1.0
        self.counts_deciding = False
        self.lost_s = 0.0
        self.plans: list[list[str]] = []

    def step(self, requests: list[Request], rates: list[float]) -> list[str]:
        self.policy.choose(len(requests), STATS)
        names = self.policy.choose_each(requests, STATS)
        groups, steps = [], []
        for name in dict.fromkeys(names):
            mine = [i for i, own in enumerate(names) if own == name]
            plan = PLANS[name]
            context = sum(requests[i].cache_len for i in mine)
            shape = StepShape(plan, len(mine), context)
            accepted = [self.accepted(plan.max_depth, rates[i]) for i in mine]
            stage_s = {"draft": self.table.draft_s(shape), "verify": self.table.target_s([shape])}
            for i, count in zip(mine, accepted, strict=True):
                requests[i].cache_len += count + 1
                if plan.speculates:
                    requests[i].draft_lens[0] = requests[i].cache_len
            after = [requests[i].cache_len for i in mine]
            groups.append(StepGroup(plan, [requests[i] for i in mine]))
            steps.append(StepResult(accepted, [], after, {}, stage_s))
        shapes = [
            StepShape(g.plan, len(g.requests), sum(s.cache_len for s in g.requests)) for g in groups
        ]
        pass_s = self.table.target_s(shapes)
        is_probe = self.policy.decision.is_probe
        seconds = self.table.iteration(shapes) * (self.slow_trials if is_probe else 1.0)
        decided_s = self.policy._decided_s if self.counts_deciding else 0.0
        result = RunResult(steps=steps, pass_s=pass_s, wall_s=seconds + decided_s)
        if is_probe:
            self.probe_s += seconds
            settled = self.policy._settled
            # seconds in which what was decided would have given as many tokens
            self.lost_s += seconds - self.policy.decision.tokens / settled.goodput
        for group, step in zip(groups, steps, strict=True):
            self.policy.observe(group, step)
        self.policy.observe_batch(Batch([], groups), result)
        self.seconds += seconds
        self.plans.append(names)
        return names

    def accepted(self, depth: int, rate: float) -> int:
        count = 0
        while count < depth and self.random.random() < rate:
            count += 1
        return count


def make_requests(count: int, **params: object) -> list[Request]:
    made = []
    for i in range(count):
        options = SamplingParams(max_tokens=100_000, **{"temperature": 0, **params})  # type: ignore[arg-type]
        name = f"{len(params)}-{i}-{params.get('rule')}"
        request = Request(name, [0] * 8, options, max_seq_len=200_000, num_drafts=1)
        request.cache_len, request.draft_lens = 300, [300]
        made.append(request)
    return made


def test_chooses_for_each_request_and_may_do_so_late():
    policy = new_policy(PLANS, roofline())
    assert policy.chooses_late
    assert policy.choose_each([], STATS) == []


@pytest.mark.parametrize("count", [1, 256])
def test_follows_the_load(count):
    """A good draft: long chains for one request, none for as many as a pass has room for."""
    table = roofline()
    engine = Engine(new_policy(PLANS, table), table)
    for _ in range(150 if count == 1 else 24):
        engine.step(requests_of(engine, count), [0.8] * count)
    last = [name for names in engine.plans[-12:] for name in names]
    if count == 1:
        assert sum(PLANS[name].max_depth >= 2 for name in last) >= 9
    else:
        assert set(last) <= {"off", "chain-1", "chain-2"}
        assert last.count("off") > 0.5 * len(last)


def requests_of(engine: Engine, count: int) -> list[Request]:
    if not hasattr(engine, "sequences"):
        engine.requests = make_requests(count)  # type: ignore[attr-defined]
    return engine.requests  # type: ignore[attr-defined]


def test_a_useless_draft_is_given_up_and_costs_no_more_than_its_probes():
    table = roofline()
    engine = Engine(new_policy(PLANS, table), table)
    requests = make_requests(8)
    for _ in range(600):
        engine.step(requests, [0.02] * 8)
    later = engine.plans[100:]
    off = sum(names.count("off") for names in later) / (8 * len(later))
    assert off > 0.95
    # plain decoding of the same tokens
    tokens = sum(request.cache_len - 300 for request in requests)
    plain_s = tokens / 8 * table.iteration([StepShape(OFF, 8, 8 * 600.0)])
    assert engine.seconds < 1.03 * plain_s
    assert engine.policy.decision.plans


def test_comes_back_when_a_draft_gets_better():
    table = roofline()
    engine = Engine(new_policy(PLANS, table), table)
    requests = make_requests(4)
    for _ in range(200):
        engine.step(requests, [0.02] * 4)
    assert engine.plans[-5].count("off") >= 3
    for _ in range(600):
        engine.step(requests, [0.85] * 4)
    last = [name for names in engine.plans[-20:] for name in names]
    assert last.count("off") < 0.1 * len(last)


def test_good_requests_speculate_beside_useless_ones():
    table = roofline()
    engine = Engine(new_policy(PLANS, table), table)
    requests = make_requests(64)
    rates = [0.9] * 32 + [0.02] * 32
    for _ in range(80):
        engine.step(requests, rates)
    tail = engine.plans[-20:]
    depth = [sum(PLANS[names[i]].max_depth for names in tail) / 20 for i in range(64)]
    assert sum(depth[:32]) / 32 > 1.5
    assert sum(depth[32:]) / 32 < 0.5


def test_plain_requests_are_load_and_no_more():
    table = roofline()
    engine = Engine(new_policy(PLANS, table), table)
    requests = make_requests(1) + make_requests(3, speculative=False)
    for _ in range(40):
        names = engine.step(requests, [0.9] * 4)
        assert names[1:] == ["off"] * 3
    assert any(names[0] != "off" for names in engine.plans)


def test_a_rule_that_a_plan_is_not_lossless_for_keeps_the_request_off_it():
    dynamic = SpecPlan.from_dynamic(DynamicTree(6, 2, 3))
    policy = new_policy({plan.name: plan for plan in (OFF, dynamic)}, roofline())
    requests = make_requests(1, temperature=1.0, rule="mss") + make_requests(1, temperature=1.0)
    names = policy.choose_each(requests, STATS)
    assert names == ["off", dynamic.name]


def test_keeps_its_decision_for_some_steps_and_for_small_changes():
    table = roofline()
    policy = new_policy(PLANS, table)
    engine = Engine(policy, table)
    requests = make_requests(64)
    assert policy.needs_results
    engine.step(requests, [0.8] * 64)
    assert not policy.needs_results
    decision = policy.decision
    engine.step(requests[1:], [0.8] * 63)
    assert policy.decision is decision
    engine.step(requests[:32], [0.8] * 32)
    assert policy.decision is not decision
    assert sum(policy.decision.plans.values()) == 32


def test_a_decision_says_what_was_expected():
    table = roofline()
    policy = new_policy(PLANS, table, {"draft_0": [[0.8]]})
    policy.choose_each(make_requests(2), STATS)
    decision = policy.decision
    (name,) = decision.plans
    assert decision.acceptance == pytest.approx(0.8)
    assert decision.tokens == pytest.approx(
        2 * sum(0.8**d for d in range(PLANS[name].max_depth + 1))
    )
    shape = StepShape(PLANS[name], 2, 600.0)
    assert decision.seconds == pytest.approx(table.iteration([shape]))
    assert decision.goodput == pytest.approx(decision.tokens / decision.seconds)
    assert not decision.is_probe


def test_a_budget_bounds_the_nodes_of_a_step():
    table = roofline()
    policy = new_policy(PLANS, table, {"draft_0": [[0.9]]}, token_budget=20)
    names = policy.choose_each(make_requests(8), STATS)
    assert sum(PLANS[name].num_nodes for name in names) <= 20
    assert set(names) != {"off"}


def test_groups_with_passes_of_their_own_run_one_plan():
    table = roofline()
    policy = new_policy(PLANS, table, shares_pass=False)
    engine = Engine(policy, table)
    requests = make_requests(16)
    for _ in range(30):
        engine.step(requests, [0.9] * 8 + [0.05] * 8)
    assert all(len(set(names)) == 1 for names in engine.plans)


def test_what_a_draft_has_missed_counts_against_it():
    """Two alike requests, but one draft would have to read 100,000 tokens first."""
    table = roofline()
    policy = new_policy(PLANS, table, {"draft_0": [[0.8]]})
    requests = make_requests(2)
    requests[1].cache_len, requests[1].draft_lens = 100_000, [0]
    policy.choose(0, STATS)
    names = policy.choose_each(requests, STATS)
    assert names[0] != "off"
    assert names[1] == "off"


def test_a_division_that_promises_next_to_nothing_more_is_not_taken():
    """Chains of 1 and 2 are worth the same to a thousandth where a level costs a fifth."""
    target = PassSeconds({1: 1.0, 1000: 1.0}, {1: 0.0}, "target")
    draft = PassSeconds({1: 0.1995, 1000: 0.1995}, {1: 0.0}, "draft_0")
    plans = {plan.name: plan for plan in (OFF, CHAINS[1], CHAINS[2])}
    for in_use, chosen in ((None, CHAINS[2]), (1, CHAINS[1]), (0, CHAINS[2])):
        policy = new_policy(plans, LatencyTable(target, {"draft_0": draft}), {"draft_0": [[0.5]]})
        requests = make_requests(2)
        if in_use is not None:
            policy._chosen = dict.fromkeys((s.request_id for s in requests), in_use)
        assert policy.choose_each(requests, STATS) == [chosen.name] * 2


def test_a_queue_is_seen_before_the_next_turn_of_looking():
    policy = new_policy(PLANS, roofline(), {"draft_0": [[0.8]]})
    engine = Engine(policy, roofline())
    requests = make_requests(4)
    engine.step(requests, [0.8] * 4)
    assert policy.choose(4, STATS) != "off"
    for i in range(3):
        late = Request(
            str(i), [0] * 500, SamplingParams(temperature=0), max_seq_len=600, clock=lambda i=i: i
        )
        batch = Batch([Span(late, 0, 500)], num_unfinished=250)
        policy.observe_batch(batch, RunResult())
    policy.choose_each(requests[:3], STATS)
    assert policy.choose(3, STATS) == "off"


def test_a_new_request_does_not_inherit_the_end_of_the_last_one():
    """One token is left: off is best. Whoever comes next has many."""
    policy = new_policy(PLANS, roofline(), {"draft_0": [[0.8]]})
    first = Request(
        "first", [0] * 8, SamplingParams(temperature=0, max_tokens=1), max_seq_len=99, num_drafts=1
    )
    first.cache_len, first.draft_lens = 8, [8]
    assert policy.choose_each([first], STATS) == ["off"]
    assert policy.choose_each(make_requests(1), STATS) != ["off"]


def test_a_draft_that_lags_stays_off_where_drafts_read_no_prompts():
    """It would catch up for one request, while prompts show that this does not pay."""
    policy = new_policy(PLANS, roofline(), {"draft_0": [[0.8]]})
    requests = make_requests(2)
    requests[1].draft_lens = [200]
    policy._next_load, policy._prepared = 1000, 0
    assert [name == "off" for name in policy.choose_each(requests, STATS)] == [False, True]
    policy = new_policy(PLANS, roofline(), {"draft_0": [[0.8]]})
    policy._next_load, policy._prepared = 1000, 1
    assert "off" not in policy.choose_each(requests, STATS)


@pytest.mark.parametrize("wrong", [0.25, 4.0])
def test_learns_seconds_that_the_table_has_wrong(wrong):
    truth = roofline()
    policy = new_policy(PLANS, truth.scaled(drafts=wrong), {"draft_0": [[0.8]]})
    engine = Engine(policy, truth)
    requests = make_requests(4)
    for _ in range(200):
        engine.step(requests, [0.8] * 4)
    name = max(policy.decision.plans, key=lambda name: PLANS[name].max_depth)
    shape = StepShape(PLANS[name], 4, sum(s.cache_len for s in requests))
    found = policy._seconds.iteration([shape])
    assert found == pytest.approx(truth.iteration([shape]), rel=0.1)


def test_finished_and_aborted_requests_are_forgotten():
    table = roofline()
    policy = new_policy(PLANS, table)
    engine = Engine(policy, table)
    for number in range(300):
        requests = make_requests(2)
        for request in requests:
            request.request_id += f"-{number}"
        engine.step(requests, [0.8] * 2)
    assert len(policy._acceptance) < 300


def test_a_neutral_table_needs_no_profile():
    plans = {plan.name: plan for plan in (OFF, CHAINS[2])}
    policy = new_policy(plans)
    assert set(policy.choose_each(make_requests(2), STATS)) <= set(plans)
    only = new_policy({"off": OFF}, LatencyTable(PassSeconds({1: 1.0}, {1: 0.0}, "target")))
    assert only.choose_each(make_requests(2), STATS) == ["off", "off"]
    assert only.choose(0, STATS) == "off"
    only.observe_batch(Batch(), RunResult())


VIEW = "self_w512_s4"
VIEWS = {
    plan.name: plan for plan in (OFF, *(SpecPlan.from_widths((1,) * n, (VIEW,)) for n in (2, 4)))
}
# rows are most of what a pass waits for, and further nodes read them again in part
WAITS = LatencyTable(PassSeconds({1: 1e-2, 64: 2e-2}, {1: 1e-6, 5: 1.2e-6}, "target"))


def of_contexts(*lengths: int) -> list[Request]:
    requests = make_requests(len(lengths))
    for i, (request, length) in enumerate(zip(requests, lengths, strict=True)):
        request.request_id, request.cache_len = str(i), length
    return requests


@pytest.mark.parametrize("shares_pass", [True, False])
def test_every_request_counts_with_its_own_context(shares_pass):
    """What was decided is what whole iterations of these requests take, not of their mean."""
    policy = new_policy(VIEWS, WAITS, {VIEW: [[0.9]]}, shares_pass=shares_pass)
    lengths = [64, 1024, 300, 32_768]
    names = policy.choose_each(of_contexts(*lengths), STATS)
    assert set(names) != {"off"}
    shapes = [
        StepShape.of(VIEWS[name], [n for n, own in zip(lengths, names, strict=True) if own == name])
        for name in dict.fromkeys(names)
    ]
    assert policy.decision.seconds == pytest.approx(WAITS.iteration(shapes, shares_pass))
    alike = [shape._replace(each=None) for shape in shapes]
    assert policy.decision.seconds < 0.999 * WAITS.iteration(alike, shares_pass)


def test_short_and_long_requests_of_a_batch_run_the_best_plan_for_each():
    """Rows cost more the more nodes attend to them: the long ones draft less."""
    rows = {1: 1e-6, 3: 1.5e-6, 5: 3e-6}
    table = LatencyTable(PassSeconds({1: 1e-2, 64: 2e-2}, rows, "target"))
    short, long = [1024] * 4, [32_768] * 4

    def goodput(plans: tuple[str, str]) -> float:
        tokens = sum(4 * sum(0.9**d for d in range(VIEWS[name].max_depth + 1)) for name in plans)
        kinds = {plans[0]: list(short)}
        kinds.setdefault(plans[1], []).extend(long)
        shapes = [StepShape.of(VIEWS[name], lengths) for name, lengths in kinds.items()]
        return tokens / table.iteration(shapes)

    best = max(itertools.product(VIEWS, VIEWS), key=goodput)
    assert best[0] != best[1]
    policy = new_policy(VIEWS, table, {VIEW: [[0.9]]})
    names = policy.choose_each(of_contexts(*short, *long), STATS)
    assert names == [best[0]] * 4 + [best[1]] * 4
    assert policy.decision.goodput == pytest.approx(goodput(best))
    # with the mean of both, nobody would differ
    mean = of_contexts(*[(1024 + 32_768) // 2] * 8)
    alike = new_policy(VIEWS, table, {VIEW: [[0.9]]}).choose_each(mean, STATS)
    assert len(set(alike)) == 1


def test_seconds_of_a_trial_count_every_context():
    policy = new_policy(VIEWS, WAITS, {VIEW: [[0.01]]})
    requests = of_contexts(1024, 32_768, 32_768)
    policy._probes._saved_s = 100.0
    names = policy.choose_each(requests, STATS)
    assert policy.decision.is_probe
    lengths = [request.cache_len for request in requests]
    shapes = [
        StepShape.of(VIEWS[name], [n for n, own in zip(lengths, names, strict=True) if own == name])
        for name in dict.fromkeys(names)
    ]
    assert policy.decision.seconds == pytest.approx(WAITS.iteration(shapes))
