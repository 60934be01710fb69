"""The adaptive policy: it learns from iterations of one step, and keeps batch sizes apart."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Sequence

import pytest

from specc.errors import ConfigError
from specc.runtime.backends.step_io import StepResult
from specc.runtime.policies.adaptive import AdaptivePolicy
from specc.runtime.policies.adaptive_length import AdaptiveConstants
from specc.runtime.scheduling.batch import Batch, RunResult, Span, StepGroup
from specc.runtime.scheduling.request import Request
from specc.sampling.params import SamplingParams
from specc.speculation.metrics import SpecStats
from specc.speculation.plans import SpecPlan
from tests.runtime.policies.simulated_load import Load

PLANS = {"off": 0, "chain-1": 1, "chain-2": 2, "chain-4": 4, "chain-8": 8}
STATS = SpecStats()


def round_of(accepted: Sequence[int], length: int = 2, **stages: float) -> tuple[Batch, RunResult]:
    """An iteration of one step, of a chain, and a prompt beside it."""
    plan = SpecPlan.from_widths((1,) * length)
    requests = [
        Request(str(i), [0], SamplingParams(temperature=0), max_seq_len=9)
        for i in range(len(accepted))
    ]
    step = StepResult(list(accepted), [], [], {}, stages or {"step": 1.0})
    spans = [Span(requests[0], 0, 1)]
    return Batch(spans, [StepGroup(plan, requests)]), RunResult([None], 9.0, [step])


class Engine:
    """Runs steps as an engine does; `delay` of them are in flight when the next one is chosen."""

    def __init__(self, policy: AdaptivePolicy, load: Load, seed: int = 1, delay: int = 0) -> None:
        self.policy = policy
        self.load = load
        self.chosen: list[str] = []
        self._random = random.Random(seed)
        self._flying: deque[tuple[Batch, RunResult]] = deque()
        self._delay = delay

    def step(self, batch: int) -> str:
        plan = self.policy.choose(batch, STATS)
        self.chosen.append(plan)
        length = PLANS[plan]
        noise = max(0.5, self._random.gauss(1, 0.05))
        seconds = self.load.seconds(length) * noise
        stages = {"draft": 0.3 * seconds, "verify": 0.6 * seconds, "accept_commit": 0.1 * seconds}
        accepted = [self.load.draw(self._random, length) for _ in range(batch)]
        is_whole = self._random.random() < 0.5
        made = round_of(accepted, length, **({"step": seconds} if is_whole else stages))
        self._flying.append(made)
        if len(self._flying) > self._delay:
            self.policy.observe_batch(*self._flying.popleft())
        return plan


@pytest.mark.default("1-0.05-1", "1-0.5-3")
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("chance", [0.05, 0.5, 0.9])
@pytest.mark.parametrize("delay", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_finds_the_best_plan(batch, chance, delay):
    """Also where it chooses one step late."""
    load = Load((chance,), 0.1, 0.02, 0.05)
    engine = Engine(AdaptivePolicy(PLANS), load, delay=delay)
    for _ in range(1500):
        engine.step(batch)
    rate = sum(load.mean_tokens(PLANS[p]) for p in engine.chosen[500:])
    rate /= sum(load.seconds(PLANS[p]) for p in engine.chosen[500:])
    assert rate > 0.95 * load.rate(load.best(tuple(PLANS.values())))
    assert set(engine.chosen) <= set(PLANS)


def test_needs_results_but_chooses_late():
    assert AdaptivePolicy(PLANS).needs_results
    assert AdaptivePolicy(PLANS).chooses_late


def observed(policy: AdaptivePolicy) -> list[tuple[int, float, list[int]]]:
    """Let the policy's states record what they are told: bucket, seconds, tokens."""
    seen = []

    class Recorder:
        def __init__(self, bucket):
            self.bucket, self.current, self.home = bucket, 2, 2

        def observe(self, seconds, num_tokens):
            seen.append((self.bucket, seconds, num_tokens))

    class Buckets(dict):
        def __contains__(self, bucket):
            self.setdefault(bucket, Recorder(bucket))
            return True

        def get(self, bucket):
            assert bucket in self
            return self[bucket]

    policy._lengths = Buckets()
    policy._last = Recorder(0)
    return seen


def test_iterations_become_rounds():
    policy = AdaptivePolicy(PLANS)
    seen = observed(policy)
    assert policy.choose(3, STATS) == "chain-2"
    policy.observe_batch(*round_of((2, 0, 1), draft=0.25, verify=0.5, accept_commit=0.125))
    # seconds of the prompt are not those of the step
    assert seen == [(4, 0.875, [3, 1, 2])]
    policy.observe_batch(*round_of((2, 0), step=2.0))
    assert seen[1:] == [(2, 2.0, [3, 1])]


def test_mixed_and_foreign_rounds_teach_nothing():
    policy = AdaptivePolicy(PLANS)
    seen = observed(policy)
    policy.choose(2, STATS)
    one, other = round_of((2, 1)), round_of((0,), 0)
    # one speculates, one does not: two steps
    mixed = Batch([], one[0].groups + other[0].groups)
    policy.observe_batch(mixed, RunResult(steps=one[1].steps + other[1].steps))
    # the plan speculates, but neither request could
    policy.observe_batch(*round_of((0, 0), 0))
    # queued before the length changed
    policy.observe_batch(*round_of((0, 0), 8))
    # a plan that is not among these
    policy.observe_batch(*round_of((0, 0), 3))
    # no time passed
    policy.observe_batch(*round_of((2, 1), step=0.0))
    # prompts alone
    policy.observe_batch(Batch(one[0].prefill, []), RunResult([None], 1.0))
    assert seen == []
    policy.observe_batch(*one)
    assert seen == [(2, 1.0, [3, 2])]


def test_batch_sizes_by_powers_of_two():
    policy = AdaptivePolicy(PLANS)
    seen = observed(policy)
    for batch, bucket in {1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 8: 8, 9: 16, 64: 64}.items():
        policy.choose(batch, STATS)
        policy.observe_batch(*round_of((1,) * batch))
        assert seen[-1] == (bucket, 1.0, [2] * batch)


def test_batch_sizes_have_their_own_optimum():
    """Verification is free at batch 1 and dear at batch 16: long chains, then off."""
    policy = AdaptivePolicy(PLANS)
    alone = Engine(policy, Load((0.8,), 0.03, 0.0, 0.0))
    crowd = Engine(policy, Load((0.8,), 0.3, 1.0, 0.0), seed=2)
    for _ in range(8):
        for engine, batch in ((alone, 1), (crowd, 16)):
            for _ in range(150):
                engine.step(batch)
    assert alone.chosen[-150:].count("chain-8") > 120
    assert crowd.chosen[-150:].count("off") > 120


def test_a_new_batch_size_starts_where_the_last_one_is():
    policy = AdaptivePolicy(PLANS)
    engine = Engine(policy, Load((0.95,), 0.01, 0.0, 0.0))
    assert engine.step(1) == "chain-2"
    for _ in range(600):
        engine.step(1)
    assert policy.choose(40, STATS) == "chain-8"


def test_options_reach_the_states():
    policy = AdaptivePolicy(PLANS, AdaptiveConstants(window=4, settle=0))
    engine = Engine(policy, Load((0.9,), 0.01, 0.0, 0.0))
    for _ in range(5):
        engine.step(1)
    assert engine.chosen == ["chain-2"] * 4 + ["chain-4"]


@pytest.mark.parametrize("plans", [{}, {"chain-2": 2, "off": 0}, {"a": 1, "b": 1}], ids=str)
def test_bad_plans(plans):
    with pytest.raises(ConfigError):
        AdaptivePolicy(plans)


@pytest.mark.slow
def test_an_engine_generates_the_same(tiny_engine):
    """Lengths change between steps, outputs do not; a draft of another seed is soon off."""
    from specc import LLM, SamplingParams

    prompts = ["hello world", "ab", "the third one", "zz"]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    want = [o.outputs[0].token_ids for o in LLM(tiny_engine, "off").generate(prompts, params)]
    policy = AdaptivePolicy({"off": 0, "chain-3": 3}, AdaptiveConstants(window=4, longest_wait=8))
    chosen: list[str] = []
    choose = policy.choose

    def record(num_running: int, stats: SpecStats) -> str:
        chosen.append(choose(num_running, stats))
        return chosen[-1]

    policy.choose = record
    llm = LLM(tiny_engine, policy=policy)
    found = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
    assert found == want
    assert set(chosen) == {"off", "chain-3"}
    changes = sum(a != b for a, b in itertools.pairwise(chosen))
    assert changes >= 2
