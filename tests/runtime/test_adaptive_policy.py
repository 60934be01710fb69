"""The adaptive policy: it reads an engine's counters, and keeps batch sizes apart."""

from __future__ import annotations

import itertools
import random

import pytest

from specc.errors import ConfigError
from specc.metrics import SpecStats
from specc.runtime.adaptive_policy import AdaptivePolicy
from tests.runtime.simulated_load import Load

PLANS = {"off": 0, "chain-1": 1, "chain-2": 2, "chain-4": 4, "chain-8": 8}


class Engine:
    """Counts steps as an engine does."""

    def __init__(self, policy: AdaptivePolicy, load: Load, seed: int = 1) -> None:
        self.policy = policy
        self.load = load
        self.stats = SpecStats()
        self.chosen: list[str] = []
        self._random = random.Random(seed)

    def step(self, batch: int, is_prefill: bool = False) -> str:
        plan = self.policy.choose(batch, self.stats)
        self.chosen.append(plan)
        if is_prefill:
            self.stats.record_prefill_pass(5.0)
            self.stats.record_first_token(7.0)
        self.record(plan, batch)
        return plan

    def record(self, plan: str, batch: int) -> None:
        length = PLANS[plan]
        noise = max(0.5, self._random.gauss(1, 0.05))
        seconds = self.load.seconds(length) * noise
        stages = {"draft": 0.3 * seconds, "verify": 0.6 * seconds, "accept_commit": 0.1 * seconds}
        self.stats.record_step_pass(stages if self._random.random() < 0.5 else {"step": seconds})
        for _ in range(batch):
            accepted = self.load.draw(self._random, length)
            self.stats.record_step((1,) * length, accepted, accepted + 1)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("chance", [0.05, 0.5, 0.9])
def test_finds_the_best_plan(batch, chance):
    load = Load((chance,), 0.1, 0.02, 0.05)
    engine = Engine(AdaptivePolicy(PLANS), load)
    for number in range(1500):
        engine.step(batch, is_prefill=number % 7 == 0)
    rate = sum(load.mean_tokens(PLANS[p]) for p in engine.chosen[500:])
    rate /= sum(load.seconds(PLANS[p]) for p in engine.chosen[500:])
    assert rate > 0.95 * load.rate(load.best(tuple(PLANS.values())))
    assert set(engine.chosen) <= set(PLANS)


def test_needs_results():
    assert AdaptivePolicy(PLANS).needs_results


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

    policy._lengths = Buckets()
    policy._last = Recorder(0)
    return seen


def test_counters_become_rounds():
    policy, stats = AdaptivePolicy(PLANS), SpecStats()
    seen = observed(policy)
    assert policy.choose(3, stats) == "chain-2"
    assert seen == []
    # three sequences that accept 2, 0 and 1, beside a prefill with its first token
    stats.record_prefill_pass(9.0)
    stats.record_first_token(1.0)
    stats.record_step_pass({"draft": 0.25, "verify": 0.5, "accept_commit": 0.125})
    for accepted in (2, 0, 1):
        stats.record_step((1, 1), accepted, accepted + 1)
    policy.choose(2, stats)
    assert seen == [(4, 0.875, [3, 2, 1])]
    # a step in one graph, behind which one request ended early: emitted tokens count
    stats.record_step_pass({"step": 2.0})
    stats.record_step((1, 1), 2, 1)
    stats.record_step((1, 1), 2, 3)
    policy.choose(2, stats)
    assert seen[1:] == [(2, 2.0, [3, 1])]
    # nothing ran
    policy.choose(0, stats)
    policy.choose(2, stats)
    assert len(seen) == 2


def test_mixed_and_foreign_rounds_teach_nothing():
    policy, stats = AdaptivePolicy(PLANS), SpecStats()
    seen = observed(policy)
    policy.choose(2, stats)
    # one speculates, one does not: two passes
    stats.record_step_pass({"step": 2.0})
    stats.record_step((1, 1), 2, 3)
    stats.record_step_pass({"step": 1.0})
    stats.record_step((), 0, 1)
    policy.choose(2, stats)
    # the plan speculates, but neither sequence could
    stats.record_step_pass({"step": 1.0})
    stats.record_step((), 0, 1)
    stats.record_step((), 0, 1)
    policy.choose(2, stats)
    # no time passed
    stats.record_step_pass({})
    stats.record_step((1, 1), 2, 3)
    policy.choose(2, stats)
    # counters of another engine
    fresh = SpecStats()
    fresh.record_step_pass({"step": 1.0})
    fresh.record_step((1, 1), 2, 3)
    policy.choose(2, fresh)
    assert seen == []
    fresh.record_step_pass({"step": 1.0})
    fresh.record_step((1, 1), 2, 3)
    policy.choose(2, fresh)
    assert seen == [(2, 1.0, [3])]


def test_batch_sizes_by_powers_of_two():
    policy, stats = AdaptivePolicy(PLANS), SpecStats()
    seen = observed(policy)
    for batch, bucket in {1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 8: 8, 9: 16, 64: 64}.items():
        policy.choose(batch, stats)
        stats.record_step_pass({"step": 1.0})
        for _ in range(batch):
            stats.record_step((1, 1), 1, 2)
        policy.choose(0, stats)
        assert seen[-1] == (bucket, 1.0, [2] * batch)


def test_batch_sizes_have_their_own_optimum():
    """Verification is free at batch 1 and dear at batch 16: long chains, then off."""
    policy = AdaptivePolicy(PLANS)
    alone = Engine(policy, Load((0.8,), 0.03, 0.0, 0.0))
    crowd = Engine(policy, Load((0.8,), 0.3, 1.0, 0.0), seed=2)
    crowd.stats = alone.stats
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
    assert policy.choose(40, engine.stats) == "chain-8"


def test_options_reach_the_states():
    policy = AdaptivePolicy(PLANS, window=4, settle=0)
    engine = Engine(policy, Load((0.9,), 0.01, 0.0, 0.0))
    for _ in range(5):
        engine.step(1)
    assert engine.chosen == ["chain-2"] * 4 + ["chain-4"]


@pytest.mark.parametrize("plans", [{}, {"chain-2": 2, "off": 0}, {"a": 1, "b": 1}], ids=str)
def test_bad_plans(plans):
    with pytest.raises(ConfigError):
        AdaptivePolicy(plans)


def test_an_engine_generates_the_same(tiny_engine):
    """Lengths change between steps, outputs do not; a draft of another seed is soon off."""
    from specc import LLM, SamplingParams

    prompts = ["hello world", "ab", "the third one", "zz"]
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    want = [o.outputs[0].token_ids for o in LLM(tiny_engine, "off").generate(prompts, params)]
    policy = AdaptivePolicy({"off": 0, "chain-3": 3}, window=4, longest_wait=8)
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
