"""Prompts are read in chunks: memory does not grow with them, apart from rows of the cache."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from specc.config import CompileConfig
from specc.speculation.plans import SpecPlan
from tests import engines, models

CHUNK = 512
_ALLOWED = 8 << 20
# bytes that a request keeps of a token: ids in lists, and their hashes
_OF_A_TOKEN = 200
_RUN = """
import sys
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

engine = Engine.load(sys.argv[1], num_threads=1)
for slab in (*engine.cache.slabs["target"], engine.cache.history):
    slab.fill_(0)  # zeros are pages that nobody has touched yet
for length in map(int, sys.argv[2:]):
    prompt = [(7 * i + i // 11) % 120 for i in range(length)]
    tokens = []
    for plan in engine.plans:
        if length <= 16384:  # longer ones are read once: both plans share the rows
            engine.cache.allocator.forget_all()
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        (output,) = LLM(engine, plan=plan).generate([prompt], params)
        tokens.append(output.outputs[0].token_ids)
    assert all(found == tokens[0] and len(found) == 6 for found in tokens), tokens
    print(length, peak(), flush=True)
"""


def build(path: Path, length: int) -> Path:
    """One layer of a tiny model, with a self-draft, for the CPU."""
    changes = {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": length + 64,
    }
    target = models.save_tiny("llama", path / "model", **changes)
    config = CompileConfig(
        plans=(SpecPlan.from_widths((1, 1), ("self_w64_s4",)),),
        max_batch_size=1,
        max_seq_len=length + 64,
        prefill_chunk=CHUNK,
        backend="cpu",
        probe=False,
    )
    return engines.build(target, (), path / "engine", config)


@pytest.mark.slow
@pytest.mark.parametrize("length", [16384, 131072])
def test_memory_of_a_long_prompt_is_that_of_a_short_one(tmp_path: Path, length: int) -> None:
    """Plain decoding and a self-draft end in the same tokens, too."""
    engine = build(tmp_path, length)
    run = subprocess.run(
        [sys.executable, "-P", "-c", _RUN, str(engine), str(2 * CHUNK), str(length)],
        capture_output=True,
        text=True,
        check=True,
    )
    (short, before), (long, after) = (map(int, line.split()) for line in run.stdout.splitlines())
    # scores of one chunk alone, of the oracle, would be 2 heads * 512 * 16384 floats: 67 MB
    assert after - before < _ALLOWED + _OF_A_TOKEN * (long - short), (before, after)
