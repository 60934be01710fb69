"""Models whose scores are more than products for CUDA, without a GPU: slopes, chunks, sinks, caps.

Their tokens are those of transformers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specc.kernels import ops
from specc.passes.lower.cuda.phases import cuda_phases
from specc.passes.pipeline import PHASES, Pipeline
from specc.passes.program import bind_args
from specc.runtime.backends.capture_limits import CaptureLimits
from specc.runtime.engine import Engine
from tests import models
from tests.kernels.cuda.races import watched
from tests.lossless import Zoo, run_case
from tests.more_models import CHUNK
from tests.passes.modules import assert_same_numbers_flat
from tests.traces import trace_once

# model → argument of attention, what its layers have; of sinks and slopes, whether they have any
KEPT: dict[str, tuple[str, list[Any]]] = {
    "mpt": ("slopes", [True, True]),
    "falcon_rw": ("slopes", [True, True]),
    # layers without rotary have no chunks
    "llama4_text": ("chunk", [CHUNK, 0, CHUNK]),
    "gemma2": ("softcap", [3.0, 3.0]),
    "gpt_oss": ("sink_logits", [True, True]),
    "mimo_v2_flash": ("sink_logits", [None, True]),
}


@pytest.mark.parametrize("name", KEPT)
def test_attention_keeps_what_it_has(name: str) -> None:
    """Through all phases; of Falcon-RW products with positions are rounded, too."""
    model = models.build_model(name)
    program = trace_once(model, "target")
    Pipeline((*PHASES, *cuda_phases(64))).run(program)
    argument, wanted = KEPT[name]
    bound = [bind_args(node) for node in program.calls(ops.attend)]
    given = [x[argument] for x in bound]
    assert [bool(x) if isinstance(x, torch.fx.Node) else x for x in given] == wanted
    assert {x["rounds_bias"] for x in bound} == {name == "falcon_rw"}
    assert_same_numbers_flat(program, model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "mpt",
        pytest.param("bloom", marks=pytest.mark.slow),
        "llama4_text",
        "gemma2",
        "gpt_oss",
        "mimo_v2_flash",
    ],
)
def test_replayed_steps_equal_generate(zoo: Zoo, device, name: str) -> None:
    """Captured graphs, with the oracles of the operators."""
    engine = zoo.engine(name, prefill_chunk=7, backend="cuda")
    for plan in ("off", "tree-2-2-1"):
        outcome = run_case(zoo, name, engine, plan, models.prompts(), 16)
    assert outcome.stats.num_spec_steps > 0


@pytest.mark.slow  # a minute: kernels are interpreted, element by element
@pytest.mark.parametrize("name", ["mpt", "falcon_rw", "gemma2", "gpt_oss", "mimo_v2_flash"])
def test_the_kernels_equal_generate(zoo: Zoo, device, triton_kernels, name: str) -> None:
    """A prompt in pieces, then trees; no launch races, and slopes take the general kernel."""
    layout = 16, 7, models.MAX_SEQ_LEN
    path = zoo.compiled(name, "noisy", *layout, "float32", "cuda")
    # of one sequence and the plan that runs: what else is captured would be interpreted, too
    engine = Engine.load(path, max_num_seqs=1, capture=CaptureLimits(sizes=(1,), max_seconds=-1))
    with watched("tree-2-2-1") as launches:
        outcome = run_case(zoo, name, engine, "tree-2-2-1", [models.prompts()[1]], 4)
    assert outcome.num_compared == 4
    attends = {launch.name for launch in launches if launch.name.startswith("attend")}
    assert attends == {"attend_kernel"}
