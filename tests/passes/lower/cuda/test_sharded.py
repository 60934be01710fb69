"""Programs of ranks after the CUDA phases: what is fused, and what all ranks compute together."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from specc.kernels import ops
from specc.passes.lower.cuda.phases import cuda_phases, launches_per_layer
from specc.passes.pipeline import Pipeline
from specc.passes.program import Program
from specc.speculation.plans import SpecPlan
from tests import models
from tests.passes.shard.lockstep import Both, assert_alike, prompt_inputs, shard_phases, tree_inputs
from tests.passes.shard.test_lockstep import PROMPTS
from tests.tiers import every, only
from tests.traces import trace_once

# nodes of one pass each: a token, a chain, a tree
PLANS = [SpecPlan.from_widths(widths) for widths in ((1,), (1, 1, 1, 1), (3, 2, 1))]
# model → its sums; launches a layer, those of the whole model and one or two sums; products that
# take a norm along, with nothing after them, with a gate, with a rotation
FUSED = {
    "llama": (5, 7, (0, 2, 1)),
    "qwen3": (5, 10, (1, 2, 0)),
    # its norms of a block's output read the sum
    "gemma3": (7, 12, (2, 3, 0)),
    "phi": (3, 18, (0, 0, 0)),
    "phi3": (5, 7, (0, 2, 1)),
    "gpt2": (5, 20, (0, 0, 0)),
    "mixtral": (5, 8, (0, 0, 1)),
}
PRODUCTS = (ops.add_norm_linear, ops.add_norm_gate_up, ops.add_norm_rope_write)
CASES = [
    pytest.param(name, count, marks=[] if count == 2 or name == "qwen3" else [pytest.mark.slow])
    for name in models.ARCHITECTURES
    for count in (2, 4)
]


@cache
def both(name: str, num_ranks: int) -> Both:
    return Both.of(models.build_model(name), num_ranks, cuda_phases(models.POSITIONS))


def lowered(name: str, num_ranks: int) -> Program:
    program = trace_once(models.build_model(name), "target")
    Pipeline((*shard_phases(num_ranks), *cuda_phases(models.POSITIONS))).run(program)
    return program


@pytest.mark.default("qwen3_moe-2")
@pytest.mark.parametrize(("name", "num_ranks"), only(("phi", "qwen3_moe"), every(3, CASES)))
def test_fused_ranks_together_are_the_model(name: str, num_ranks: int) -> None:
    """A prompt, then a token, a chain and a tree over the rows that it left."""
    found = both(name, num_ranks)
    generator = torch.Generator().manual_seed(5)
    committed = [len(prompt) for prompt in PROMPTS]
    passes = [prompt_inputs(PROMPTS)]
    for plan in PLANS:
        tokens = torch.randint(models.VOCAB, (2, plan.num_nodes), generator=generator)
        passes.append(tree_inputs(plan, tokens, committed))
    for inputs in passes:
        with torch.inference_mode():
            wanted = found.whole(*inputs)
        assert_alike(found.logits(inputs), wanted)


@pytest.mark.default("phi")
@pytest.mark.parametrize("name", only(("llama", "phi"), FUSED))
def test_a_sum_is_one_launch_more_and_fusions_stay(name: str) -> None:
    program = lowered(name, 2)
    num_sums, num_launches, products = FUSED[name]
    assert len(program.calls(ops.all_reduce)) == num_sums
    assert {*launches_per_layer(program)} == {num_launches}
    assert tuple(len(program.calls(op)) for op in PRODUCTS) == products
    # half of the heads, in caches and in attention
    whole = [k.shape[2] for k, _ in both(name, 2).caches[0]]
    assert [2 * layer.num_kv_heads for layer in program.layers] == whole
    assert not program.calls(ops.embed_norm_rope_write), "the embedding is a part of a sum"


@pytest.mark.slow
def test_a_head_of_a_padded_vocabulary_keeps_its_padding_from_winning() -> None:
    """129 tokens on 4 ranks: 33 columns each, the last 3 of which are of no token."""
    model = models.build_model("llama", vocab_size=129)
    found = Both.of(model, 4, cuda_phases(models.POSITIONS))
    inputs = prompt_inputs(PROMPTS)
    with torch.inference_mode():
        wanted = found.whole(*inputs)
    logits = found.logits(inputs)
    assert_alike(logits, wanted)
    assert logits[:, 129:].max() == -torch.inf
