"""Models with chunks (Llama 4) for TensorRT, on the recorder: their tokens are transformers'.

The default tier has their passes, by onnxruntime: tests/passes/rewrite/test_padded_chunks.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from specc.speculation.plans import SpecPlan
from tests import models
from tests.lossless import Zoo, run_case
from tests.more_models import CHUNK
from tests.runtime.backends.tensorrt.recorded_engines import (
    compile_recorded,
    load_poisoned,
    on_recorder,
)

NAME, NUM_TOKENS = "llama4_text", 20
TREE = SpecPlan.from_widths((2, 2, 1))


@pytest.mark.slow
def test_greedy_equals_generate(zoo: Zoo, tmp_path: Path) -> None:
    """Prompts within a chunk and beyond it, in pieces of 7; steps cross its end."""
    path = compile_recorded(
        zoo.checkpoint(NAME), [zoo.checkpoint(NAME, draft="noisy")], tmp_path / "engine",
        plans=(TREE,), max_batch_size=len(models.prompts()), max_seq_len=models.MAX_SEQ_LEN,
        prefill_chunk=7,
    )  # fmt: skip
    lengths = [len(prompt) for prompt in models.prompts()]
    assert min(lengths) < CHUNK < min(lengths) + NUM_TOKENS
    assert max(lengths) > CHUNK
    with on_recorder() as recorder:
        engine = load_poisoned(path)
        assert {layer.chunk for layer in engine.manifest.models[0].layers} == {0, CHUNK}
        for plan in ("off", TREE.name):
            outcome = run_case(zoo, NAME, engine, plan, models.prompts(), NUM_TOKENS)
            assert outcome.num_compared == len(lengths) * NUM_TOKENS
    assert outcome.stats.num_spec_steps > 0
    assert (recorder.mistakes, recorder.refusals, recorder.num_dropped) == ([], [], 0)
