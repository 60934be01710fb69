"""Groups of which a step verifies what their drafters are sure of, see `ConfidentNodes`."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import Tensor

from specc.runtime.scheduling.batch import StepGroup
from specc.speculation.confidence import ConfidentNodes

# plans and thresholds that are known at a time
_known = functools.lru_cache(maxsize=64)(ConfidentNodes)


def cut_unlikely(group: StepGroup, confidence: Tensor, threshold: float) -> StepGroup:
    """The group with as many live nodes as are likely, and no more than it had.

    Args:
        group: that has drafted.
        confidence: [B, F] of its nodes with children, on the host.
        threshold: see `ConfidentNodes`.
    """
    found: Sequence[int] = _known(group.plan, threshold)(confidence).tolist()
    return group.ended(found)
