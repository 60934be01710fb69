"""A model's segments as one program: each runs on what the one before it hands on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor


class SegmentedProgram:
    """Inputs and result are those of `ModelProgram.forward`, of a whole model.

    Args:
        segments: in order; each is called as `ModelProgram.forward`, and all but the first with
            `hidden`.
    """

    def __init__(self, segments: Sequence[Callable[..., Tensor]]) -> None:
        self.segments = list(segments)

    def __call__(self, *inputs: Tensor | None) -> Tensor:
        first, *others = self.segments
        value = first(*inputs)
        for segment in others:
            value = segment(*inputs, hidden=value)
        return value
