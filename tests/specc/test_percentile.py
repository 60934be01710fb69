"""Percentiles against cases that were computed by hand."""

from __future__ import annotations

import pytest

from specc.percentile import percentile


def test_percentiles_lie_on_a_line_between_neighbors():
    assert percentile([7.0], 99) == 7.0
    assert percentile([10.0, 0.0], 90) == 9.0
    # places 0 … 4: 90 % is 3.6, 25 % is 1
    assert percentile([16.0, 2.0, 4.0, 8.0, 1.0], 90) == pytest.approx(8 + 0.6 * 8)
    assert percentile([1.0, 2.0, 4.0, 8.0, 16.0], 25) == 2.0
    assert percentile([1.0, 2.0], 100) == 2.0
    assert percentile([], 50) is None
