"""What was measured over what was predicted, by sizes."""

from __future__ import annotations

import math

import pytest

from specc.runtime.policies.goodput.latency_correction import LatencyCorrection


def test_ratio_is_a_median_by_size():
    ratio = LatencyCorrection()
    for measured in [2.0] * 20 + [100.0] * 5:
        ratio.observe(8, 1.0, measured)
    assert ratio(8) == pytest.approx(2)
    ratio.observe(128, 1.0, 8.0)
    assert ratio(32) == pytest.approx(4)
    assert (ratio(1), ratio(10_000)) == (pytest.approx(2), pytest.approx(8))
    ratio.observe(8, 1.0, math.inf)
    ratio.observe(8, 0.0, 1.0)
    assert ratio(8) == pytest.approx(2)
