"""What specc's own operators are in ONNX, for the exporter of torch: rules of their table.

Functions here are run by onnxscript while it builds a graph: their arguments are its values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specc.kernels import ops
from specc.passes.lower.onnx.quantized import quantized_product

# the first with TensorScatter; Attention came with 23
OPSET = 24
# a sum over ranks, as TensorRT's parser takes it in any domain; ONNX has none, so it is in specc's
DOMAIN, COLLECTIVE = "specc", "DistCollective"
# its root is refused unless it is -1, and 0 where nobody says
SUM = {"collective_operation": "all_reduce", "reduce_op": "sum", "root": -1}


class Emitter:
    """What the rules of the operators' table are written with; needs onnxscript.

    Args:
        num_ranks: that a program's sums go over.
    """

    def __init__(self, num_ranks: int = 1) -> None:
        from onnxscript.values import Op, Opset

        # operators of ONNX itself
        self.op: Any = Opset("", OPSET)
        self._total = Op(Opset(DOMAIN, 1), COLLECTIVE, _collective())
        self._num_ranks = num_ranks
        # x, weight, bias; what the weight is decides the nodes that it becomes
        self.quantized_product = quantized_product()

    def sum_over_ranks(self, x: Any) -> Any:
        return self._total(x, **SUM, nb_rank=self._num_ranks)


def translations(num_ranks: int = 1) -> dict[Any, Callable[..., Any]]:
    """Operator of specc → function that emits standard nodes, but for sums; needs onnxscript.

    Args:
        num_ranks: that a program's sums go over.
    """
    emitter = Emitter(num_ranks)
    return {
        getattr(ops, name): operator.onnx(emitter)
        for name, operator in ops.OPERATORS.items()
        if operator.onnx is not None
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
