"""Deciding is as rare as it is slow."""

from __future__ import annotations

import itertools

import pytest

from specc.cost.roofline import roofline
from specc.runtime.policies.goodput.constants import TUNED
from specc.runtime.policies.goodput.policy import GoodputPolicy
from tests.runtime.policies.goodput.test_policy import PLANS, Engine, make_requests

ITERATIONS = 600
TABLE = roofline()


def ticking_policy(tick_s: float) -> GoodputPolicy:
    """Each look at the clock finds it later by a tick."""
    clock = itertools.count(tick_s, tick_s) if tick_s else itertools.repeat(0.0)
    return GoodputPolicy(PLANS, TABLE, {"draft_0": [[0.8]]}, clock=lambda: next(clock))


def count_calls(monkeypatch, policy: GoodputPolicy, *names: str) -> dict[str, int]:
    """How often methods of a policy are called from now on."""
    counts = dict.fromkeys(names, 0)
    for name in names:
        real = getattr(policy, name)

        def count(*args, name=name, real=real):
            counts[name] += 1
            return real(*args)

        monkeypatch.setattr(policy, name, count)
    return counts


def counted(monkeypatch, tick_s: float) -> tuple[int, int, int]:
    """Decisions, looks at the load, and in the end at seconds of steps."""
    policy = ticking_policy(tick_s)
    counts = count_calls(monkeypatch, policy, "_decide", "_prepare")
    due = []
    watch = policy._seconds.observe_prompts

    def watched(batch, result, is_due):
        due.append(is_due)
        watch(batch, result, is_due)

    monkeypatch.setattr(policy._seconds, "observe_prompts", watched)
    engine, requests = Engine(policy, TABLE), make_requests(4)
    for _ in range(ITERATIONS):
        engine.step(requests, [0.8] * 4)
    # in the beginning each of them is looked at, and then as many as there is time for
    assert all(due[: TUNED.first_looks])
    most = 1.0 if not tick_s else 1 / 8
    assert sum(due[TUNED.first_looks : TUNED.often]) <= most * TUNED.often
    return counts["_decide"], counts["_prepare"], sum(due[TUNED.often :])


def test_what_decides_at_once_decides_often(monkeypatch) -> None:
    decisions, looks, watched = counted(monkeypatch, 0.0)
    assert decisions >= ITERATIONS // 10
    assert looks >= ITERATIONS // 20
    assert watched == pytest.approx((ITERATIONS - TUNED.often) / TUNED.seldom, abs=1)


def test_what_decides_slowly_decides_rarely(monkeypatch) -> None:
    """Iterations take 7 ms. Decisions hold longer one after the other, looks at once."""
    decisions, looks, watched = counted(monkeypatch, 1.0)
    assert 8 <= decisions <= 16
    # 6 if the load were looked at again as soon as it may have changed
    assert 4 <= looks <= 5
    assert 2 <= watched <= 4


def decided(tick_s: float, changed: int, monkeypatch) -> tuple[int, int]:
    """Decisions and looks at the load in 240 iterations, after each third of which requests differ.

    Args:
        tick_s: by which each look at the clock finds it later.
        changed: requests of 8 that are replaced then.
    """
    policy = ticking_policy(tick_s)
    engine, requests = Engine(policy, TABLE), make_requests(8)
    # holds are as long as they get
    for _ in range(ITERATIONS):
        engine.step(requests, [0.8] * 8)
    counts = count_calls(monkeypatch, policy, "_decide", "_prepare")
    monkeypatch.setattr(type(policy._load), "has_changed", property(lambda load: True))
    for i in range(240):
        if i % 3 == 0:
            for place in range(changed):
                requests[place] = make_requests(8)[place]
                requests[place].request_id = f"new-{i}-{place}"
            requests = list(requests)
        engine.step(requests, [0.8] * 8)
    return counts["_decide"], counts["_prepare"]


def test_requests_that_come_and_go_have_it_decided_when_that_is_paid(monkeypatch) -> None:
    """Two of eight, every third iteration: at once where deciding takes no time."""
    assert decided(0.0, 2, monkeypatch)[0] == 80
    slow, _ = decided(1.0, 2, monkeypatch)
    # five of eight have changed after three times
    assert slow <= 80 // 3 + 1


def test_other_requests_have_it_decided_at_once(monkeypatch) -> None:
    """However slow that is: what was decided says nothing about them."""
    assert decided(1.0, 8, monkeypatch)[0] == 80


def test_a_load_that_changes_is_looked_at_when_that_is_paid(monkeypatch) -> None:
    assert decided(0.0, 8, monkeypatch)[1] == 80
    assert decided(1.0, 8, monkeypatch)[1] <= 4
