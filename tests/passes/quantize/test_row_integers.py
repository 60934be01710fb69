"""Fewer bits of rows: which products get them, and that nothing else of them changes."""

from __future__ import annotations

import pytest
import torch

from specc.artifact.quantized_layout import QuantizedLayout
from specc.kernels import ops
from specc.passes.program import Program, bind_args
from specc.passes.quantize.quantize_experts import QuantizeExperts
from specc.passes.quantize.quantize_linear import QuantizeLinear, quantize_phases
from specc.passes.quantize.row_integers import RowIntegers
from tests.passes.lower.cpu.test_linear import make_program
from tests.passes.quantize.test_quantize_experts import product


def bits_of(program: Program) -> list[int]:
    calls = [*program.calls(ops.linear_q), *program.calls(ops.grouped_mm_q)]
    return [bind_args(node)["row_bits"] for node in calls]


@pytest.mark.parametrize(
    ("dtype", "bits", "found"),
    [
        (torch.float32, 8, [8]),
        (torch.float32, 16, [16]),
        (torch.bfloat16, 8, [8]),
        # as many as they have
        (torch.bfloat16, 16, [0]),
    ],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_projections(has_bias, dtype, bits, found) -> None:
    values = [torch.randn(3, 6).to(dtype), torch.randn(40, 6).to(dtype)]
    program = make_program(*values, *[torch.randn(40).to(dtype)] * has_bias, is_packed=False)
    QuantizeLinear(QuantizedLayout(8)).run(program)
    (before,) = (bind_args(node) for node in program.calls(ops.linear_q))
    result = RowIntegers(bits).run(program)
    assert result.rewrites == found.count(bits)
    assert bits_of(program) == found
    (after,) = (bind_args(node) for node in program.calls(ops.linear_q))
    assert {**after, "row_bits": 0} == before


def test_experts() -> None:
    program, _ = product(is_turned=False)
    QuantizeExperts(QuantizedLayout(4, 32)).run(program)
    assert RowIntegers(8).run(program).rewrites == 1
    assert bits_of(program) == [8]


def test_rows_by_fp8_stay_floats() -> None:
    program = make_program(torch.randn(3, 6), torch.randn(40, 6), is_packed=False)
    QuantizeLinear(QuantizedLayout.named("fp8")).run(program)
    # the only projection is the head, which has int8 whatever the others have
    program.calls(ops.linear_q)[0].update_arg(7, True)
    result = RowIntegers(8).run(program)
    assert (result.rewrites, bits_of(program)) == (0, [0])
    assert [item.reason for item in result.declined] == ["rows by fp8 stay floats"]


def test_nobody_asked() -> None:
    (_, passes) = quantize_phases("int8")[0]
    assert len(passes) == 3
