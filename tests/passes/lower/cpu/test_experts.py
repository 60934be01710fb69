"""Experts in blocks: which ones, what programs compute with them, and what else stays."""

from __future__ import annotations

import json

import pytest
import torch

from specc.artifact.weight_layout import to_blocks
from specc.errors import UnsupportedGraphError
from specc.kernels import ops
from specc.passes.lower.cpu.experts import LowerExperts, PackExperts
from specc.passes.lower.cpu.phases import CPU_PHASES, LAYOUT_PHASES
from specc.passes.pipeline import PHASES, Pipeline
from specc.passes.program import Program, Weight, add_placeholder, bind_args, emit_call
from specc.passes.program_json import program_to_json
from specc.passes.proof.verify_tokenwise import verify_tokenwise
from tests.models import build_model
from tests.passes.modules import aten
from tests.passes.quantize.test_quantize_experts import product, run
from tests.traces import trace_once

# sums in another order
TOLERANCE = {"rtol": 1e-5, "atol": 2e-5}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_turned", [False, True], ids=["rows", "turned"])
def test_a_product_reads_blocks(is_turned: bool, dtype: torch.dtype) -> None:
    """Each matrix has blocks of its own, the last of which is not full."""
    program, values = product(is_turned, dtype=dtype)
    want = run(program, values)
    assert PackExperts().run(program).rewrites == 1
    stored = program.weights["w"]
    assert (stored.shape, stored.in_blocks, stored.is_turned) == ((3, 40, 64), True, is_turned)
    rows = values["w"].mT.contiguous() if is_turned else values["w"]
    # what a backend reads that takes no blocks
    program.graph.lint()
    torch.testing.assert_close(run(program, values | {"w": rows}), want, **TOLERANCE)
    assert (again := PackExperts().run(program)).rewrites == 1
    assert (again.declined, program.weights["w"]) == ([], stored)

    assert LowerExperts().run(program).rewrites == 1
    program.graph.lint()
    assert [len(program.calls(x)) for x in (ops.grouped_mm, ops.grouped_linear)] == [0, 1]
    blocks = to_blocks(rows)
    assert blocks.shape == stored.stored_shape == program.placeholder("w").meta["val"].shape
    torch.testing.assert_close(run(program, values | {"w": blocks}), want, **TOLERANCE)
    assert LowerExperts().run(program).rewrites == 0


def test_a_weight_of_two_products() -> None:
    program, values = product(True)
    (node,) = program.calls(ops.grouped_mm)
    bound = bind_args(node)
    with program.graph.inserting_after(node):
        other = emit_call(program.graph, ops.grouped_mm, bound["x"], bound["weight"], bound["ends"])
    program.graph.output((node, other))
    want = run(program, values)
    assert PackExperts().run(program).rewrites == 1
    assert LowerExperts().run(program).rewrites == 2
    blocks = to_blocks(values["w"].mT.contiguous())
    for got, of_rows in zip(run(program, values | {"w": blocks}), want, strict=True):
        torch.testing.assert_close(got, of_rows, **TOLERANCE)


def test_what_stays() -> None:
    def reason(program: Program) -> str:
        before = program_text(program)
        (declined,) = PackExperts().run(program).declined
        assert program_text(program) == before
        assert not any(weight.in_blocks for weight in program.weights.values())
        assert len(LowerExperts().run(program).declined) == len(program.calls(ops.grouped_mm))
        return declined.reason

    def program_text(program: Program) -> str:
        return str(program.graph)

    assert reason(product(False, dtype=torch.float16)[0]) == "dtypes torch.float16, torch.float16"
    program, _ = product(False)
    program.weights.clear()
    assert reason(program) == "its weight is computed"
    for is_turned in (False, True):
        program, _ = product(is_turned)
        (node,) = program.calls(ops.grouped_mm)
        weight = program.placeholder("w")
        with program.graph.inserting_after(node):
            total = emit_call(program.graph, aten.sum.default, weight)
        program.graph.output((node, total))
        assert "reads its weight, too" in reason(program)
    program, _ = product(False)
    (node,) = program.calls(ops.grouped_mm)
    program.graph.output((node, bind_args(node)["weight"]))
    assert "reads its weight, too" in reason(program)
    # both ways; of square matrices, no shape says which
    program, values = product(False, outputs=64)
    (node,) = program.calls(ops.grouped_mm)
    bound = bind_args(node)
    with program.graph.inserting_after(node):
        operands = bound["x"], program.placeholder("w"), bound["ends"]
        other = emit_call(program.graph, ops.grouped_mm, *operands)
    program.graph.output((node, other))
    want = run(program, values)
    assert reason(program) == "products read its weight and its transpose"
    for got, as_before in zip(run(program, values), want, strict=True):
        torch.testing.assert_close(got, as_before, rtol=0, atol=0)
    # and the other argument
    for is_turned in (False, True):
        program, _ = product(is_turned)
        (node,) = program.calls(ops.grouped_mm)
        # no product takes rows [E, N, K]: what is read is all that matters here
        node.update_arg(0, bind_args(node)["weight"])
        assert "reads its weight as another argument" in reason(program)
    # an input of the same weight in rows
    program, _ = product(False)
    weight = program.placeholder("w")
    other = add_placeholder(program, "again", weight.meta["val"], weight)
    program.weights["again"] = Weight(("w",), torch.float32, (3, 40, 64))
    (node,) = program.calls(ops.grouped_mm)
    program.graph.output((node, other))
    assert reason(program) == "another input reads its weight, too"


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "llama4_text"])
def test_mixtures(name: str) -> None:
    """All of their experts, and what is said of them in the engine's file."""
    program = trace_once(build_model(name), "target")
    Pipeline((*PHASES, *LAYOUT_PHASES)).run(program)
    calls = len(program.calls(ops.grouped_mm))
    assert calls >= 4
    experts = [weight for weight in program.weights.values() if len(weight.shape) == 3]
    assert len(experts) == calls
    assert all(weight.in_blocks for weight in experts)
    assert any(weight.is_turned for weight in experts) == (name != "mixtral")
    entries = {
        item["name"]: item for item in json.loads(json.dumps(program_to_json(program)))["inputs"]
    }
    for target, weight in program.weights.items():
        if weight in experts:
            assert entries[target]["blocks_of"] == list(weight.shape)
            assert entries[target].get("is_turned", False) == weight.is_turned
    Pipeline(CPU_PHASES).run(program)
    assert program.calls(ops.grouped_mm) == []
    assert len(program.calls(ops.grouped_linear)) == calls
    verify_tokenwise(program, "lower")
    # rows of another order than that of the counts
    program.calls(ops.grouped_linear)[0].update_arg(0, program.placeholder("tokens"))
    with pytest.raises(UnsupportedGraphError):
        verify_tokenwise(program, "lower")
