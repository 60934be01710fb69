"""Attention says which blocks it looks at, after all other rewrites, and else computes the same."""

from __future__ import annotations

import pytest

from specc.kernels import ops
from specc.passes.program import MASS, RUNTIME_INPUTS, bind_args
from specc.passes.proof.verify_tokenwise import verify_tokenwise
from specc.passes.rewrite.classify_masks import ClassifyMasks
from specc.passes.rewrite.fuse_rope_write import FuseRopeWrite, SplitTreeAttention
from specc.passes.rewrite.insert_block_mass import InsertBlockMass, attention_is_summed
from specc.passes.rewrite.normalize import Normalize
from specc.passes.rewrite.select_logits import SelectLogits
from specc.passes.rewrite.tree_attention import RewriteTreeAttention
from tests.passes.modules import Tiny, traced
from tests.passes.rewrite.test_fuse_rope_write import Rotary

LAYOUT = (Normalize, ClassifyMasks, RewriteTreeAttention, SelectLogits)
SPLIT = (FuseRopeWrite, SplitTreeAttention)


@pytest.mark.default("split-Rotary")
@pytest.mark.parametrize("model", [Tiny, Rotary])
@pytest.mark.parametrize("lowering", [(), SPLIT], ids=["whole", "split"])
def test_after_each_attention(model, lowering):
    program, results = traced(model(), *(one() for one in (*LAYOUT, *lowering, InsertBlockMass)))
    calls = program.calls(ops.tree_attention, ops.attend)
    sums = program.calls(ops.block_mass)
    assert results[-1].rewrites == len(calls) == len(sums) == len(program.layers) > 0
    assert attention_is_summed(program)
    verify_tokenwise(program, "votes")
    program.graph.lint()
    nodes = list(program.graph.nodes)
    mass = program.placeholder(MASS)
    for attention, summed in zip(calls, sums, strict=True):
        assert nodes.index(summed) == nodes.index(attention) + 1
        of_attention, own = bind_args(attention), bind_args(summed)
        assert own.pop("mass") is mass
        assert own == {name: of_attention[name] for name in own}
        assert not summed.users


def test_the_input_is_the_last_of_the_runtime():
    program, _ = traced(Tiny(), *(one() for one in (*LAYOUT, InsertBlockMass)))
    assert program.runtime_inputs == (*RUNTIME_INPUTS, MASS)
    names = [node.target for node in program.graph.find_nodes(op="placeholder")]
    place = names.index(MASS)
    assert names[place - len(RUNTIME_INPUTS) : place] == list(RUNTIME_INPUTS)
    assert names[place + 1 :] == list(program.caches)


def test_dead_code_elimination_leaves_it():
    """It has no result: what it does is what it adds."""
    program, _ = traced(Tiny(), *(one() for one in (*LAYOUT, InsertBlockMass)))
    program.graph.eliminate_dead_code()
    assert attention_is_summed(program)
