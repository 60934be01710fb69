"""Projections that read quantized weights: which ones, with which layout, and what else stays."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import fx

from specc.artifact.decoders.kept_integers import KeptIntegers
from specc.artifact.quantized_layout import QuantizedLayout, dequantize
from specc.artifact.rounding import quantize
from specc.errors import UnsupportedGraphError
from specc.kernels import ops
from specc.passes.lower.cpu.phases import CPU_PHASES, LAYOUT_PHASES
from specc.passes.pipeline import PHASES, Pipeline
from specc.passes.program import Program, Weight
from specc.passes.program_json import program_to_json
from specc.passes.proof.verify_tokenwise import verify_tokenwise
from specc.passes.quantize.quantize_linear import QuantizeLinear, quantize_phases
from tests.models import build_model
from tests.passes.lower.cpu.test_linear import make_program, numbers
from tests.passes.modules import aten
from tests.traces import trace_once

INT4 = QuantizedLayout(4, 32)


def compiled(name: str, layout: str = "int4-g32", **changes) -> tuple[Program, Pipeline]:
    pipeline = Pipeline((*PHASES, *quantize_phases(layout), *LAYOUT_PHASES))
    program = trace_once(build_model(name, **changes), "target")
    pipeline.run(program)
    return program, pipeline


def layouts(program: Program) -> dict[str, str]:
    return {weight.key: weight.layout for weight in program.weights.values()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("shape", [(6,), (5, 6), (1, 5, 6), (0, 6)], ids=str)
def test_computes_with_the_weight_that_blocks_stand_for(shape, has_bias, dtype) -> None:
    x, weight, bias = numbers(*shape, dtype=dtype), torch.randn(40, 6).to(dtype), numbers(40)
    values = (x, weight, bias.to(dtype)) if has_bias else (x, weight)
    program = make_program(*values, is_packed=False)
    assert QuantizeLinear(INT4).run(program).rewrites == 1
    program.graph.lint()
    (call,) = program.calls(ops.linear_q)
    assert list(program.weights) == [call.args[1].target]
    (stored,) = program.weights.values()
    # the only projection is the head
    assert (stored.layout, stored.key) == ("blocks-int8", "w:int8")
    packed = quantize(weight, stored.quantized)
    assert call.args[1].meta["val"].shape == packed.shape == stored.stored_shape
    found = fx.Interpreter(program.graph_module).run(x, packed, *values[2:])
    exact = dequantize(packed, (40, 6), stored.quantized)
    want = torch.nn.functional.linear(x.float(), exact, bias if has_bias else None)
    assert (found.shape, found.dtype) == (want.shape, dtype)
    bound = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(found.float(), want, rtol=bound, atol=bound)


def test_every_projection_and_a_head_of_8_bits() -> None:
    program, _ = compiled("llama", num_hidden_layers=1)
    found = layouts(program)
    q, k, v = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv")
    # fused rows are those of q, then k, then v, quantized as one weight
    assert found[f"{q}+{k}+{v}:int4-g32"] == "blocks-int4-g32"
    assert found["lm_head.weight:int8"] == "blocks-int8"
    assert found["model.embed_tokens.weight"] == "rows"
    assert sorted(found.values()).count("blocks-int4-g32") == 4
    assert program.calls(aten.linear.default) == []
    verify_tokenwise(program, "quantize")
    Pipeline(CPU_PHASES).run(program)
    entries = program_to_json(program)
    assert entries["schema_version"] == 3
    (head,) = [x for x in entries["inputs"] if x.get("key") == "lm_head.weight:int8"]
    assert (head["dtype"], head["layout"]) == ("uint8", "blocks-int8")
    assert head["quantized_of"] == [128, 64]


@pytest.mark.parametrize(
    ("layout", "head"), [("int8-g32", "int8-g32"), ("int8", "int8"), ("fp8", "int8")]
)
def test_the_head_is_in_int8(layout: str, head: str) -> None:
    """In the groups that the others have, where those are int8, too."""
    found = layouts(compiled("llama", layout, num_hidden_layers=1)[0])
    assert found[f"lm_head.weight:{head}"] == f"blocks-{head}"
    assert list(found.values()).count(f"blocks-{layout}") == 4 + (head == layout)


@pytest.mark.slow
def test_parameters_are_counted_once() -> None:
    plain = trace_once(build_model("gemma3-tied"), "target")
    program, _ = compiled("gemma3-tied")
    assert program.num_parameters == plain.num_parameters


def test_an_embedding_keeps_the_weight_that_the_head_is_tied_to() -> None:
    program, _ = compiled("gemma3-tied")
    found = layouts(program)
    assert found["lm_head.weight"] == "rows"
    assert found["lm_head.weight:int8"] == "blocks-int8"
    (embedding,) = program.calls(aten.embedding.default)
    assert program.weights[embedding.args[0].target].quantized is None


def test_few_outputs_stay() -> None:
    program = make_program(numbers(5, 6), numbers(31, 6), is_packed=False)
    result = QuantizeLinear(INT4).run(program)
    assert result.rewrites == 0
    assert [item.reason for item in result.declined] == ["31 outputs, fewer than a block has"]
    mixture, pipeline = compiled("mixtral", num_hidden_layers=1)
    # the router of 4 experts
    assert len(mixture.calls(aten.linear.default)) == 1
    (record,) = [r for r in pipeline.records if r.name == "QuantizeLinear"]
    assert [item.reason for item in record.declined] == ["4 outputs, fewer than a block has"]


def test_a_product_that_mixes_tokens_is_still_found() -> None:
    """The specification knows the operator: tokens as its columns are refused."""
    program, _ = compiled("llama", num_hidden_layers=1)
    call = program.calls(ops.linear_q)[0]
    rows: fx.Node = call.args[0]
    with program.graph.inserting_before(call):
        turned = program.graph.call_function(aten.t.default, (rows,))
        turned.meta["val"] = rows.meta["val"].t()
    call.update_arg(0, turned)
    with pytest.raises(UnsupportedGraphError, match="mixes tokens"):
        verify_tokenwise(program, "quantize")


def with_integers(layouts: dict[str, QuantizedLayout], option: str | None):
    """A model of which a checkpoint has integers, and what was declined."""
    program = trace_once(build_model("llama", num_hidden_layers=1), "target")
    for weight in program.weights.values():
        (name,) = weight.parameters
        found = [layout for part, layout in layouts.items() if part in name]
        program.integers |= dict.fromkeys([name], KeptIntegers(found[0])) if found else {}
    pipeline = Pipeline((*PHASES, *quantize_phases(option, keeps_integers=True), *LAYOUT_PHASES))
    pipeline.run(program)
    declined = [item.reason for record in pipeline.records for item in record.declined]
    return layouts_of_keys(program), declined


def layouts_of_keys(program: Program) -> dict[str, str]:
    return {key.replace("model.layers.0.", ""): item for key, item in layouts(program).items()}


def test_projections_of_different_schemes_are_not_fused() -> None:
    small, large = QuantizedLayout(4, 32), QuantizedLayout(4, 128, True)
    found, declined = with_integers({"k_proj": large, "attn": small, "gate": small}, None)
    assert found["self_attn.q_proj.weight:int4-g32"] == "blocks-int4-g32"
    assert found["self_attn.k_proj.weight:int4-g128-zeros"] == "blocks-int4-g128-zeros"
    assert found["mlp.up_proj.weight"] == found["lm_head.weight"] == "blocks"
    ways = "the weights are quantized in different ways: "
    assert f"{ways}int4-g128-zeros, int4-g32" in declined
    assert f"{ways}int4-g32, not at all" in declined


def test_the_checkpoints_integers_are_kept() -> None:
    """With --quantize, too, and of the head; what the checkpoint has in floats is rounded."""
    own = QuantizedLayout(4, 32)
    found, _ = with_integers({"self_attn": own, "lm_head": own}, "int8")
    q, k, v = (f"self_attn.{name}_proj.weight" for name in "qkv")
    assert found[f"{q}+{k}+{v}:int4-g32".replace("model.layers.0.", "")] == "blocks-int4-g32"
    assert found["lm_head.weight:int4-g32"] == "blocks-int4-g32"
    assert found["mlp.down_proj.weight:int8"] == "blocks-int8"


@pytest.mark.parametrize("kept_turned", [False, True], ids=["kept-rows", "kept-turned"])
@pytest.mark.parametrize("is_turned", [False, True], ids=["rows", "turned"])
def test_integers_of_columns_are_not_kept(is_turned: bool, kept_turned: bool) -> None:
    """Where the parameter is [K, N], integers of its own rows would be taken for those of K."""
    program = make_program(numbers(5, 64), numbers(64, 64), is_packed=False)
    weight = program.weights["x1"]
    program.weights["x1"] = dataclasses.replace(weight, is_turned=is_turned)
    program.integers["w"] = KeptIntegers(INT4, is_turned=kept_turned)
    result = QuantizeLinear(QuantizedLayout(8)).run(program)
    if is_turned == kept_turned:
        (stored,) = program.weights.values()
        assert (stored.quantized, stored.is_turned, result.declined) == (INT4, is_turned, [])
    else:
        reason = "the checkpoint's integers are of columns, not of rows"
        assert [item.reason for item in result.declined] == [reason]
        assert program.calls(ops.linear_q) == []


def test_rows_are_read_in_the_order_of_columns() -> None:
    """Each projection in its own order; two of one order share a constant."""
    layout, orders = QuantizedLayout(4, 32), [torch.randperm(64) for _ in range(2)]
    x, weights = numbers(5, 64), [torch.randn(40, 64) for _ in range(3)]
    graph = fx.Graph()
    names = ["x", "w0", "w1", "w2", "tokens"]
    inputs = {name: graph.placeholder(name) for name in names}
    program = make_program(x, weights[0], is_packed=False)
    for name, value in zip(names, [x, *weights, torch.arange(5)], strict=True):
        inputs[name].meta["val"] = value
    calls = [graph.call_function(aten.linear.default, (inputs["x"], inputs[n])) for n in names[1:4]]
    for call in calls:
        call.meta["val"] = torch.empty(5, 40)
    graph.output(tuple(calls))
    program.graph_module = fx.GraphModule(torch.nn.Module(), graph)
    program.weights = {n: Weight((n,), torch.float32, (40, 64)) for n in names[1:4]}
    of = [orders[0], orders[1], orders[0]]
    program.integers = {
        name: KeptIntegers(layout, order.numpy().tobytes())
        for name, order in zip(names[1:4], of, strict=True)
    }
    assert QuantizeLinear(None).run(program).rewrites == 3
    program.graph.lint()
    assert len(program.constants) == 2
    stored = {
        key: quantize(weight[:, order], layout)
        for key, weight, order in zip(program.weights, weights, of, strict=True)
    }
    given = {"x": x, "tokens": torch.arange(5)} | stored | program.constants
    places = [given[node.target] for node in program.graph.find_nodes(op="placeholder")]
    found = fx.Interpreter(program.graph_module).run(*places)
    for own, key, order in zip(found, stored, of, strict=True):
        exact = dequantize(stored[key], (40, 64), layout)
        torch.testing.assert_close(own, x[:, order] @ exact.t(), rtol=1e-5, atol=1e-5)


def test_nothing_without_the_option() -> None:
    assert quantize_phases(None) == ()
