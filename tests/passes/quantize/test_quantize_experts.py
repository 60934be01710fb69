"""Experts that read quantized weights: which ones, with which layout, and what else stays."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from specc.artifact.decoders.kept_integers import KeptIntegers
from specc.artifact.quantized_layout import QuantizedLayout, dequantize
from specc.artifact.rounding import quantize
from specc.errors import UnsupportedGraphError
from specc.kernels import ops
from specc.passes.program import Program, Weight, bind_args, emit_call
from specc.passes.proof.verify_tokenwise import verify_tokenwise
from specc.passes.quantize.quantize_experts import QuantizeExperts
from tests.passes.modules import aten
from tests.passes.quantize.test_quantize_linear import compiled, layouts

INT4 = QuantizedLayout(4, 32)
ENDS = torch.tensor([2, 2, 5], dtype=torch.int32)


def product(is_turned: bool, outputs: int = 40, dtype: torch.dtype = torch.float32):
    """A program of one grouped product of 3 experts, and its inputs."""
    weight = torch.randn(3, *((64, outputs) if is_turned else (outputs, 64))).to(dtype)
    values = {"x": torch.randn(5, 64).to(dtype), "w": weight, "ends": ENDS}
    graph = fx.Graph()
    nodes = {name: graph.placeholder(name) for name in values}
    for name, node in nodes.items():
        node.meta["val"] = values[name]
    read = nodes["w"]
    if not is_turned:
        read = emit_call(graph, aten.transpose.int, read, 1, 2)
    graph.output(emit_call(graph, ops.grouped_mm, nodes["x"], read, nodes["ends"]))
    program = Program("target", fx.GraphModule(torch.nn.Module(), graph), {}, {})
    program.weights["w"] = Weight(("w",), dtype, tuple(weight.shape))
    return program, values


def run(program: Program, given: dict[str, torch.Tensor]) -> torch.Tensor:
    places = [given[node.target] for node in program.graph.find_nodes(op="placeholder")]
    return fx.Interpreter(program.graph_module).run(*places)


@pytest.mark.parametrize("is_turned", [False, True], ids=["rows", "turned"])
@pytest.mark.parametrize("name", ["int8", "int4-g32", "fp8"])
def test_computes_with_the_weights_that_blocks_stand_for(name, is_turned) -> None:
    layout = QuantizedLayout.named(name)
    program, values = product(is_turned)
    assert QuantizeExperts(layout).run(program).rewrites == 1
    program.graph.lint()
    ((target, stored),) = program.weights.items()
    assert (stored.key, stored.shape, stored.is_turned) == (f"w:{name}", (3, 40, 64), is_turned)
    weight = values["w"].transpose(1, 2) if is_turned else values["w"]
    packed = torch.cat([quantize(item, layout) for item in weight])
    assert packed.shape == stored.stored_shape
    found = run(program, values | {target: packed})
    exact = dequantize(packed, (3, 40, 64), layout)
    want = torch.cat([values["x"][:2] @ exact[0].t(), values["x"][2:] @ exact[2].t()])
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


def test_what_stays() -> None:
    def reasons(program: Program, layout: QuantizedLayout | None = INT4) -> list[str]:
        result = QuantizeExperts(layout).run(program)
        assert result.rewrites == 0
        return [item.reason for item in result.declined]

    assert reasons(product(False)[0], None) == ["the checkpoint has no integers of its weight"]
    few = "31 outputs, fewer than a block has"
    assert reasons(product(False, 31)[0]) == reasons(product(True, 31)[0]) == [few]
    (reason,) = reasons(product(False, dtype=torch.float16)[0])
    assert reason == "dtypes torch.float16, torch.float16"
    program, _ = product(False)
    (node,) = program.calls(ops.grouped_mm)
    program.graph.output((node, bind_args(node)["weight"]))
    assert reasons(program) == ["something else reads its weight, too"]
    program, _ = product(False)
    program.weights.clear()
    assert reasons(program) == ["its weight is computed"]
    # integers of rows where the graph reads columns, and the other way round
    for is_turned in (False, True):
        program, _ = product(is_turned)
        program.integers["w"] = KeptIntegers(INT4, is_turned=not is_turned)
        assert reasons(program) == ["the checkpoint's integers are of columns, not of rows"]


def test_the_checkpoints_integers_are_kept() -> None:
    """In the order of columns that they have, and with --quantize, too."""
    columns = torch.randperm(64)
    program, values = product(False)
    # an input of the runtime, before which constants are put
    program.runtime_inputs = ("x",)
    program.integers["w"] = KeptIntegers(INT4, columns.numpy().tobytes())
    assert QuantizeExperts(QuantizedLayout(8)).run(program).rewrites == 1
    program.graph.lint()
    ((target, stored),) = program.weights.items()
    assert stored.quantized == INT4
    packed = torch.cat([quantize(item[:, columns], INT4) for item in values["w"]])
    found = run(program, values | {target: packed} | program.constants)
    exact = dequantize(packed, (3, 40, 64), INT4)
    rows = values["x"][:, columns]
    want = torch.cat([rows[:2] @ exact[0].t(), rows[2:] @ exact[2].t()])
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["mixtral", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_mixtures(name) -> None:
    program, _ = compiled(name)
    found = {key.rpartition(".")[2]: item for key, item in layouts(program).items()}
    wanted = {"gate_up_proj:int4-g32", "down_proj:int4-g32"}
    assert {key for key, item in found.items() if item == "blocks-int4-g32"} > wanted
    assert program.calls(ops.grouped_mm) == []
    assert len(program.calls(ops.grouped_mm_q)) == 4
    turned = [weight.is_turned for weight in program.weights.values() if "expert" in weight.key]
    assert any(turned) == (name == "gpt_oss")
    verify_tokenwise(program, "quantize")
    # rows of another order than that of the counts
    call = program.calls(ops.grouped_mm_q)[0]
    call.update_arg(0, program.placeholder("tokens"))
    with pytest.raises(UnsupportedGraphError):
        verify_tokenwise(program, "quantize")
