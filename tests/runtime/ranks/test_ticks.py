"""Time between two rounds of a loop: what is late, and what was a stop of the process itself."""

from __future__ import annotations

import time

import pytest

from specc.runtime.ranks.ticks import Ticks


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "monotonic", made)
    return made


def test_rounds_of_usual_length_are_not_late(clock: Clock) -> None:
    ticks = Ticks(30.0)
    for took_s in (0.5, 0.0, 1.4):
        clock.now_s += took_s
        assert ticks.pass_by() == 0


def test_a_stop_is_as_long_as_it_was(clock: Clock) -> None:
    ticks = Ticks(30.0)
    clock.now_s += 90.0
    assert ticks.pass_by() == 90.0
    clock.now_s += 0.5
    assert ticks.pass_by() == 0


def test_what_was_before_the_loop_does_not_count(clock: Clock) -> None:
    ticks = Ticks(30.0)
    clock.now_s += 90.0
    ticks.begin()
    assert ticks.pass_by() == 0


@pytest.mark.parametrize(("limit_s", "wanted_s"), [(30.0, 0.5), (2.0, 0.2)])
def test_several_beats_fit_into_a_limit(clock: Clock, limit_s: float, wanted_s: float) -> None:
    ticks = Ticks(limit_s)
    assert ticks.seconds == wanted_s
    beats = 0
    for _ in range(100):
        clock.now_s += limit_s / 100
        beats += ticks.is_time_for_beat()
    assert beats == pytest.approx(limit_s / wanted_s, abs=limit_s / wanted_s / 4)
