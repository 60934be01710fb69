"""Which outputs lie in one block of a weight in fragments, and that programs say the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specc.kernels import ops
from specc.passes.base import PassResult
from specc.passes.program import Program
from specc.passes.quantize.quantize_linear import quantize_phases
from specc.passes.rewrite.fuse_add_norm import FuseAddNorm
from specc.passes.rewrite.pair_fragments import PairFragments
from tests.models import VOCAB, build_model
from tests.passes.lower.cuda.test_phases import in_bfloat16
from tests.passes.modules import (
    assert_runs_alike,
    lower_for_cuda,
    reasons,
    rewrites,
    several_passes,
)

# heads of 64, and whole steps of 4 bits
SIZES = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}


def lowered(name: str, layout: str, fragments: bool = True, **sizes: Any) -> Any:
    model = in_bfloat16(build_model(name, **{**SIZES, "intermediate_size": 512, **sizes}))
    return lower_for_cuda(model, quantize_phases(layout, fragments=fragments))


def orders(program: Program) -> dict[str, str]:
    """Projections of the last layer and the head → format of their weights."""
    found = {}
    for weight in program.weights.values():
        if weight.quantized is not None:
            parameter = weight.parameters[0].removesuffix(".weight").rpartition(".")[2]
            found[parameter] = weight.quantized.format
    return found


@pytest.mark.parametrize("layout", ["int4-g64", "int8"])
def test_a_gate_and_heads_lie_in_blocks_with_what_they_meet(layout: str, monkeypatch: Any) -> None:
    _, fused, program, pipeline = lowered("llama", layout)
    plain = "fragments"
    assert orders(program) == {
        "q_proj": "fragments-32", "o_proj": plain, "gate_proj": "fragments-512",
        "down_proj": plain, "lm_head": plain,
    }  # fmt: skip
    assert rewrites(pipeline, "PairFragments") == 4
    # the first layer has no sum, and the head takes rows that are chosen
    assert rewrites(pipeline, "FuseAddNorm") == 3
    calls = (ops.add_norm_gate_up, ops.add_norm_rope_write, ops.linear_q, ops.add_norm_linear)
    assert [len(program.calls(target)) for target in calls] == [2, 1, 6, 0]
    monkeypatch.setattr(FuseAddNorm, "run", lambda *_: PassResult())
    _, paired, _, _ = lowered("llama", layout)
    monkeypatch.setattr(PairFragments, "run", lambda *_: PassResult())
    _, plain_order, program, _ = lowered("llama", layout)
    assert set(orders(program).values()) == {plain}
    assert_runs_alike(plain_order, paired, VOCAB, rtol=0, atol=0)
    for inputs in several_passes(VOCAB):
        want, found = (runner.run(inputs).float() for runner in (paired, fused))
        torch.testing.assert_close(found, want, rtol=0.05, atol=0.05 * float(want.abs().max()))


def test_what_stays_in_the_order_of_outputs() -> None:
    """Heads whose halves are no multiple of 16, and a gate that is none."""
    _, _, program, pipeline = lowered("llama", "int8", head_dim=40, intermediate_size=1032)
    assert set(orders(program).values()) == {"fragments", ""}
    assert {text.partition("outputs")[2] for text in reasons(pipeline, "PairFragments")} == {
        " [20] apart", " [1032] apart",
    }  # fmt: skip
    # a product of whole blocks takes the norm alone
    assert [len(program.calls(x)) for x in (ops.add_norm_linear, ops.act_and_mul)] == [1, 2]


def test_a_gate_with_a_bias() -> None:
    """Its blocks are of pairs, but no kernel adds a bias to a gate."""
    _, _, program, pipeline = lowered("llama", "int8", mlp_bias=True)
    assert orders(program)["gate_proj"] == "fragments-512"
    assert not program.calls(ops.add_norm_gate_up, ops.add_norm_linear)
    (found,) = {x for x in reasons(pipeline, "FuseAddNorm") if "together" in x}
    assert found == "what follows reads other outputs together than int8-fragments-512 has"


@pytest.mark.parametrize(
    ("name", "distance", "sizes"),
    [("mixtral", "-320", {"intermediate_size": 320}), ("gpt_oss", "-1", {})],
)
def test_experts_of_a_gate(name: str, distance: str, sizes: Any, monkeypatch: Any) -> None:
    """Where both are halves of a matrix's rows, and where these take turns."""
    # sums and norms that are parts of products are rounded less often
    monkeypatch.setattr(FuseAddNorm, "run", lambda *_: PassResult())
    sizes = {"hidden_size": 256, "intermediate_size": 256, **sizes}
    model = in_bfloat16(build_model(name, **sizes))
    plain = lower_for_cuda(model, quantize_phases("int4-g64"))[1]
    _, found, program, pipeline = lower_for_cuda(model, quantize_phases("int4-g64", fragments=True))
    call = program.calls(ops.experts)[0]
    layouts = f"int4-g64-fragments{distance}", "int4-g64-fragments"
    assert call.args[-2:] == layouts
    held = [program.weights[item.target].quantized.name for item in call.args[3:5]]
    assert tuple(held) == layouts
    assert rewrites(pipeline, "PairFragments") >= 2
    assert_runs_alike(plain, found, VOCAB, rtol=0, atol=0)


def test_experts_that_fill_no_blocks() -> None:
    model = in_bfloat16(build_model("mixtral", hidden_size=256, intermediate_size=264))
    _, _, program, _ = lower_for_cuda(model, quantize_phases("int8", fragments=True))
    assert all(call.args[-2:] == ("int8", "int8") for call in program.calls(ops.experts))
    assert len(program.calls(ops.experts)) == 2


def test_weights_in_blocks_are_left_alone() -> None:
    _, _, program, pipeline = lowered("llama", "int4-g64", fragments=False)
    assert set(orders(program).values()) == {""}
    assert (rewrites(pipeline, "PairFragments"), reasons(pipeline, "PairFragments")) == (0, [])
    assert rewrites(pipeline, "FuseAddNorm") == 0
    assert any("no kernel with a norm" in x for x in reasons(pipeline, "FuseAddNorm"))
