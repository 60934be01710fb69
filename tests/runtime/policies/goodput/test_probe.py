"""Trials of plans that are not in use: what is tried, and what that may cost."""

from __future__ import annotations

import math

import pytest

from specc.cost.roofline import roofline
from specc.runtime.policies.goodput.constants import TUNED
from specc.runtime.policies.goodput.policy import GoodputPolicy
from specc.runtime.policies.goodput.probe import Probe
from tests.runtime.policies.goodput.test_policy import (
    PLANS,
    STATS,
    Engine,
    make_requests,
    new_policy,
)


@pytest.mark.parametrize("slow", [1.0, 3.0])
def test_trials_cost_no_more_than_their_share_however_long_they_take(slow):
    """A plan that was not in use finds caches cold: what its trial took is paid for, too."""
    table = roofline()
    engine = Engine(new_policy(PLANS, table), table)
    engine.slow_trials = slow
    requests = make_requests(4)
    for _ in range(3000):
        engine.step(requests, [0.3] * 4)
    assert engine.probe_s > 0
    # what was saved up at most comes on top of one percent, and what the beginning has
    begin = TUNED.probe_first * (1 + math.log(3000)) / 3000
    assert 0 < engine.lost_s < (0.012 + begin) * engine.seconds


def test_a_pause_in_a_trial_is_paid_off_soon():
    """As much as others can save up, not more: drafts that get better are found all the same."""
    table = roofline()
    engine = Engine(new_policy(PLANS, table), table)
    engine.slow_trials = 1e4
    requests = make_requests(4)
    while not engine.probe_s:
        engine.step(requests, [0.3] * 4)
    engine.slow_trials, before = 1.0, engine.probe_s
    for _ in range(600):
        engine.step(requests, [0.3] * 4)
    assert engine.probe_s > before


def test_a_trial_that_cannot_be_queued_ahead_is_run_all_the_same():
    """It is asked for again when results are there, and over after that."""
    table = roofline()
    policy = new_policy(PLANS, table, {"draft_0": [[0.02]]})
    policy._probes._saved_s = 100.0
    requests = make_requests(4)
    names = policy.choose_each(requests, STATS)
    assert policy.decision.is_probe
    for _ in range(2):
        policy.choose_again()
        assert policy.choose_each(requests, STATS) == names
        assert policy.decision.is_probe
    assert set(policy.choose_each(requests, STATS)) == {"off"} != set(names)
    assert not policy.decision.is_probe


def test_a_trial_gives_back_no_more_than_was_paid_for_it():
    """However much of its time it did not use: else each one would pay for the next."""
    probes = new_policy(PLANS, roofline())._probes
    probe = Probe({}, 1.0, 1.0, charged=0.01)
    for seconds, saved in ((1.0, 0.0), (0.995, 0.005), (0.5, 0.01), (1.5, -0.5), (9.0, -2.0)):
        probes._saved_s = 0.0
        probes.took(probe, seconds, 0.0)
        assert probes._saved_s == pytest.approx(saved)


def test_seconds_of_a_trial_are_without_those_of_deciding(monkeypatch):
    """What decides in between is counted by itself; seconds of the host have none of it, either."""
    now = [0.0]

    def clock():
        now[0] += 1.0
        return now[0]

    table = roofline()
    policy = GoodputPolicy(PLANS, table, clock=clock)
    engine, requests = Engine(policy, table), make_requests(4)
    engine.counts_deciding = True
    took, host = [], []
    monkeypatch.setattr(policy._probes, "took", lambda p, s, _: took.append(s - p.seconds) or 0.0)
    monkeypatch.setattr(policy._seconds.host_s, "observe", lambda _, seconds: host.append(seconds))
    for _ in range(3000):
        engine.step(requests, [0.3] * 4)
    assert len(took) > 1
    assert max(map(abs, took)) < 0.5
    assert max(host) < 0.5


def test_a_shorter_chain_than_those_in_use_is_not_tried():
    """What it would show, they show, too."""
    table = roofline()
    engine = Engine(new_policy(PLANS, table), table)
    requests = make_requests(4)
    tried = []
    for _ in range(2000):
        names = engine.step(requests, [0.6] * 4)
        used = {PLANS[name].max_depth for name in engine.policy._settled.plans if "chain" in name}
        new = {PLANS[name].max_depth for name in names if "chain" in name} - used
        if new and used:
            tried.append(min(new) > max(used))
    assert tried
    assert all(tried)


@pytest.mark.parametrize("before", [40, 400])
def test_a_text_that_begins_to_repeat_itself_is_noticed_within_dozens_of_steps(before):
    """What a trial gains pays for its next iteration, and for the next trial."""
    table = roofline()
    engine, requests = Engine(new_policy(PLANS, table), table), make_requests(1)
    for _ in range(before):
        engine.step(requests, [0.02])
    later = [engine.step(requests, [1.0]) != ["off"] for _ in range(150)]
    assert all(later[120:])
    assert sum(later) > 75


def test_where_all_draft_plain_iterations_are_timed_once_in_a_while():
    """Else a table that has plain decoding too slow is never corrected."""
    table = roofline()
    engine, requests = Engine(new_policy(PLANS, table), table), make_requests(1)
    for _ in range(600):
        engine.step(requests, [1.0])
    plain = [number for number, names in enumerate(engine.plans) if names == ["off"]]
    assert plain[-TUNED.hold :] == list(range(plain[0], plain[0] + TUNED.hold))
    assert plain[0] < 64


def test_iterations_of_a_trial_are_charged_what_they_have_yielded():
    """Tokens beyond those expected come back; one that goes on was not paid in advance."""
    probes = new_policy(PLANS, roofline())._probes
    probe = Probe({}, tokens=3.0, seconds=3.0, charged=1.0, tried=3.0, rate=1.5)
    for trial, tokens, lost, saved in (
        (probe, 3.0, 1.0, 0.0),
        (probe, 9.0, -3.0, 4.0),
        (probe._replace(charged=0.0, gained_s=3.0), 9.0, -3.0, 3.0),
        (probe._replace(charged=0.0, gained_s=3.0), 1.5, 2.0, -2.0),
    ):
        probes._saved_s = 0.0
        assert probes.took(trial, 3.0, tokens) == pytest.approx(lost)
        assert probes._saved_s == pytest.approx(saved)


def test_text_that_repeats_itself_is_reason_for_a_trial():
    """At once, if there is time for one, however long the decision before would have held."""
    table = roofline()
    engine, requests = Engine(new_policy(PLANS, table), table), make_requests(1)
    policy = engine.policy
    for _ in range(400):
        engine.step(requests, [0.0])
    # within what was decided, and with time for a trial
    while policy._left < 4 or policy.decision.is_probe:
        engine.step(requests, [0.0])
    policy._probes._saved_s = policy._probes._most_s
    assert engine.step(requests, [0.0]) == ["off"]
    requests[0].token_ids = [7] * 20
    tried = engine.step(requests, [1.0])
    assert tried != ["off"]
    assert policy.decision.is_probe
    # what has gained goes on, and nothing is decided for that
    number = policy._num_decisions
    assert engine.step(requests, [1.0]) == tried
    assert policy.decision.is_probe
    assert policy._num_decisions == number
