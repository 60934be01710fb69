"""Let rows that integers multiply have fewer bits than their type asks for."""

from __future__ import annotations

import torch

from specc.kernels import ops
from specc.passes.base import Pass, PassResult
from specc.passes.program import Program, bind_args

# the operand with the rows
_ROWS = {ops.linear_q: "input", ops.grouped_mm_q: "x"}


def has_rows_of(program: Program, bits: int) -> bool:
    """A product multiplies rows of so many bits, other than as many as their type asks for."""
    calls = (node for kind in _ROWS for node in program.calls(kind))
    return any(bind_args(node)["row_bits"] == bits for node in calls)


def has_wide_rows(program: Program) -> bool:
    """Most products multiply rows of 24 bits: float32 ones, where nobody asks for fewer."""
    calls = [(bind_args(x), rows) for kind, rows in _ROWS.items() for x in program.calls(kind)]
    wide = sum(
        bound["row_bits"] == 0
        and bound[rows].meta["val"].dtype == torch.float32
        and not (bound["is_float"] and bound["bits"] == 8)
        for bound, rows in calls
    )
    return 2 * wide > len(calls)


class RowIntegers(Pass):
    """Set `row_bits` of `specc.linear_q` and `specc.grouped_mm_q`.

    Rows by fp8 stay floats. Rows that have as few bits anyway, bfloat16 ones of 16, are as they
    were.

    Args:
        bits: of an integer, 8 or 16.
    """

    def __init__(self, bits: int) -> None:
        self._bits = bits

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for kind, operand in _ROWS.items():
            for node in program.calls(kind):
                bound = bind_args(node)
                if bound["is_float"] and bound["bits"] == 8:
                    result.decline(node.name, "rows by fp8 stay floats")
                    continue
                if bound[operand].meta["val"].dtype == torch.bfloat16 and self._bits == 16:
                    result.decline(node.name, "rows in bfloat16 have 16 bits")
                    continue
                node.args, node.kwargs = tuple({**bound, "row_bits": self._bits}.values()), {}
                result.rewrites += 1
        return result
