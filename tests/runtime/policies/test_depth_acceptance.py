"""Acceptance by depth, from steps of any length."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from specc.runtime.policies.depth_acceptance import DepthAcceptance
from tests.runtime.policies.simulated_load import Load

CHANCES = (0.8, 0.5, 0.9, 0.2)


def test_counts_by_hand():
    """A step of length 1 says nothing about depth 2."""
    known = DepthAcceptance(3)
    # depths reached and accepted: 1 2 3 | 1 (no) | 1 | 1 (no)
    known.add(3, [4, 1])
    known.add(1, [2, 1])
    assert known.rate(1) == (2 + 0.5) / (4 + 1)
    assert known.rate(2) == (1 + 0.5) / (1 + 1)
    assert known.rate(3) == (1 + 0.5) / (1 + 1)
    assert known.survival(2) == [1, 0.5, 0.375]
    assert known.mean_tokens(2) == 1.875
    assert known.mean_tokens(0) == 1
    assert known.variance(0) == 0
    assert known.error(0) == 0


def test_nothing_known():
    assert DepthAcceptance(2).survival(2) == [1, 0.5, 0.25]


def test_steps_of_mixed_lengths_agree_with_the_truth():
    load, chooser, known = Load(CHANCES, 0, 0, 0), random.Random(1), DepthAcceptance(4)
    for number in range(12000):
        length = (1, 4, 2, 0, 3)[number % 5]
        known.add(length, [load.draw(chooser, length) + 1 for _ in range(2)])
    for depth, chance in enumerate(CHANCES, start=1):
        assert known.rate(depth) == pytest.approx(chance, abs=0.02)
    for length in range(5):
        assert known.mean_tokens(length) == pytest.approx(load.mean_tokens(length), rel=0.02)


def test_variance_is_that_of_the_tokens():
    """Over all outcomes of a step, each with its probability."""
    known = DepthAcceptance(3)
    known.add(3, [4, 4, 3, 1, 2, 2])
    shares = known.survival(3)
    outcomes = [a - b for a, b in itertools.pairwise([*shares, 0.0])]
    mean = sum((i + 1) * p for i, p in enumerate(outcomes))
    variance = sum((i + 1 - mean) ** 2 * p for i, p in enumerate(outcomes))
    assert known.mean_tokens(3) == pytest.approx(mean)
    assert known.variance(3) == pytest.approx(variance)


@pytest.mark.parametrize("length", [1, 2, 4])
def test_error_is_the_spread_of_the_estimates(length):
    """Over many samples of the same size."""
    load, chooser = Load(CHANCES, 0, 0, 0), random.Random(length)
    estimates, errors = [], []
    for _ in range(600):
        known = DepthAcceptance(4)
        for _ in range(100):
            known.add(length, [load.draw(chooser, length) + 1])
        estimates.append(known.mean_tokens(length))
        errors.append(known.error(length))
    mean = sum(estimates) / len(estimates)
    spread = math.sqrt(sum((x - mean) ** 2 for x in estimates) / len(estimates))
    assert sum(errors) / len(errors) == pytest.approx(spread, rel=0.1)


def test_merging_fades():
    old, new = DepthAcceptance(1), DepthAcceptance(1)
    old.add(1, [2] * 8)
    new.add(1, [1] * 2)
    old.merge(new, 0.25)
    assert old.rate(1) == (2 + 0.5) / (2 + 2 + 1)
