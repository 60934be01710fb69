"""A model's segments as one program: each runs on what the one before it hands on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from specc.artifact.segments import SegmentedModel
from specc.runtime.backends.eager.program import ModelProgram


class SegmentedProgram(nn.Module):
    """As `ModelProgram`, of a model in segments.

    Args:
        name: of the model.
        segments: in order; each is called as `ModelProgram.forward`, and all but the first with
            `hidden`.
    """

    # key → tensor, as of `ModelProgram`: of the whole model
    weights: Mapping[str, Tensor]

    def __init__(self, name: str, segments: Sequence[ModelProgram]) -> None:
        super().__init__()
        self.name = name
        self.segments = list(segments)

    @classmethod
    def bind(
        cls,
        model: SegmentedModel,
        weights: Mapping[str, Tensor],
        caches: Sequence[tuple[Tensor, Tensor]],
    ) -> SegmentedProgram:
        """Programs of all segments.

        Args:
            model: the segments.
            weights: key → tensor of each weight and constant.
            caches: per layer of the whole model, the k and v cache [blocks, block_size, HK, D].
        Raises:
            EngineError: an input has no weight, or one of another shape or dtype.
        """
        segments: list[ModelProgram] = []
        for number, segment in enumerate(model.segments):
            own = [caches[layer] for layer in segment.layers]
            # copies of what several of them read are shared
            like = segments[0] if segments else None
            segments.append(ModelProgram(model.program(number), weights, own, like=like))
        made = cls(model.name, segments)
        made.weights = weights
        return made

    @classmethod
    def load(
        cls,
        path: Path,
        weights: Mapping[str, Tensor],
        caches: Sequence[tuple[Tensor, Tensor]],
    ) -> SegmentedProgram:
        """See `bind`; `path` is the file of the segments."""
        return cls.bind(SegmentedModel.read(path), weights, caches)

    def forward(self, *inputs: Tensor | None) -> Tensor:
        """Inputs and result are those of `ModelProgram.forward`, of a whole model."""
        first, *others = self.segments
        value = first(*inputs)
        for segment in others:
            value = segment(*inputs, hidden=value)
        return value
