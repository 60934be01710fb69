"""`aten.linear` becomes `specc.linear` where the CPU's own projection takes it, and only there."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from specc.kernels import ops
from specc.passes.lower_cpu import CPU_PHASES
from specc.passes.lower_linear import LowerLinear
from specc.passes.pipeline import Pipeline
from specc.passes.program import Program
from tests.models import build_model
from tests.passes.modules import (
    Tiny,
    assert_same_numbers_flat,
    aten,
    compiled,
    program_logits,
    random_tokens,
)


def make_program(*values: Tensor, target: object = aten.linear.default) -> Program:
    """A graph of one call of these values: what no checkpoint holds can be tried, too."""
    graph = fx.Graph()
    inputs = []
    for i, value in enumerate(values):
        node = graph.placeholder(f"x{i}")
        node.meta["val"] = value
        inputs.append(node)
    out = graph.call_function(target, tuple(inputs))
    out.meta["val"] = target(*values)
    graph.output(out)
    return Program("target", fx.GraphModule(nn.Module(), graph), {}, {})


def run(program: Program, *values: Tensor) -> Tensor:
    program.graph.lint()
    return fx.Interpreter(program.graph_module).run(*values)


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
    # the weight is read as the checkpoint holds it
    assert call.args[1].target == "x1"
    assert (call.args[2] is not None) == has_bias
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


@pytest.mark.parametrize(
    ("dtypes", "reason"),
    [
        (("float64", "float64"), "dtypes torch.float64, torch.float64"),
        (("float16", "float16"), "dtypes torch.float16, torch.float16"),
        (("int64", "int64"), "dtypes torch.int64, torch.int64"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_other_dtypes_are_declined(dtypes: tuple[str, ...], reason: str) -> None:
    x, weight = (
        numbers(*shape).to(getattr(torch, dtype))
        for shape, dtype in zip(((5, 6), (7, 6)), dtypes, strict=True)
    )
    check_declined(make_program(x, weight), reason, x, weight)


@pytest.mark.parametrize("index", [1, 2])
def test_mixed_dtypes_are_declined(index: int) -> None:
    """No operator computes them; a graph that says so stays as it is."""
    values = [numbers(5, 6), numbers(7, 6), numbers(7)]
    program = make_program(*values)
    placeholder = program.placeholder(f"x{index}")
    placeholder.meta["val"] = values[index].bfloat16()
    check_declined(program, "torch.bfloat16", *values)


def test_a_vector_as_weight_is_declined() -> None:
    x, weight = numbers(5, 6), numbers(6)
    check_declined(make_program(x, weight), "a weight of 1 dimensions", x, weight)


def check_declined(program: Program, reason: str, *values: Tensor) -> None:
    (call,) = program.calls(aten.linear.default)
    result = LowerLinear().run(program)
    assert result.rewrites == 0
    (declined,) = result.declined
    assert declined.node == call.name
    assert reason in declined.reason
    assert program.calls(aten.linear.default) == [call]
    assert torch.equal(run(program, *values), F.linear(*values))


@pytest.mark.parametrize("target", [aten.mm.default, aten.matmul.default], ids=str)
def test_products_that_are_no_projections_stay(target: object) -> None:
    values = numbers(5, 6), numbers(6, 7)
    program = make_program(*values, target=target)
    result = LowerLinear().run(program)
    assert (result.rewrites, result.declined) == (0, [])
    assert len(program.calls(target)) == 1
    assert program.calls(ops.linear) == []


def test_it_runs_twice() -> None:
    values = numbers(5, 6), numbers(7, 6)
    program = make_program(*values)
    assert LowerLinear().run(program).rewrites == 1
    assert LowerLinear().run(program).rewrites == 0


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
    [(Tiny, 3), (Biased, 3), (Twice, 5), (ThroughMM, 3)],
)
def test_modules(kind: type[Tiny], count: int) -> None:
    torch.manual_seed(0)
    check_model(kind().eval(), count)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        # of each of two layers qkv, o, gate-up and down; the head
        ("llama", 2 * 4 + 1),
        # of each of two layers qkv, o, fc1 and fc2, with biases; the head
        ("opt", 2 * 4 + 1),
        # Conv1D keeps its weight [in, out], which is no linear layer: the head alone
        ("gpt2", 1),
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
    (record,) = Pipeline(CPU_PHASES).run(program)
    assert record.rewrites + len(record.declined) == 4
    torch.testing.assert_close(program_logits(program, model, random_tokens()), before)


def check_model(model: nn.Module, count: int) -> None:
    program, _ = compiled(model)
    others = len(program.calls(aten.addmm.default, aten.mm.default))
    before = program_logits(program, model, random_tokens())
    (record,) = Pipeline(CPU_PHASES).run(program)
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
    (record,) = Pipeline(CPU_PHASES).run(program)
    assert record.rewrites == 3
    assert {call.meta["val"].dtype for call in program.calls(ops.linear)} == {torch.bfloat16}


def test_double_models_are_left_alone() -> None:
    torch.manual_seed(0)
    program, _ = compiled(Tiny().double().eval())
    (record,) = Pipeline(CPU_PHASES).run(program)
    assert record.rewrites == 0
    assert len(record.declined) == 3
    assert all(item.reason.startswith("dtypes torch.float64, ") for item in record.declined)
    assert len(program.calls(aten.linear.default)) == 3
