"""Models with chunks (Llama 4) for CUDA, without a GPU: their tokens are those of transformers."""

from __future__ import annotations

import pytest

from specc.kernels import ops
from specc.passes.lower.cuda.phases import cuda_phases
from specc.passes.pipeline import PHASES, Pipeline
from specc.passes.program import bind_args
from tests import models
from tests.lossless import Zoo, run_case
from tests.more_models import CHUNK
from tests.passes.modules import assert_same_numbers_flat
from tests.traces import trace_once


def test_attention_keeps_its_chunks() -> None:
    """Through all phases; layers without rotary have none."""
    model = models.build_model("llama4_text")
    program = trace_once(model, "target")
    Pipeline((*PHASES, *cuda_phases(64))).run(program)
    found = [bind_args(node)["chunk"] for node in program.calls(ops.attend)]
    assert found == [layer.chunk for layer in program.layers]
    assert {*found} == {0, CHUNK}
    assert_same_numbers_flat(program, model)


@pytest.mark.slow
def test_replayed_steps_equal_generate(zoo: Zoo, device) -> None:
    """Captured graphs, with the oracles of the operators, past the ends of chunks."""
    engine = zoo.engine("llama4_text", prefill_chunk=7, backend="cuda")
    for plan in ("off", "tree-2-2-1"):
        outcome = run_case(zoo, "llama4_text", engine, plan, models.prompts(), 16)
    assert outcome.stats.num_spec_steps > 0
