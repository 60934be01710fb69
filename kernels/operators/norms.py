"""`rms_norm`, `add_rms_norm`, and the activation times a gate: what stands between products."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from specc.kernels.operator import AlongLast, Cut, NoRule, Operator
from specc.kernels.reference import fused

_FUSED = NoRule("fused after the cut")
# TensorProto.DataType
_FLOAT = 1


def _rms_norm_fake(x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
    return x.new_empty(x.shape)


def _rms_norm_onnx(emit: Any) -> Any:
    op = emit.op

    def rms_norm(x: Any, weight: Any, eps: float, unit_offset: bool = False) -> Any:
        if unit_offset:
            weight = op.Add(weight, op.CastLike(op.Constant(value_float=1.0), weight))
        return op.RMSNormalization(x, weight, axis=-1, epsilon=eps, stash_type=_FLOAT)

    return rms_norm


RMS_NORM = Operator(
    "rms_norm(Tensor x, Tensor weight, float eps, bool unit_offset=False) -> Tensor",
    reference=fused.rms_norm_reference,
    fake=_rms_norm_fake,
    tokens=AlongLast(),
    cut=Cut({"x": "... *", "weight": "*"}, "... *", "a norm goes over it"),
    onnx=_rms_norm_onnx,
    cuda="rms_norm:rms_norm",
    cpu=True,
)


def _add_rms_norm_fake(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


ADD_RMS_NORM = Operator(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, bool unit_offset=False)"
    " -> (Tensor, Tensor)",
    reference=fused.add_rms_norm_reference,
    fake=_add_rms_norm_fake,
    tokens=AlongLast(),
    cut=_FUSED,
    cuda="rms_norm:add_rms_norm",
    cpu=True,
)


def _act_and_mul_fake(gate_up: Tensor, activation: str) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


ACT_AND_MUL = Operator(
    "act_and_mul(Tensor gate_up, str activation) -> Tensor",
    reference=fused.act_and_mul_reference,
    fake=_act_and_mul_fake,
    tokens=AlongLast(),
    cut=_FUSED,
    cuda="act_and_mul:act_and_mul",
    cpu=True,
)
