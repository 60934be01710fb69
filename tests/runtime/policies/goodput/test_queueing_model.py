"""What comes, estimated from requests; whether drafts are kept in step; seconds among prompts."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from specc.cost.contexts import Contexts
from specc.cost.latency_table import LatencyTable, PassPart, PassSeconds, StepShape
from specc.cost.roofline import roofline
from specc.runtime.backends.step_io import StepResult
from specc.runtime.policies.goodput.arrival_statistics import ArrivalStatistics
from specc.runtime.policies.goodput.predicted_seconds import PredictedSeconds
from specc.runtime.policies.goodput.queueing_model import QueueingModel
from specc.runtime.scheduling.batch import Batch, RunResult, Span, StepGroup
from specc.runtime.scheduling.request import Request
from specc.sampling.params import SamplingParams
from specc.speculation.plans import OFF, SpecPlan

CHAIN = SpecPlan.from_widths((1, 1))
PLANS = [OFF, CHAIN]
TOKEN_S = 0.01


def make_request(
    name: object, arrival_s: float = 0.0, prompt: int = 100, output: int = 50
) -> Request:
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, seed=0)
    tokens = [0] * prompt
    made = Request(str(name), tokens, params, max_seq_len=65536, clock=lambda: arrival_s)
    made.cache_len = prompt
    return made


def prompts_of(*requests: Request, num_unfinished: int = 1) -> Batch:
    spans = [Span(s, 0, s.num_prompt_tokens) for s in requests]
    return Batch(spans, num_unfinished=num_unfinished)


def step_of(requests: list[Request], num_unfinished: int = 1) -> tuple[Batch, RunResult]:
    """One plain step of `TOKEN_S` seconds, after its commit."""
    for request in requests:
        request.append([0])
    count = len(requests)
    lengths = [request.cache_len for request in requests]
    step = StepResult([0] * count, [[0]] * count, lengths, {}, {"verify": TOKEN_S})
    return Batch([], [StepGroup(OFF, requests)], num_unfinished), RunResult(steps=[step])


def demand_of(arrivals: list[float], idle_steps: int = 0) -> ArrivalStatistics:
    demand = ArrivalStatistics(256)
    for i, arrival_s in enumerate(arrivals):
        demand.observe(prompts_of(make_request(i, arrival_s)), RunResult())
    runs = [make_request("runs", output=100_000)]
    for _ in range(idle_steps):
        demand.observe(*step_of(runs))
    return demand


def poisson(count: int, rate: float, burst: int = 1) -> list[float]:
    chooser, now_s, times = random.Random(1), 0.0, []
    for i in range(count):
        if i % burst == 0:
            now_s += chooser.expovariate(rate / burst)
        times.append(now_s)
    return times


def test_rate_and_prompts_are_those_of_requests():
    found = demand_of(poisson(600, 20.0)).now(TOKEN_S)
    assert found.rate == pytest.approx(20, rel=0.15)
    assert found.prompt == 100


def test_those_that_come_at_once_are_no_endless_rate():
    # 128 tokens of 10 ms: the time of one request
    found = demand_of([3.0] * 32).now(TOKEN_S)
    assert 20 < found.rate < 40


def test_bursts_count_for_more_than_their_mean_rate():
    shares = []
    for burst in (1, 32):
        times = poisson(512, 20.0, burst)
        seen = 511 / (times[-1] - times[0])
        shares.append(demand_of(times).now(TOKEN_S).rate / seen)
    assert 1.005 < shares[0] < 1.02
    assert 1.05 < shares[1] < 1.15


def test_a_silence_says_something_when_it_is_the_longest():
    times = poisson(512, 20.0, 32)
    usual = demand_of(times).now(TOKEN_S).rate
    longest_s = max(b - a for a, b in itertools.pairwise(times))
    short = demand_of(times, round(longest_s / TOKEN_S)).now(TOKEN_S).rate
    long = demand_of(times, round(6 * longest_s / TOKEN_S)).now(TOKEN_S).rate
    # time that passes counts in any case
    assert short > usual * times[-1] / (times[-1] + longest_s) * 0.95
    assert long < 0.4 * usual


def test_outputs_are_estimated_while_the_batch_grows_and_when_it_is_steady():
    chooser = random.Random(2)
    demand, running, true = ArrivalStatistics(1000), [], 200.0
    found = []
    for i in range(900):
        if i % 2 == 0:
            running.append(make_request(i, output=max(2, round(chooser.gauss(true, 40)))))
        demand.observe(*step_of(running))
        running = [request for request in running if not request.is_finished]
        found.append(demand.now(TOKEN_S).output)
    # the first ones end at about the 120th step; their tokens alone are no estimate, nor are all
    # tokens over so few
    assert all(0.5 * true < output < 1.4 * true for output in found[100:400])
    assert found[-1] == pytest.approx(true, rel=0.1)


def test_outputs_of_a_steady_batch_are_not_those_of_its_longest():
    """Of 200 that run, more are longer than the mean than have ended lately."""
    chooser = random.Random(3)
    demand, running, found = ArrivalStatistics(1000), [], []
    for i in range(1500):
        running.append(make_request(i, output=max(2, round(chooser.lognormvariate(5.1, 0.6)))))
        demand.observe(*step_of(running))
        running = [request for request in running if not request.is_finished]
        found.append(demand.now(TOKEN_S).output)
    mean = math.exp(5.1 + 0.6**2 / 2)
    assert sum(found[-500:]) / 500 == pytest.approx(mean, rel=0.08)


def load_of(demand: ArrivalStatistics, most: int = 256) -> QueueingModel:
    load = QueueingModel(PredictedSeconds(roofline(), shares_pass=True), most)
    load._demand = demand
    return load


def test_drafts_are_kept_in_step_until_a_queue_is_there():
    """The rate is that of an idle machine; but 250 requests are there."""
    demand = demand_of(poisson(100, 2.0))
    load = load_of(demand)
    tokens = [[1.0] * 8, [1.8] * 8]
    assert load.drafting(PLANS, tokens, Contexts([500.0]), 1.0) == 1
    assert not load.has_changed
    demand.observe(prompts_of(make_request("late", 60.0), num_unfinished=250), RunResult())
    assert load.has_changed
    assert load.drafting(PLANS, tokens, Contexts([500.0]), 1.0) == 0
    assert not load.has_changed
    # so many as chance explains are no queue
    demand.observe(prompts_of(make_request("later", 60.0), num_unfinished=3), RunResult())
    assert load.drafting(PLANS, tokens, Contexts([500.0]), 1.0) == 1


def test_the_rate_of_a_queue_is_what_would_keep_it():
    demand = demand_of(poisson(100, 2.0))
    demand.observe(prompts_of(make_request("late", 60.0), num_unfinished=121), RunResult())
    load = load_of(demand)
    off = [(OFF, 1.0, 1.0)]
    raised = load._raised(load._now(), [off], Contexts([500.0]))
    assert raised.rate > 5 * load._now().rate
    assert load.size(raised, off, Contexts([500.0])) == pytest.approx(
        121 - math.sqrt(121), rel=0.05
    )


def test_a_table_without_seconds_ends_the_search():
    """No rate of requests is what the queue stands for."""
    none = PassSeconds({1: 0.0}, {1: 0.0}, "target")
    load = QueueingModel(PredictedSeconds(LatencyTable(none, {"draft_0": none}), True), 256)
    load._demand = demand_of([3.0] * 32)
    load._demand.observe(prompts_of(make_request("late", 3.0), num_unfinished=250), RunResult())
    assert load.drafting(PLANS, [[1.0] * 8, [1.8] * 8], Contexts([500.0]), 1.0) == 0


def test_a_queue_tells_the_rate_of_the_way_that_serves_most():
    """A few requests run: with a good draft more could come than without."""
    demand = demand_of(poisson(100, 2.0))
    demand.observe(prompts_of(make_request("late", 60.0), num_unfinished=40), RunResult())
    load = load_of(demand)
    off, chain = [(OFF, 1.0, 1.0)], [(CHAIN, 1.0, 1.9)]
    context = Contexts([500.0])
    rates = [
        load._raised(load._now(), ways, context).rate for ways in ([off], [chain], [off, chain])
    ]
    assert rates[0] < rates[1] == rates[2]


def test_reading_long_prompts_takes_longer_a_token():
    table = roofline()
    seconds = PredictedSeconds(table, shares_pass=True)
    for context in (0.0, 8192.0):
        part = [PassPart(1, 512, context)]
        own = table.drafts["draft_0"](part) / 512
        assert seconds.draft_token_s(CHAIN, context) == pytest.approx(own)
    assert seconds.draft_token_s(CHAIN, 8192.0) > 1.3 * seconds.draft_token_s(CHAIN, 0.0)
    assert seconds.target_token_s(8192.0) > 1.2 * seconds.target_token_s(0.0)


def test_longer_iterations_meet_prompts_more_often():
    """Prompts in half of the iterations of 1 s: in three of four that take 2 s."""
    table = LatencyTable(PassSeconds({1: 1.0, 2: 2.0, 50: 10.0, 52: 13.0}, {1: 0.0}, "target"))
    seconds = PredictedSeconds(table, shares_pass=True)
    request, other = make_request("a", output=10_000), make_request("b", prompt=50)
    for i in range(4000):
        batch, result = step_of([request])
        spans = [Span(other, 0, 50)] if i % 2 else []
        seconds.observe_prompts(Batch(spans, batch.groups), result, is_due=True)
    prompts_2s = 0.75
    alone, added = 2.0, 13.0 - 10.0
    found = seconds.iteration([StepShape(OFF, 2, 0.0)])
    assert found == pytest.approx((1 - prompts_2s) * alone + prompts_2s * added, rel=0.02)
