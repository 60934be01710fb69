"""Products by weights: in blocks, of few rows, and of the experts of a mixture."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from specc.kernels.operator import (
    Cut,
    Lookup,
    NoRule,
    Operand,
    Operator,
    PassLimits,
    Product,
    Reads,
    SortedRows,
    count,
)
from specc.kernels.reference import core, products

PACKED = NoRule("weights are packed after the cut")
_FLOAT_BYTES = 4
# rows of the parts of a product of few rows: 16 rows, 4 programs a block (few_rows_tiles.py)
SHARED_ROWS = 16 * 4
# TensorProto.DataType
_INT64 = 7


def _linear_fake(input: Tensor, weight: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    return input.new_empty(input.shape[0], out_features)


def rows_flops(input: Operand, out_features: int, **_: object) -> int:
    """Of rows by a weight [outputs, columns]."""
    return 2 * count(input.shape) * out_features


LINEAR = Operator(
    "linear(Tensor input, Tensor weight, Tensor? bias, int out_features) -> Tensor",
    reference=core.linear_reference,
    fake=_linear_fake,
    tokens=Product(),
    cut=PACKED,
    flops=rows_flops,
    reads=Reads(whole="weight"),
    cpu=True,
)


def _skinny_linear_fake(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return input.new_empty(*input.shape[:-1], weight.shape[0])


def _skinny_linear_scratch(limits: PassLimits, weight: Operand, **_: object) -> int:
    """Parts of sums that programs hand to each other."""
    return _FLOAT_BYTES * SHARED_ROWS * int(weight.shape[0])


SKINNY_LINEAR = Operator(
    "skinny_linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor",
    reference=products.skinny_linear_reference,
    fake=_skinny_linear_fake,
    tokens=Product(),
    cut=NoRule("made of a linear layer after the cut"),
    flops=lambda input, weight, **_: rows_flops(input, weight.shape[0]),
    scratch=_skinny_linear_scratch,
    reads=Reads(whole="weight"),
    cuda="skinny_linear:skinny_linear",
)

# rows have the same bits however many there are
INVARIANT_LINEAR = Operator(
    "invariant_linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor",
    reference=products.skinny_linear_reference,
    fake=_skinny_linear_fake,
    tokens=Product(),
    cut=NoRule("made of a linear layer after the cut"),
    flops=lambda input, weight, **_: rows_flops(input, weight.shape[0]),
    reads=Reads(whole="weight"),
    cuda="invariant_linear:invariant_linear",
)


def _bmm_by_token_fake(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[1], x.shape[0], weight.shape[2]).transpose(0, 1)


BMM_BY_TOKEN = Operator(
    "bmm_by_token(Tensor x, Tensor weight) -> Tensor",
    reference=products.bmm_by_token_reference,
    fake=_bmm_by_token_fake,
    tokens=Product("x", "weight", "", is_plain=True),
    cut=NoRule("made of a product after the cut"),
    flops=lambda x, weight, **_: rows_flops(x, weight.shape[2]),
    cuda="bmm_by_token:bmm_by_token",
)


def _embedding_of_blocks_fake(
    weight: Tensor, tokens: Tensor, num_embeddings: int, width: int
) -> Tensor:
    return weight.new_empty(tokens.shape[0], width)


EMBEDDING_OF_BLOCKS = Operator(
    "embedding_of_blocks(Tensor weight, Tensor tokens, int num_embeddings, int width) -> Tensor",
    reference=core.embedding_of_blocks_reference,
    fake=_embedding_of_blocks_fake,
    tokens=Lookup("weight", "tokens"),
    cut=PACKED,
    cpu=True,
)


def _grouped_mm_fake(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


def _grouped_mm_onnx(emit: Any) -> Any:
    op = emit.op

    def grouped_mm(x: Any, weight: Any, ends: Any) -> Any:
        """One product for each expert, of a run of rows whose ends are data."""
        num_experts, _, width = weight.shape
        wide = op.Cast(ends, to=_INT64)
        zero, axis = op.Constant(value_ints=[0]), op.Constant(value_ints=[0])
        parts, start = [], zero
        for expert in range(num_experts):
            place = op.Constant(value_ints=[expert])
            end = op.Gather(wide, place, axis=0)
            rows = op.Slice(x, start, end, axis)
            matrix = op.Squeeze(op.Gather(weight, place, axis=0), axis)
            parts.append(op.MatMul(rows, matrix))
            start = end
        # rows after the last end belong to no expert
        rest = op.Sub(op.Shape(x, start=0, end=1), start)
        shape = op.Concat(rest, op.Constant(value_ints=[int(width)]), axis=0)
        nothing = op.CastLike(op.Constant(value_floats=[0.0]), x)
        return op.Concat(*parts, op.Expand(nothing, shape), axis=0)

    return grouped_mm


GROUPED_MM = Operator(
    "grouped_mm(Tensor x, Tensor weight, Tensor ends) -> Tensor",
    reference=core.grouped_mm_reference,
    fake=_grouped_mm_fake,
    tokens=SortedRows(),
    # [T, K] by experts [E, K, N], rows of an expert after each other
    cut=Cut(
        {"x": "rows columns", "weight": "* columns outputs", "ends": "*"},
        "rows outputs",
        "experts are chosen by tokens",
        contracted=("x", "columns"),
    ),
    flops=lambda x, weight, **_: rows_flops(x, weight.shape[2]),
    reads=Reads(experts="ends"),
    onnx=_grouped_mm_onnx,
)


def grouped_fake(
    x: Tensor, weight: Tensor, ends: Tensor, out_features: int, *args: object
) -> Tensor:
    return x.new_empty(x.shape[0], out_features)


# by weights in blocks
GROUPED_LINEAR = Operator(
    "grouped_linear(Tensor x, Tensor weight, Tensor ends, int out_features) -> Tensor",
    reference=core.grouped_linear_reference,
    fake=grouped_fake,
    tokens=SortedRows(),
    cut=PACKED,
    flops=lambda x, out_features, **_: rows_flops(x, out_features),
    reads=Reads(experts="ends"),
    cpu=True,
)
