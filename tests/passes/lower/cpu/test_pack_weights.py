"""Which weights a CPU engine stores in blocks, and that all of their users can read those."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from specc.passes.lower.cpu.pack_weights import PackWeights
from specc.passes.lower.cpu.phases import CPU_PHASES, LAYOUT_PHASES
from specc.passes.pipeline import Pipeline
from specc.passes.program import Program, Weight
from specc.passes.program_json import program_to_json
from tests.models import build_model
from tests.passes.modules import (
    assert_same_numbers_flat,
    aten,
    compiled,
    program_logits,
    random_tokens,
)
from tests.tiers import only


def make_program(
    weight: Tensor, *calls: tuple[object, tuple[object, ...]], copies: int = 1
) -> Program:
    """A graph whose calls read `x` [5, 6], `ids` [5] and weights `w0`, `w1`, … of one key."""
    graph = fx.Graph()
    values = {"x": torch.randn(5, 6).to(weight.dtype), "ids": torch.arange(5)}
    values |= {f"w{i}": weight for i in range(copies)}
    nodes = {}
    for name, value in values.items():
        nodes[name] = graph.placeholder(name)
        nodes[name].meta["val"] = value
    outputs = []
    for target, args in calls:
        node = graph.call_function(target, tuple(nodes.get(a, a) for a in args))
        node.meta["val"] = target(*(values.get(a, a) for a in args))
        outputs.append(node)
    graph.output(tuple(outputs))
    weights = {
        f"w{i}": Weight(("model.w",), weight.dtype, tuple(weight.shape)) for i in range(copies)
    }
    return Program("target", fx.GraphModule(nn.Module(), graph), weights, {})


LINEAR = (aten.linear.default, ("x", "w0"))
LOOKUP = (aten.embedding.default, ("w0", "ids"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("calls", [(LINEAR,), (LINEAR, LINEAR), (LOOKUP, LINEAR)])
def test_weights_of_projections_are_packed(calls, dtype) -> None:
    program = make_program(torch.randn(7, 6).to(dtype), *calls)
    result = PackWeights().run(program)
    assert (result.rewrites, result.declined) == (1, [])
    assert program.weights["w0"].in_blocks
    # the graph still reads rows
    assert program.placeholder("w0").meta["val"].shape == (7, 6)


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ((LINEAR, (aten.mul.Tensor, ("w0", 2.0))), "mul_tensor reads it too"),
        ((LINEAR, (aten.linear.default, ("w0", "w0"))), "as another argument"),
    ],
)
def test_a_weight_that_is_read_otherwise_keeps_its_rows(calls, reason) -> None:
    program = make_program(torch.randn(6, 6), *calls)
    result = PackWeights().run(program)
    assert result.rewrites == 0
    assert reason in result.declined[0].reason
    assert not program.weights["w0"].in_blocks


def test_a_bias_is_no_candidate() -> None:
    program = make_program(torch.randn(5), (aten.linear.default, ("x", "x", "w0")))
    result = PackWeights().run(program)
    assert (result.rewrites, result.declined) == (0, [])


def test_ids_that_the_kernel_does_not_take() -> None:
    program = make_program(torch.randn(7, 6), LINEAR, LOOKUP)
    (lookup,) = program.calls(aten.embedding.default)
    ids = lookup.args[1]
    ids.meta["val"] = ids.meta["val"].int()
    (declined,) = PackWeights().run(program).declined
    assert declined.reason == "embedding_default looks torch.int32 up"
    assert not program.weights["w0"].in_blocks


def test_an_embedding_alone_keeps_its_rows() -> None:
    program = make_program(torch.randn(7, 6), LOOKUP)
    result = PackWeights().run(program)
    assert (result.rewrites, result.declined) == (0, [])
    assert not program.weights["w0"].in_blocks


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_other_dtypes_are_declined(dtype) -> None:
    program = make_program(torch.randn(7, 6).to(dtype), LINEAR)
    (declined,) = PackWeights().run(program).declined
    assert declined.reason.startswith(f"dtypes {dtype}, ")


def test_inputs_of_one_key_are_stored_alike() -> None:
    """Two inputs of the graph, one tensor of the file: an embedding and the tied head."""
    head = (aten.linear.default, ("x", "w1"))
    program = make_program(torch.randn(7, 6), LOOKUP, head, copies=2)
    assert PackWeights().run(program).rewrites == 1
    assert all(weight.in_blocks for weight in program.weights.values())

    other = (aten.mul.Tensor, ("w0", 2.0))
    program = make_program(torch.randn(7, 6), other, head, copies=2)
    assert PackWeights().run(program).rewrites == 0
    assert not any(weight.in_blocks for weight in program.weights.values())


@pytest.mark.parametrize(
    "name", only(("gemma3-tied", "gpt2", "opt"), ["llama", "qwen3", "gemma3-tied", "gpt2", "opt"])
)
def test_models(name: str) -> None:
    """The marked program computes what it did; the lowered one too, from blocks."""
    model = build_model(name)
    program, _ = compiled(model)
    before = program_logits(program, model, random_tokens())
    assert program_to_json(program)["schema_version"] == 1
    record, _ = Pipeline(LAYOUT_PHASES).run(program)
    assert record.declined == ()
    torch.testing.assert_close(program_logits(program, model, random_tokens()), before)
    packed = {weight.key for weight in program.weights.values() if weight.in_blocks}
    stored = program_to_json(program)
    assert stored["schema_version"] == 2
    found = {item["key"]: item for item in stored["inputs"] if "blocks_of" in item}
    assert packed == set(found)
    for weight in program.weights.values():
        if weight.in_blocks:
            assert found[weight.key]["blocks_of"] == list(weight.shape)
            assert found[weight.key]["shape"] == list(weight.stored_shape)
    assert packed
    Pipeline(CPU_PHASES).run(program)
    after = program_logits(program, model, random_tokens())
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
    assert_same_numbers_flat(program, model)
    for node in program.graph.find_nodes(op="placeholder"):
        if node.target in program.weights:
            weight = program.weights[node.target]
            assert node.meta["val"].shape == weight.stored_shape
