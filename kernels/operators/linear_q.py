"""Products by quantized weights (`specc.kernels.reference.quantized`)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from specc.kernels.operator import (
    NoRule,
    Operand,
    Operator,
    PassLimits,
    Product,
    Reads,
    SortedRows,
)
from specc.kernels.operators.linear import PACKED, grouped_fake, rows_flops
from specc.kernels.reference import quantized


def _linear_q_fake(
    input: Tensor, weight: Tensor, bias: Tensor | None, out_features: int, *args: object
) -> Tensor:
    return input.new_empty(*input.shape[:-1], out_features)


def _linear_q_scratch(limits: PassLimits, input: Operand, out_features: int, **_: object) -> int:
    num_rows, size = input.shape
    return decoded_bytes(limits, num_rows, size, out_features, input.itemsize)


def decoded_bytes(limits: PassLimits, num_rows: int, size: int, outputs: int, itemsize: int) -> int:
    """As much of a weight [outputs, size] as is decoded at a time, with what comes of it."""
    whole = outputs * size * itemsize
    if whole <= limits.decoded or not limits.decoded:
        return min(whole, limits.decoded)
    return limits.decoded + num_rows * limits.decoded // size


def _linear_q_onnx(emit: Any) -> Any:
    def linear_q(
        x: Any, weight: Any, bias: Any, out_features: int, bits: int, group: int, has_zeros: bool,
        is_float: bool = False,
    ) -> Any:  # fmt: skip
        # all but the operands is known of the weight
        return emit.quantized_product(x, weight, bias)

    return linear_q


LINEAR_Q = Operator(
    "linear_q(Tensor input, Tensor weight, Tensor? bias, int out_features, int bits, int group,"
    " bool has_zeros, bool is_float=False, int row_bits=0, str format='') -> Tensor",
    reference=quantized.linear_q_reference,
    fake=_linear_q_fake,
    tokens=Product(),
    cut=PACKED,
    flops=rows_flops,
    scratch=_linear_q_scratch,
    reads=Reads(whole="weight"),
    onnx=_linear_q_onnx,
    cuda="linear_q:linear_q",
    cpu=True,
)

# by weights in fragments: rows have the same bits however many there are
INVARIANT_LINEAR_Q = Operator(
    "invariant_linear_q(Tensor input, Tensor weight, Tensor? bias, int out_features, int bits,"
    " int group, bool has_zeros, bool is_float=False, int row_bits=0, str format='') -> Tensor",
    reference=quantized.linear_q_reference,
    fake=_linear_q_fake,
    tokens=Product(),
    cut=NoRule("made of a product after the cut"),
    flops=rows_flops,
    reads=Reads(whole="weight"),
    cuda="linear_q:invariant_linear_q",
)

# of the experts of a mixture
GROUPED_MM_Q = Operator(
    "grouped_mm_q(Tensor x, Tensor weight, Tensor ends, int out_features, int bits, int group,"
    " bool has_zeros, bool is_float=False, int row_bits=0, str format='') -> Tensor",
    reference=quantized.grouped_mm_q_reference,
    fake=grouped_fake,
    tokens=SortedRows(),
    cut=PACKED,
    flops=lambda x, out_features, **_: rows_flops(x, out_features),
    reads=Reads(experts="ends"),
    cuda="linear_q:grouped_mm_q",
    cpu=True,
)
