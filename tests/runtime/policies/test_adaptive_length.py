"""The adaptive length on simulated loads: it converges, follows, and stays within its bounds."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specc.errors import ConfigError
from specc.runtime.policies.adaptive_length import AdaptiveConstants, AdaptiveLength
from tests.runtime.policies.simulated_load import Load, share_of_optimum, simulate
from tests.tiers import every

LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8)
WARM_UP = 500
# rounds within which a change of the load is followed: see `follow`
FALL, RISE = 100, 700

CHANCES = st.floats(0, 0.97)
LOADS = st.builds(
    Load,
    st.one_of(
        st.tuples(CHANCES),
        # an early depth that is likely, or unlikely, and what comes after it
        st.tuples(CHANCES, CHANCES),
        st.tuples(CHANCES, CHANCES, CHANCES, CHANCES),
    ),
    st.sampled_from([0.01, 0.05, 0.1, 0.2, 0.4]),
    st.sampled_from([0.0, 0.01, 0.03, 0.1]),
    st.sampled_from([0.0, 0.05, 0.2, 0.5]),
)
CHOICES = st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=8, unique=True).map(
    lambda lengths: tuple(sorted(lengths))
)


@pytest.mark.slow
@given(LOADS, CHOICES, st.sampled_from([1, 1, 2, 8]), st.integers(0, 2**32))
@settings(deadline=None, max_examples=15, derandomize=True)
def test_converges(load, lengths, batch, seed):
    """Within 5 % of the optimum's tokens a second, tries and noise included."""
    machine = AdaptiveLength(lengths)
    rounds = simulate(machine, lengths, lambda _: load, 3000, batch, seed)
    assert share_of_optimum(rounds[WARM_UP:]) > 0.95
    assert {r.length for r in rounds} <= set(lengths)


def follow(before: Load, after: Load, batch: int, seed: int) -> int:
    """Rounds after a change until 100 rounds reach 90 % of the new optimum."""
    machine, change, most = AdaptiveLength(LENGTHS), 1500, 1500
    rounds = simulate(
        machine, LENGTHS, lambda n: before if n < change else after, change + most, batch, seed
    )[change:]
    for first in range(0, most - 100, 10):
        part = rounds[first : first + 100]
        rate = sum(after.mean_tokens(r.length) for r in part)
        rate /= sum(after.seconds(r.length) for r in part)
        if rate > 0.9 * after.rate(after.best(LENGTHS)):
            return first
    return most


@pytest.mark.default("0-cheap-1", "0-dear-8")
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("costs", [(0.05, 0.02, 0.1), (0.3, 0.05, 0.2)], ids=["cheap", "dear"])
@pytest.mark.parametrize("seed", every(3, range(3)))
def test_follows_acceptance(batch, costs, seed):
    good, fair, bad = (Load((a,), *costs) for a in (0.9, 0.7, 0.1))
    assert follow(good, bad, batch, seed) <= FALL
    assert follow(fair, bad, batch, seed) <= FALL
    assert follow(bad, good, batch, seed) <= RISE
    assert follow(fair, good, batch, seed) <= RISE


@pytest.mark.default("0")
@pytest.mark.parametrize("seed", range(3))
def test_follows_latency(seed):
    """Drafts become dear: another process takes the device."""
    cheap, dear = Load((0.7,), 0.03, 0.0, 0.0), Load((0.7,), 0.6, 0.1, 0.0)
    assert follow(cheap, dear, 4, seed) <= FALL
    assert follow(dear, cheap, 4, seed) <= RISE


@pytest.mark.parametrize("lengths", [(0, 1, 2, 4, 8), (2, 4, 8), (1, 3)], ids=str)
@pytest.mark.parametrize("batch", [1, 8])
def test_a_useless_draft_ends_at_the_shortest(lengths, batch):
    load = Load((0.0,), 0.1, 0.02, 0.05)
    machine = AdaptiveLength(lengths)
    rounds = simulate(machine, lengths, lambda _: load, 4000, batch, 1)
    assert machine.home == lengths[0]
    at_home = sum(r.length == lengths[0] for r in rounds[200:])
    assert at_home > 0.95 * len(rounds[200:])
    # tries go on, or a better draft would never be noticed
    assert any(r.length > lengths[0] for r in rounds[-1500:])


def test_free_and_perfect_drafts_end_at_the_longest():
    load = Load((1.0,), 0.001, 0.0, 0.0)
    machine = AdaptiveLength(LENGTHS)
    rounds = simulate(machine, LENGTHS, lambda _: load, 1500, 1, 1)
    assert machine.home == 8
    assert sum(r.length == 8 for r in rounds[300:]) > 0.95 * len(rounds[300:])


def test_an_optimum_beyond_a_worse_length_is_found():
    """Speculation has a fixed cost, so short chains lose against off, and long ones win."""
    load = Load((0.9,), 0.02, 0.0, 1.0)
    assert load.rate(1) < load.rate(0) < load.rate(8)
    for start in (0, 8):
        machine = AdaptiveLength((0, 1, 8), start=start)
        simulate(machine, (0, 1, 8), lambda _: load, 600, 1, 2)
        assert machine.home == 8


def test_one_length():
    machine = AdaptiveLength((4,))
    rounds = simulate(machine, (4,), lambda _: Load((0.5,), 0.1, 0.1, 0.1), 200, 1, 1)
    assert {r.length for r in rounds} == {4}


def feed(machine: AdaptiveLength, num_rounds: int, seconds, tokens) -> list[int]:
    """Rounds without noise; returns the lengths that ran."""
    lengths = []
    for _ in range(num_rounds):
        length = machine.current
        lengths.append(length)
        machine.observe(seconds(length), tokens(length))
    return lengths


def test_warm_up_tries_every_length_once():
    machine = AdaptiveLength((0, 2, 4, 6), start=2, constants=AdaptiveConstants(window=5, settle=1))
    lengths = feed(machine, 24, lambda s: 1 + 0.1 * s, lambda s: 1 + s)
    visits = [(length, len(list(group))) for length, group in itertools.groupby(lengths)]
    # the first one, then the nearest, the longer of two; a window and the rounds ignored; off is
    # given up early
    assert visits[:4] == [(2, 6), (4, 6), (6, 6), (0, 5)]
    assert machine.home == 6


def test_rounds_after_a_change_are_ignored():
    """A change is dear, for the draft has to catch up: that says nothing about the length."""
    lengths = (0, 4)
    machine = AdaptiveLength(lengths, constants=AdaptiveConstants(settle=2))
    last, since = machine.current, 0
    for _ in range(800):
        length = machine.current
        since = since + 1 if length == last else 0
        last = length
        seconds = 1 + 0.1 * length + (20 if since < 2 and length else 0)
        machine.observe(seconds, 1 + length)
    assert machine.home == 4


def test_tries_lose_a_small_share_of_the_time():
    """However bad a length is; but for the longest wait, after which one is tried anyway."""
    load = Load((0.0,), 0.2, 0.0, 0.0)
    lengths = (0, 8)
    for share, longest_wait in ((0.02, 10**6), (0.005, 10**6)):
        constants = AdaptiveConstants(trial_share=share, longest_wait=longest_wait)
        machine = AdaptiveLength(lengths, constants=constants)
        rounds = simulate(machine, lengths, lambda _: load, 20000, 1, 3)[WARM_UP:]
        lost = sum(r.seconds - 1 for r in rounds if r.length)
        assert 0 < lost < 1.5 * share * sum(r.seconds for r in rounds)


def test_the_longest_wait_is_kept():
    machine = AdaptiveLength((0, 8), constants=AdaptiveConstants(longest_wait=100))
    lengths = feed(machine, 3000, lambda s: 1 + 10 * s, lambda s: 1)
    waits = [len(list(group)) for length, group in itertools.groupby(lengths) if length == 0]
    # at the end of a window
    assert max(waits[1:]) <= 100 + 16 + 2
    assert len(waits) > 20


def test_a_hopeless_try_ends_early():
    machine = AdaptiveLength((0, 8), start=0)
    lengths = feed(machine, 400, lambda s: 1 + 10 * s, lambda s: 1)
    visits = [len(list(group)) for length, group in itertools.groupby(lengths) if length == 8]
    assert visits
    assert max(visits) <= 6


def test_the_same_rounds_give_the_same_choices():
    runs = []
    for _ in range(2):
        machine = AdaptiveLength(LENGTHS)
        runs.append(
            [
                r.length
                for r in simulate(
                    machine, LENGTHS, lambda _: Load((0.6,), 0.1, 0.1, 0.1), 900, 2, 9
                )
            ]
        )
    assert runs[0] == runs[1]


BAD = {
    "none": ((), None),
    "order": ((2, 1), None),
    "twice": ((1, 1), None),
    "negative": ((-1, 2), None),
    "start": ((1, 2), 3),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_lengths(name):
    lengths, start = BAD[name]
    with pytest.raises(ConfigError):
        AdaptiveLength(lengths, start=start)


@pytest.mark.parametrize(
    "constants",
    [{"window": 0}, {"settle": -1}, {"longest_wait": 4}, {"memory": 4}, {"trial_share": 0.0}],
    ids=str,
)
def test_bad_constants(constants):
    with pytest.raises(ConfigError):
        AdaptiveConstants(**constants)
