"""A model as one program and as its segments, on eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specc.artifact.segments import SegmentedModel
from specc.passes.pipeline import PHASES, Phases, Pipeline
from specc.passes.program import Program, constant_key
from specc.passes.program_json import program_to_json
from specc.passes.segments.cut_segments import Segment, cut_segments, segments_to_json
from specc.passes.segments.places import CutPlace, layer_places
from specc.runtime.backends.eager.program import ModelProgram, SegmentedProgram
from tests import models
from tests.passes.shard.lockstep import Inputs, make_caches, make_states, whole_weights
from tests.traces import trace_once

Choose = Callable[[Program], Sequence[CutPlace]]


@dataclass
class Cut:
    """One program and its segments, each with caches of their own.

    Args:
        whole: the same, bound.
        segments: as the pass makes them.
        joined: the segments as one program, made of what is stored of them.
        caches: of the whole one, and of the segments: k and v of each layer; then states and replay
            rows of each that keeps some.
    """

    program: Program
    whole: ModelProgram
    segments: list[Segment]
    joined: SegmentedProgram
    caches: tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]

    @classmethod
    def make(cls, name: str, choose: Choose = layer_places, **changes: Any) -> Cut:
        """`changes` replace fields of the model's configuration."""
        return cls.of(models.build_model(name, **changes), choose)

    @classmethod
    def of(cls, model: torch.nn.Module, choose: Choose, phases: Phases = PHASES) -> Cut:
        program = trace_once(model, "target")
        Pipeline(phases).run(program)
        before = program_to_json(program)
        segments = cut_segments(program, choose(program))
        assert program_to_json(program) == before
        weights = whole_weights(model, program)
        weights |= {constant_key(key): value for key, value in program.constants.items()}
        caches = make_caches(program), make_caches(program)
        states = make_states(program), make_states(program)
        whole = ModelProgram(before, weights, caches[0], states=states[0])
        joined = bind_segments(segments_to_json(segments), weights, caches[1], states[1])
        return cls(program, whole, segments, joined, (caches[0] + states[0], caches[1] + states[1]))

    def check(self, inputs: Inputs) -> Tensor:
        """Run both, compare logits and all caches to the bit; returns the logits."""
        with torch.inference_mode():
            wanted, found = self.whole(*inputs), self.joined(*inputs)
        assert torch.equal(found, wanted)
        for one, other in zip(*self.caches, strict=True):
            for part in (0, 1):
                assert torch.equal(one[part], other[part])
        return found


def bind_segments(
    data: dict[str, Any],
    weights: dict[str, Tensor],
    caches: list[tuple[Tensor, Tensor]],
    states: Sequence[tuple[Tensor, Tensor]] = (),
) -> SegmentedProgram:
    return SegmentedProgram.bind(SegmentedModel.from_json(data), weights, caches, states=states)
