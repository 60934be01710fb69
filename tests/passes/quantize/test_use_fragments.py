"""Which quantized weights lie in the order of fragments, and that products say the same."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from specc.artifact.quantized_layout import QuantizedLayout, dequantize
from specc.artifact.rounding import quantize
from specc.kernels import ops
from specc.passes.program import Program
from specc.passes.quantize.quantize_linear import QuantizeLinear
from specc.passes.quantize.use_fragments import UseFragments
from tests.passes.lower.cpu.test_linear import make_program, numbers

BF16 = torch.bfloat16


def program_of(columns: int, dtype: torch.dtype = BF16) -> Program:
    """The only projection is the head, in int8."""
    x, weight = numbers(5, columns, dtype=dtype), torch.randn(40, columns).to(dtype)
    program = make_program(x, weight, is_packed=False)
    assert QuantizeLinear(QuantizedLayout(4, 64)).run(program).rewrites == 1
    return program


def test_products_say_the_same() -> None:
    program = program_of(256)
    (call,) = program.calls(ops.linear_q)
    before = list(call.args)
    assert UseFragments().run(program).rewrites == 1
    program.graph.lint()
    assert list(call.args) == [*before[:8], 0, "fragments"]
    (stored,) = program.weights.values()
    assert (stored.layout, stored.key) == ("blocks-int8-fragments", "w:int8-fragments")
    assert call.args[1].meta["val"].shape == stored.stored_shape
    x, weight = numbers(5, 256, dtype=BF16), torch.randn(40, 256)
    packed = quantize(weight, stored.quantized)
    found = fx.Interpreter(program.graph_module).run(x, packed)
    plain = quantize(weight, QuantizedLayout(8))
    assert not torch.equal(packed, plain)
    assert torch.equal(
        dequantize(packed, (40, 256), stored.quantized),
        dequantize(plain, (40, 256), QuantizedLayout(8)),
    )
    assert torch.equal(found, torch.ops.specc.linear_q(x, plain, None, 40, 8, 0, False))
    # what lies so stays so
    assert UseFragments().run(program).rewrites == 0


@pytest.mark.parametrize(
    ("columns", "dtype", "reason"),
    [
        (112, BF16, "no fragments of 112 columns"),
        (96, BF16, "no fragments of 96 columns"),
        (256, torch.float32, "its rows are not bfloat16"),
        (256, torch.float16, "its rows are not bfloat16"),
    ],
)
def test_what_stays_in_blocks(columns: int, dtype: torch.dtype, reason: str) -> None:
    program = program_of(columns, dtype)
    result = UseFragments().run(program)
    assert result.rewrites == 0
    assert [item.reason for item in result.declined] == [reason]
    (stored,) = program.weights.values()
    assert stored.layout == "blocks-int8"


def test_a_weight_that_is_looked_up_stays_in_blocks() -> None:
    program = program_of(256)
    (call,) = program.calls(ops.linear_q)
    with program.graph.inserting_before(call):
        program.graph.call_function(torch.ops.aten.clone.default, (call.args[1],))
    result = UseFragments().run(program)
    assert [item.reason for item in result.declined] == ["something else reads its weight"]
