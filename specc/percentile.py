"""The percentile that every figure of specc means."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The value below which this share lies, on a line between its two neighbors.

    Args:
        values: in any order.
        percent: 0 … 100.
    Returns:
        numpy's percentile; None of no values.
    """
    return float(np.percentile(values, percent)) if len(values) else None
