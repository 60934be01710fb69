"""Seconds that are measured while a policy is in use, and what plain decoding would do by them."""

from __future__ import annotations

import pytest

from specc.cost.latency_table import LatencyTable, PassSeconds, StepShape
from specc.runtime.scheduling.request import Request
from specc.sampling.params import SamplingParams
from specc.speculation.plans import OFF
from tests.runtime.policies.goodput.test_policy import CHAINS, STATS, new_policy

CHAIN = CHAINS[4]
PLANS = {"off": OFF, CHAIN.name: CHAIN}
# a draft that is as slow as the target
SLOW = PassSeconds({1: 1e-2, 64: 1e-2}, {1: 0.0}, "target")
TABLE = LatencyTable(SLOW, {"draft_0": SLOW})


def requests_of(count: int) -> list[Request]:
    params = SamplingParams(max_tokens=100, temperature=0.0)
    found = [Request(str(n), [0] * 8, params, max_seq_len=200, num_drafts=1) for n in range(count)]
    for request in found:
        request.cache_len = request.draft_lens[0] = 8
    return found


def test_a_decision_says_what_plain_decoding_would_do() -> None:
    requests = requests_of(3)
    alone = new_policy({"off": OFF}, TABLE)
    alone.choose_each(requests, STATS)
    assert alone.decision.plain == pytest.approx(3 / TABLE.iteration([StepShape(OFF, 3, 24)]))
    # of off it is what was decided
    assert alone.decision.plain == pytest.approx(alone.decision.goodput)
    fast = LatencyTable(SLOW, {"draft_0": SLOW.scaled(0.01)})
    drafts = new_policy(PLANS, fast, {"draft_0": [[0.9]] * 4})
    assert set(drafts.choose_each(requests, STATS)) == {CHAIN.name}
    assert drafts.decision.plain == pytest.approx(alone.decision.plain)
    assert drafts.decision.goodput > 2 * drafts.decision.plain
    assert new_policy(PLANS, TABLE).decision.plain == 0


def test_measured_seconds_take_the_place_of_a_guess() -> None:
    """By the guess a chain pays; by what was measured it does not. Acceptance stays learned."""
    policy, requests = new_policy(PLANS), requests_of(1)
    assert policy.choose_each(requests, STATS) == [CHAIN.name]
    learned = policy._acceptance
    policy.use_latency(TABLE)
    assert policy.choose_each(requests, STATS) == ["off"]
    assert policy._acceptance is learned
