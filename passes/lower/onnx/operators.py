"""What specc's own operators are in ONNX, for the exporter of torch.

Functions here are run by onnxscript while it builds a graph: their arguments are its values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specc.kernels import ops
from specc.passes.lower.onnx.quantized import linear_q

# the first with TensorScatter; Attention came with 23
OPSET = 24
# a sum over ranks, as TensorRT's parser takes it in any domain; ONNX has none, so it is in specc's
DOMAIN, COLLECTIVE = "specc", "DistCollective"
# its root is refused unless it is -1, and 0 where nobody says
SUM = {"collective_operation": "all_reduce", "reduce_op": "sum", "root": -1}


def translations(num_ranks: int = 1) -> dict[Any, Callable[..., Any]]:
    """Operator of specc → function that emits standard nodes, but for sums; needs onnxscript.

    Args:
        num_ranks: that a program's sums go over.
    """
    from onnxscript.values import Op, Opset

    op, total = Opset("", OPSET), Op(Opset(DOMAIN, 1), COLLECTIVE, _collective())

    def all_reduce(x: Any) -> Any:
        return total(x, **SUM, nb_rank=num_ranks)

    def cache_write(cache: Any, update: Any, write_index: Any) -> Any:
        return op.TensorScatter(cache, update, write_index, axis=2, mode="linear")

    def masked_attention(q: Any, k: Any, v: Any, mask: Any, scale: float) -> Any:
        return op.Attention(q, k, v, mask, scale=scale)[0]

    def distance_bias(
        mask: Any, positions: Any, slopes: Any, hidden: float, rounded_scale: float = 0.0
    ) -> Any:
        """See `distance_bias_reference`; keys after one that a token sees are counted exactly."""
        last, to_heads = op.Constant(value_int=3), op.Constant(value_ints=[1, 2])
        after = op.CumSum(op.Cast(mask, to=_FLOAT), last, exclusive=1, reverse=1)
        slopes = op.Unsqueeze(slopes, to_heads)
        if rounded_scale:
            tokens = op.Unsqueeze(op.Cast(positions, to=_FLOAT), op.Constant(value_ints=[1, 3]))
            rounded = lambda x: op.Cast(op.Cast(x, to=_BFLOAT16), to=_FLOAT)  # noqa: E731
            keys, own = (
                rounded(op.Mul(slopes, rounded(x))) for x in (op.Sub(tokens, after), tokens)
            )
            bias = op.Mul(op.Sub(keys, own), op.Constant(value_float=rounded_scale))
        else:
            bias = op.Mul(slopes, op.Neg(after))
        return op.Where(mask, bias, op.Constant(value_float=hidden))

    def rms_norm(x: Any, weight: Any, eps: float, unit_offset: bool = False) -> Any:
        if unit_offset:
            weight = op.Add(weight, op.CastLike(op.Constant(value_float=1.0), weight))
        return op.RMSNormalization(x, weight, axis=-1, epsilon=eps, stash_type=_FLOAT)

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

    return {
        ops.all_reduce: all_reduce,
        ops.cache_write: cache_write,
        ops.distance_bias: distance_bias,
        ops.masked_attention: masked_attention,
        ops.rms_norm: rms_norm,
        ops.grouped_mm: grouped_mm,
        ops.linear_q: linear_q(),
    }


def _collective() -> Any:
    """What onnxscript wants to know of an operator that is not of ONNX."""
    from onnx.defs import OpSchema

    kinds = OpSchema.AttrType
    types = [f"tensor({name})" for name in ("float", "float16", "bfloat16")]
    return OpSchema(
        COLLECTIVE,
        DOMAIN,
        1,
        inputs=[OpSchema.FormalParameter("x", "T")],
        outputs=[OpSchema.FormalParameter("sum", "T")],
        type_constraints=[("T", types, "")],
        attributes=[
            OpSchema.Attribute("collective_operation", kinds.STRING, ""),
            OpSchema.Attribute("reduce_op", kinds.STRING, ""),
            OpSchema.Attribute("root", kinds.INT, ""),
            OpSchema.Attribute("nb_rank", kinds.INT, ""),
        ],
    )


# TensorProto.DataType
_FLOAT, _INT64, _BFLOAT16 = 1, 7, 16
