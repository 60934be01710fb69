"""Operators that programs and steps of an engine may call: a closed list, by name and overload.

`EMITTED` is what the compiler writes into engines of the architectures, drafts and backends that
specc is tested with; `python -m tests.emitted_operators` finds it. `OF_MODULES` is what modules of
users may bring besides, by the reason why a stranger may call it, too. What reads or writes beside
its arguments, or files, or can end the process is in neither: scaled_dot_product_attention takes
keys and values of unequal length; sparse, segment and quantized operators and losses take indices
as they are. Passes replace those that models bring.

Both are of torch. Of specc's own operators graphs may hold those of which their table says so
(`Operator.stored` of `specc.kernels.operators`); `specc.kernels.ops` adds them when it is imported.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

# sums of sizes, comparisons of them, and parts of values
PYTHON = {
    f"operator.{name}": getattr(operator, name)
    for name in (
        "getitem", "add", "sub", "mul", "floordiv", "mod", "neg", "le", "lt", "ge", "gt", "eq",
    )
} | {"torch.sym_max": torch.sym_max, "torch.sym_min": torch.sym_min}  # fmt: skip
_PYTHON_NAMES = {function: name for name, function in PYTHON.items()}


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


EMITTED = _names("""
aten._to_copy.default aten.abs.default aten.add.Tensor aten.arange.default
aten.arange.start_step aten.bitwise_left_shift.Tensor aten.bitwise_not.default
aten.bmm.default aten.broadcast_tensors.default aten.cat.default aten.chunk.default
aten.clamp.Tensor aten.clamp.default aten.clone.default aten.constant_pad_nd.default
aten.contiguous.default aten.cos.default aten.cumsum.default aten.div.Tensor
aten.div.Tensor_mode aten.embedding.default aten.empty_like.default aten.eq.Tensor
aten.erfinv.default aten.expand.default aten.expm1.default aten.flatten.using_ints
aten.floor.default aten.floor_divide.default aten.full_like.default aten.gather.default
aten.ge.Scalar aten.gelu.default aten.gt.Scalar aten.index.Tensor aten.index_put.default
aten.index_put_.default aten.index_select.default aten.layer_norm.default aten.linear.default
aten.log.default aten.log1p.default aten.logical_and.default aten.lt.Scalar
aten.masked_fill.Scalar aten.matmul.default aten.max.dim aten.mean.dim aten.min.other
aten.mul.Scalar aten.mul.Tensor aten.neg.default aten.ones_like.default aten.pad.default
aten.permute.default aten.polar.default aten.pow.Scalar aten.pow.Tensor_Scalar
aten.reciprocal.default aten.relu.default aten.remainder.Scalar aten.repeat.default
aten.repeat_interleave.self_int aten.reshape.default aten.rsqrt.default aten.rsub.Scalar
aten.scatter.src aten.scatter.value aten.select.int aten.sigmoid.default aten.silu.default
aten.sin.default aten.slice.Tensor aten.slice_scatter.default aten.softmax.int
aten.softplus.default aten.sort.default aten.sort.stable aten.split.Tensor
aten.split_with_sizes.default aten.sqrt.default aten.square.default aten.squeeze.dim
aten.stack.default aten.std.dim aten.sub.Scalar aten.sub.Tensor aten.sum.dim_IntList
aten.sym_size.int aten.tanh.default aten.to.dtype aten.topk.default aten.transpose.int
aten.type_as.default aten.unsqueeze.default aten.view.default aten.view_as_complex.default
aten.view_as_real.default aten.where.Scalar aten.where.ScalarOther aten.where.self
aten.zeros_like.default
""")

OF_MODULES = {
    "elements of one place: torch checks shapes, and reads nothing else": _names("""
aten.__and__.Tensor aten.__or__.Tensor aten.acos.default aten.acosh.default aten.add.Scalar
aten.addcdiv.default aten.addcmul.default aten.asin.default aten.asinh.default
aten.atan.default aten.atan2.default aten.atanh.default aten.bitwise_and.Scalar
aten.bitwise_and.Tensor aten.bitwise_or.Scalar aten.bitwise_or.Tensor aten.bitwise_xor.Scalar
aten.bitwise_xor.Tensor aten.ceil.default aten.celu.default aten.clamp_max.Tensor
aten.clamp_max.default aten.clamp_min.Tensor aten.clamp_min.default aten.copysign.Tensor
aten.cosh.default aten.div.Scalar aten.div.Scalar_mode aten.elu.default aten.eq.Scalar
aten.erf.default aten.erfc.default aten.exp.default aten.exp2.default aten.floor_divide.Scalar
aten.fmod.Scalar aten.fmod.Tensor aten.frac.default aten.ge.Tensor aten.gt.Tensor
aten.hardsigmoid.default aten.hardswish.default aten.hardtanh.default aten.imag.default
aten.isfinite.default aten.isinf.default aten.isnan.default aten.le.Scalar aten.le.Tensor
aten.leaky_relu.default aten.lerp.Scalar aten.lerp.Tensor aten.log10.default aten.log2.default
aten.log_sigmoid.default aten.logaddexp.default aten.logical_not.default
aten.logical_or.default aten.logical_xor.default aten.lt.Tensor aten.masked_fill.Tensor
aten.max.other aten.maximum.default aten.minimum.default aten.mish.default
aten.nan_to_num.default aten.ne.Scalar aten.ne.Tensor aten.pow.Tensor_Tensor aten.real.default
aten.relu6.default aten.remainder.Tensor aten.round.default aten.selu.default aten.sgn.default
aten.sign.default aten.sinh.default aten.tan.default aten.threshold.default aten.trunc.default
aten.where.ScalarSelf
"""),
    "sums and extremes along dimensions, which torch checks": _names("""
aten.all.default aten.all.dim aten.amax.default aten.amin.default aten.any.default
aten.any.dim aten.argmax.default aten.argmin.default aten.argsort.default aten.argsort.stable
aten.count_nonzero.dim_IntList aten.cummax.default aten.cummin.default aten.cumprod.default
aten.diff.default aten.glu.default aten.kthvalue.default aten.linalg_vector_norm.default
aten.log_softmax.int aten.logcumsumexp.default aten.logsumexp.default aten.max.default
aten.mean.default aten.median.dim aten.min.default aten.min.dim aten.norm.ScalarOpt_dim
aten.norm.ScalarOpt_dim_dtype aten.prod.dim_int aten.std.correction aten.std_mean.correction
aten.sum.default aten.var.correction aten.var.dim aten.var_mean.correction
"""),
    "views and moves: torch checks that sizes fit": _names("""
aten._unsafe_view.default aten.expand_as.default aten.flip.default aten.mT.default
aten.movedim.int aten.movedim.intlist aten.narrow.default aten.numpy_T.default
aten.roll.default aten.squeeze.default aten.squeeze.dims aten.swapaxes.default aten.t.default
aten.tril.default aten.triu.default aten.unbind.int aten.unflatten.int aten.unfold.default
aten.view.dtype aten.view_as.default
"""),
    "places that tensors name: torch compares each with the size": _names("""
aten.scatter_add.default aten.take_along_dim.default
"""),
    "products and norms: torch checks that sizes fit": _names("""
aten.addmm.default aten.baddbmm.default aten.mm.default aten.native_layer_norm.default
aten.rms_norm.default
"""),
    "tensors of numbers, whose sizes are bounded": _names("""
aten.arange.start aten.full.default aten.new_full.default aten.new_ones.default
aten.new_zeros.default aten.ones.default aten.scalar_tensor.default aten.zeros.default
"""),
}

KNOWN = EMITTED.union(*OF_MODULES.values())
_of_specc: dict[str, torch._ops.OpOverload] = {}


def allow(target: torch._ops.OpOverload) -> None:
    """Let graphs call an operator of specc."""
    name = str(target)
    assert name.startswith("specc."), f"{name} is not an operator of specc"
    _of_specc[name] = target


def of_specc() -> frozenset[str]:
    """Names of specc's own operators that graphs may call."""
    return frozenset(_of_specc)


def operator_named(name: str) -> torch._ops.OpOverload | None:
    """The operator with a name, where programs may call it and torch has it."""
    if name not in KNOWN:
        return _of_specc.get(name)
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet, None), overload, None)


def is_known(target: Any) -> bool:
    """Whether programs may call it."""
    if isinstance(target, torch._ops.OpOverload):
        name = str(target)
        return name in KNOWN or name in _of_specc
    return python_name(target) is not None


def python_name(target: Any) -> str | None:
    """Name of one of Python's functions in `PYTHON`; None of anything else."""
    try:
        return _PYTHON_NAMES.get(target)
    except TypeError:  # no function
        return None
