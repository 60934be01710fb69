"""Models with slopes (ALiBi) for CUDA, without a GPU: their tokens are those of transformers."""

from __future__ import annotations

import pytest

from specc.kernels import ops
from specc.passes.lower.cuda.phases import cuda_phases
from specc.passes.pipeline import PHASES, Pipeline
from specc.passes.program import bind_args
from tests import models
from tests.lossless import Zoo, run_case
from tests.passes.modules import assert_same_numbers_flat
from tests.traces import trace_once


@pytest.mark.parametrize("name", ["mpt", "falcon_rw"])
def test_attention_keeps_its_slopes(name: str) -> None:
    """Through all phases; of Falcon-RW products with positions are rounded, too."""
    model = models.build_model(name)
    program = trace_once(model, "target")
    Pipeline((*PHASES, *cuda_phases(64))).run(program)
    found = [bind_args(node) for node in program.calls(ops.attend)]
    assert [bool(bound["slopes"]) for bound in found] == [True, True]
    assert {bound["rounds_bias"] for bound in found} == {name == "falcon_rw"}
    assert_same_numbers_flat(program, model)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mpt", pytest.param("bloom", marks=pytest.mark.slow)])
def test_replayed_steps_equal_generate(zoo: Zoo, device, name: str) -> None:
    """Captured graphs, with the oracles of the operators."""
    engine = zoo.engine(name, prefill_chunk=7, backend="cuda")
    for plan in ("off", "tree-2-2-1"):
        outcome = run_case(zoo, name, engine, plan, models.prompts(), 16)
    assert outcome.stats.num_spec_steps > 0
