"""Sizes of the passes that steps make, and batches that the runtime captures."""

from __future__ import annotations

from specc.passes.lower.cuda.pass_sizes import PassSizes, batch_sizes, step_sizes
from specc.runtime.backends.capture_limits import CaptureLimits
from specc.speculation.plans import OFF, SpecPlan

TREE = SpecPlan.from_widths((2, 1))


def test_batches_are_those_that_the_runtime_captures():
    for largest in range(1, 40):
        assert tuple(batch_sizes(largest)) == CaptureLimits().buckets(largest)


def test_sizes_of_the_passes_of_a_step():
    """Of a tree 2, 1: the last two tokens, its first level, all five nodes; and of one token."""
    found = step_sizes([TREE, OFF], {"target": 7, "draft_0": 7}, [1, 3], 4)
    assert found == {
        "target": [
            PassSizes(1, 1, 1, 0), PassSizes(3, 3, 3, 0),
            PassSizes(5, 5, 1, 1), PassSizes(15, 15, 3, 1),
        ],
        "draft_0": [
            PassSizes(2, 1, 1, 0), PassSizes(2, 2, 1, 1),
            PassSizes(6, 3, 3, 0), PassSizes(6, 6, 3, 1),
        ],
    }  # fmt: skip
