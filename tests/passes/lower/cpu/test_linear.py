"""`aten.linear` becomes `specc.linear` where the CPU's own projection takes it, and only there."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from specc.artifact.weight_layout import to_blocks
from specc.kernels import ops
from specc.passes.lower.cpu.linear import LowerLinear
from specc.passes.lower.cpu.phases import CPU_PHASES, LAYOUT_PHASES
from specc.passes.pipeline import PassRecord, Pipeline
from specc.passes.program import Program, Weight
from tests.models import build_model
from tests.passes.modules import (
    Tiny,
    assert_same_numbers_flat,
    aten,
    compiled,
    program_logits,
    random_tokens,
)


def make_program(x: Tensor, weight: Tensor, *others: Tensor, is_packed: bool = True) -> Program:
    """A graph of one projection of these values: what no checkpoint holds can be tried, too."""
    values = (x, weight, *others)
    graph = fx.Graph()
    inputs = []
    for i, value in enumerate(values):
        node = graph.placeholder(f"x{i}")
        node.meta["val"] = value
        inputs.append(node)
    out = graph.call_function(aten.linear.default, tuple(inputs))
    out.meta["val"] = F.linear(*values)
    graph.output(out)
    stored = Weight(("w",), weight.dtype, tuple(weight.shape), in_blocks=is_packed)
    return Program("target", fx.GraphModule(nn.Module(), graph), {"x1": stored}, {})


def run(program: Program, x: Tensor, weight: Tensor, *others: Tensor) -> Tensor:
    program.graph.lint()
    if program.placeholder("x1").meta["val"].dim() == 4:
        weight = to_blocks(weight)
    return fx.Interpreter(program.graph_module).run(x, weight, *others)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randint(-4, 5, shape).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("shape", [(6,), (5, 6), (1, 6), (1, 5, 6), (1, 1, 5, 6), (0, 6)], ids=str)
def test_fires_and_computes_the_same(
    shape: tuple[int, ...], has_bias: bool, dtype: torch.dtype
) -> None:
    """Small integers, so that every order of the sums gives the same bits."""
    x, weight, bias = numbers(*shape, dtype=dtype), numbers(7, 6, dtype=dtype), numbers(7)
    values = (x, weight, bias.to(dtype)) if has_bias else (x, weight)
    program = make_program(*values)
    want = run(program, *values)
    result = LowerLinear().run(program)
    assert (result.rewrites, result.declined) == (1, [])
    assert program.calls(aten.linear.default) == []
    (call,) = program.calls(ops.linear)
    assert call.args[0].meta["val"].dim() == 2
    assert (call.args[1].target, call.args[3]) == ("x1", 7)
    assert (call.args[2] is not None) == has_bias
    assert call.args[1].meta["val"].shape == program.weights["x1"].stored_shape
    found = run(program, *values)
    assert (found.shape, found.dtype) == (want.shape, want.dtype)
    assert torch.equal(found, want)
    (output,) = program.graph.find_nodes(op="output")
    assert output.args[0].meta["val"].shape == want.shape


def test_rows_that_lie_apart() -> None:
    """A slice of a wider result: rows are contiguous, the input is not."""
    x, weight = numbers(1, 5, 12)[..., 3:9], numbers(7, 6)
    program = make_program(x, weight)
    want = run(program, x, weight)
    assert LowerLinear().run(program).rewrites == 1
    assert torch.equal(run(program, x, weight), want)


def test_a_weight_in_rows_stays_a_linear() -> None:
    x, weight = numbers(5, 6), numbers(7, 6)
    program = make_program(x, weight, is_packed=False)
    (call,) = program.calls(aten.linear.default)
    result = LowerLinear().run(program)
    assert result.rewrites == 0
    (declined,) = result.declined
    assert (declined.node, declined.reason) == (call.name, "its weight is not in blocks")
    assert program.calls(aten.linear.default) == [call]
    assert torch.equal(run(program, x, weight), F.linear(x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("shape", [(9,), (1, 9), (0,)], ids=str)
@pytest.mark.parametrize("width", [6, 7])
def test_an_embedding_reads_blocks(shape: tuple[int, ...], width: int, dtype: torch.dtype) -> None:
    table = torch.randn(70, width).to(dtype)
    ids = torch.randint(0, 70, shape)
    ids.view(-1)[:3] = torch.tensor([69, 0, 32])[: ids.numel()]
    graph = fx.Graph()
    nodes = [graph.placeholder("table"), graph.placeholder("ids")]
    for node, value in zip(nodes, (table, ids), strict=True):
        node.meta["val"] = value
    out = graph.call_function(aten.embedding.default, tuple(nodes))
    out.meta["val"] = F.embedding(ids, table)
    graph.output(out)
    stored = Weight(("w",), dtype, (70, width), in_blocks=True)
    program = Program("target", fx.GraphModule(nn.Module(), graph), {"table": stored}, {})
    LowerLinear().run(program)
    program.graph.lint()
    assert program.calls(aten.embedding.default) == []
    found = fx.Interpreter(program.graph_module).run(to_blocks(table), ids)
    assert torch.equal(found, F.embedding(ids, table))


def test_it_runs_twice() -> None:
    values = numbers(5, 6), numbers(7, 6)
    program = make_program(*values)
    assert LowerLinear().run(program).rewrites == 1
    again = LowerLinear().run(program)
    assert (again.rewrites, again.declined) == (0, [])


class Biased(Tiny):
    has_bias = True


class Twice(Tiny):
    """One layer that is called on two inputs, and whose results meet."""

    def after(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.o(x) + self.o(2 * x)


class ThroughMM(Tiny):
    """One product that is no linear layer among those that are."""

    def after(self, x: Tensor, positions: Tensor) -> Tensor:
        return torch.mm(x[0], self.o.weight)[None]


@pytest.mark.parametrize(
    # q, k and v are one projection, then o and head
    ("kind", "count"),
    [pytest.param(Tiny, 3, marks=pytest.mark.slow), (Biased, 3), (Twice, 5)],
)
def test_modules(kind: type[Tiny], count: int) -> None:
    torch.manual_seed(0)
    check_model(kind().eval(), count)


def test_a_weight_that_a_product_reads_too_keeps_its_rows() -> None:
    torch.manual_seed(0)
    model = ThroughMM().eval()
    program, _ = compiled(model)
    record = lower(program)
    assert (record.rewrites, len(record.declined)) == (2, 1)
    assert len(program.calls(aten.linear.default)) == len(program.calls(aten.mm.default)) == 1
    assert_same_numbers_flat(program, model)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        # of each of two layers qkv, o, gate-up and down; the head
        pytest.param("llama", 2 * 4 + 1, marks=pytest.mark.slow),
        # of each of two layers qkv, o, fc1 and fc2, with biases; the head
        ("opt", 2 * 4 + 1),
        # the same, of weights [in, out] (Conv1D)
        ("gpt2", 2 * 4 + 1),
    ],
)
def test_models(name: str, count: int) -> None:
    check_model(build_model(name), count)


class PerHead(Tiny):
    """A projection of each head: [1, T, H, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.head_mix = nn.Linear(self.head_dim, self.head_dim)

    def after(self, x: Tensor, positions: Tensor) -> Tensor:
        heads = self.head_mix(x.view(1, -1, self.num_heads, self.head_dim))
        return x + heads.flatten(2)


def test_a_projection_of_each_head() -> None:
    """Lowered or declined: the numbers stay."""
    torch.manual_seed(0)
    model = PerHead().eval()
    program, _ = compiled(model)
    before = program_logits(program, model, random_tokens())
    record = lower(program)
    assert record.rewrites == 4
    torch.testing.assert_close(program_logits(program, model, random_tokens()), before)


def lower(program: Program) -> PassRecord:
    records = Pipeline((*LAYOUT_PHASES, *CPU_PHASES)).run(program)
    return next(record for record in records if record.name == "LowerLinear")


def check_model(model: nn.Module, count: int) -> None:
    program, _ = compiled(model)
    others = len(program.calls(aten.addmm.default, aten.mm.default))
    before = program_logits(program, model, random_tokens())
    record = lower(program)
    assert (record.name, record.rewrites, record.declined) == ("LowerLinear", count, ())
    assert len(program.calls(ops.linear)) == count
    assert program.calls(aten.linear.default) == []
    assert len(program.calls(aten.addmm.default, aten.mm.default)) == others
    after = program_logits(program, model, random_tokens())
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
    assert_same_numbers_flat(program, model)


def test_bfloat16_models() -> None:
    """A program of a model in bfloat16 is rewritten alike."""
    torch.manual_seed(0)
    program, _ = compiled(Biased().bfloat16().eval())
    record = lower(program)
    assert record.rewrites == 3
    assert {call.meta["val"].dtype for call in program.calls(ops.linear)} == {torch.bfloat16}


def test_double_models_are_left_alone() -> None:
    torch.manual_seed(0)
    program, _ = compiled(Tiny().double().eval())
    record = lower(program)
    assert record.rewrites == 0
    assert len(record.declined) == 3
    assert len(program.calls(aten.linear.default)) == 3
