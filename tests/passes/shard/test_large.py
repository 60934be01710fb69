"""A model of 70 billion parameters is cut for eight ranks without any of its weights."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

MAX_SECONDS, MAX_MEGABYTES = 90.0, 1000.0
LAYERS, RANKS = 80, 8
SCRIPT = f"""
import json, resource, time
from functools import partial
import torch, transformers
from specc.passes.frontend.model_source import ModelSource
from specc.passes.frontend.trace import trace
from specc.passes.pipeline import PHASES, Pipeline
from specc.passes.shard.shard import Shard

start = time.process_time()
config = transformers.LlamaConfig(
    hidden_size=8192, intermediate_size=28672, num_hidden_layers={LAYERS}, num_attention_heads=64,
    num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192,
)
source = ModelSource.of_shape("target", "llama-70b", config, torch.bfloat16)
program = trace(source.module, "target")
Pipeline((*PHASES, ("shard", (partial(Shard, {RANKS}),)))).run(program)
plan = program.shard
print(json.dumps({{
    "seconds": time.process_time() - start,
    "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    "sums": len(plan.collectives),
    "bytes_per_token": plan.bytes_per_token,
    "local_bytes": plan.local_bytes,
    "whole_bytes": plan.whole_bytes,
    "kv_heads": sorted({{layer.num_kv_heads for layer in program.layers}}),
}}))
"""


@pytest.mark.slow
def test_a_plan_for_70_billion_parameters_takes_no_weights() -> None:
    """Seconds are of the processor: other jobs on the machine do not count."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert found["sums"] == 2 * LAYERS + 1
    assert found["bytes_per_token"] == (2 * LAYERS + 1) * 8192 * 2
    assert found["kv_heads"] == [1]
    assert found["whole_bytes"] > 140e9
    assert found["local_bytes"] * RANKS < 1.001 * found["whole_bytes"]
    assert found["seconds"] < MAX_SECONDS
    assert found["megabytes"] < MAX_MEGABYTES
