"""Architectures after the CPU's phases: what is fused, and the same numbers as before."""

from __future__ import annotations

import pytest

from specc.kernels import ops
from specc.passes.lower.cpu.phases import cpu_phases
from specc.passes.pipeline import Pipeline
from specc.passes.program import bind_args
from tests import models
from tests.models import POSITIONS, build_model
from tests.passes.modules import Runner, assert_runs_alike, aten, compiled, rewrites

PASSES = ("FuseRMSNorm", "FuseAddRMSNorm", "FuseSwiGLU", "FuseRopeWrite", "SplitTreeAttention")
# model → what each of these rewrites, and what its attention is asked for besides a scale
FUSED: dict[str, tuple[tuple[int, ...], set[str]]] = {
    "llama": ((5, 4, 2, 2, 0), set()),
    "gemma3": ((19, 6, 3, 3, 0), {"window"}),
    "gpt2": ((0, 0, 0, 0, 2), set()),
    "mixtral": ((5, 4, 2, 2, 0), set()),
    "gemma2": ((9, 4, 2, 2, 0), {"window", "softcap"}),
    "gpt_oss": ((5, 4, 0, 2, 0), {"window", "sink_logits"}),
    "bloom": ((0, 0, 0, 0, 2), {"slopes"}),
}
EXTRAS = ("window", "softcap", "sink_logits", "slopes", "chunk", "most_rows")


@pytest.mark.default("gemma2", "gpt_oss")
@pytest.mark.parametrize("name", FUSED)
def test_lowered_program_runs_alike(name: str) -> None:
    model = build_model(name)
    program, _ = compiled(model)
    before, pipeline = Runner(program, model), Pipeline(cpu_phases(POSITIONS))
    pipeline.run(program)
    counts, extras = FUSED[name]
    assert tuple(rewrites(pipeline, kind) for kind in PASSES) == counts
    calls = program.calls(ops.attend)
    assert len(calls) == len(program.layers)
    assert not program.calls(ops.tree_attention, aten.linear.default, ops.grouped_mm)
    bound = [bind_args(call) for call in calls]
    assert {x for x in EXTRAS if any(item[x] not in (None, 0, 0.0) for item in bound)} == extras
    assert rewrites(pipeline, "TabulateRotary") == bool(counts[3]) + (name == "gemma3")
    assert_runs_alike(before, Runner(program, model), models.VOCAB)
