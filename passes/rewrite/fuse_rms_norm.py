"""Fuse root-mean-square norms, and the residual addition before one."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from specc.kernels import ops
from specc.passes.base import NoMatch, Pass, PassResult
from specc.passes.facts import attention_is_a_tree, attention_is_cached
from specc.passes.program import Program, bind_args, emit_call, is_view, replace
from specc.passes.rewrite.columns import is_conversion, only_user, same_shape, through_widening

aten = torch.ops.aten
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class FuseRMSNorm(Pass):
    """`x · rsqrt(mean(x²) + eps) · weight`, in any order of casts → `specc.rms_norm`.

    The operator computes in float32 and rounds once, so the norm is fused only where the graph
    rounds at least as often: a norm in float64, or one whose result is wider than what it reads,
    stays.
    """

    requires = (attention_is_cached,)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in program.calls(aten.rsqrt.default, aten.pow.Tensor_Scalar):
            if not _is_scale(node):
                continue
            with result.attempt(node.name):
                _fuse(_match(node))
        for node in program.calls(aten.rms_norm.default):
            with result.attempt(node.name):
                _fuse(_match_operator(node))
        program.graph.eliminate_dead_code()
        return result


class FuseAddRMSNorm(Pass):
    """`rms_norm(x + residual)` → `specc.add_rms_norm`, which returns the sum too.

    Of several norms that read one sum, the first takes the addition along.
    """

    requires = (attention_is_a_tree,)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in program.calls(ops.rms_norm):
            total = node.args[0]
            if total.target is not aten.add.Tensor:
                continue
            if reason := _why_no_residual(total, node):
                result.decline(node.name, reason)
                continue
            # the older operand is the residual stream
            residual, x = sorted(total.args[:2])
            graph = program.graph
            with graph.inserting_before(total):
                both = emit_call(graph, ops.add_rms_norm, x, residual, *node.args[1:])
                normalized = emit_call(graph, operator.getitem, both, 0)
                stream = emit_call(graph, operator.getitem, both, 1)
            _copy_stack(node, both)
            replace(node, normalized)
            replace(total, stream)
            for output in (normalized, stream):
                _allow_other_strides(output)
            result.rewrites += 1
        return result


@dataclass(frozen=True)
class _Norm:
    """`end` computes the norm of `x`."""

    end: fx.Node
    x: fx.Node
    weight: fx.Node
    eps: float
    unit_offset: bool


def _is_scale(node: fx.Node) -> bool:
    """Whether a node is `(mean(…) + something) ^ -1/2`: what makes a norm of these operators."""
    if node.target is aten.pow.Tensor_Scalar and node.args[1] != -0.5:
        return False
    shifted = node.args[0]
    if shifted.target is not aten.add.Tensor:
        return False
    return any(isinstance(a, fx.Node) and a.target is aten.mean.dim for a in shifted.args)


def _match(scale: fx.Node) -> _Norm:
    shifted = scale.args[0]
    mean, eps = shifted.args[:2] if isinstance(shifted.args[0], fx.Node) else shifted.args[1::-1]
    if not isinstance(eps, (int, float)) or shifted.kwargs.get("alpha", 1) != 1:
        raise NoMatch("eps is not a constant")
    square = mean.args[0]
    wide = _squared(square)
    bound, value = bind_args(mean), wide.meta["val"]
    if [dim % value.dim() for dim in bound["dim"] or ()] != [value.dim() - 1]:
        raise NoMatch(f"the mean is over dimensions {bound['dim']}, not over the last alone")
    if not bound["keepdim"]:
        raise NoMatch("the mean drops its dimension")
    root = through_widening(wide)
    inside = [square, mean, shifted, scale]
    unit = _next_product(scale, inside)
    if root not in (through_widening(factor) for factor in _factors(unit)):
        raise NoMatch("what is scaled is not what was squared")
    inside.append(unit)
    end = _next_product(unit, inside)
    last = inside[-1]
    factor = next((item for item in _factors(end) if item is not last), last)
    weight, unit_offset = _weight(factor, int(value.shape[-1]))
    end, x = _ends(end, root, wide)
    _require_floats([root, *inside, factor, weight, end])
    return _Norm(end, x, weight, float(eps), unit_offset)


def _squared(square: fx.Node) -> fx.Node:
    if square.target is aten.pow.Tensor_Scalar and square.args[1] == 2:
        return square.args[0]
    if square.target is aten.square.default:
        return square.args[0]
    if square.target is aten.mul.Tensor and square.args[0] is square.args[1]:
        return square.args[0]
    raise NoMatch("the mean is not one of squares")


def _next_product(node: fx.Node, inside: list[fx.Node]) -> fx.Node:
    """The multiplication that reads a node, perhaps converted; adds what is passed to `inside`."""
    for item in inside:
        if len(item.users) != 1:
            raise NoMatch(f"{item.name}, a step of the norm, is used elsewhere too")
    user = only_user(node)
    while user is not None and is_conversion(user) and user.args[0] is node:
        inside.append(user)
        node, user = user, only_user(user)
    if user is None:
        raise NoMatch(f"{node.name}, a step of the norm, is used elsewhere too")
    if user.target is not aten.mul.Tensor or len(_factors(user)) != 2:
        raise NoMatch("the norm has no weight")
    return user


def _factors(product: fx.Node) -> list[fx.Node]:
    return [arg for arg in product.args if isinstance(arg, fx.Node)]


def _weight(factor: fx.Node, size: int) -> tuple[fx.Node, bool]:
    """The vector that a factor is made of, and whether one is added to it."""
    weight, unit_offset = through_widening(factor), False
    if weight.target is aten.add.Tensor and weight.kwargs.get("alpha", 1) == 1:
        terms = [arg for arg in weight.args if isinstance(arg, fx.Node)]
        if len(terms) == 1 and 1 in weight.args:
            weight, unit_offset = through_widening(terms[0]), True
    if tuple(weight.meta["val"].shape) != (size,):
        found = list(factor.meta["val"].shape)
        raise NoMatch(f"the norm has no weight of [{size}]: its factor is {found}")
    return weight, unit_offset


def _ends(end: fx.Node, root: fx.Node, wide: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Where the norm ends, and what it reads: a tensor of the same dtype."""
    dtype = root.meta["val"].dtype
    while (user := only_user(end)) is not None and is_conversion(user) and user.args[0] is end:
        if end.meta["val"].dtype == dtype and user.meta["val"].dtype != dtype:
            break
        end = user
    found = end.meta["val"].dtype
    for x in (root, wide):
        if x.meta["val"].dtype == found:
            return end, x
    raise NoMatch(f"the result is {found} and what is normalized is {dtype}")


def _match_operator(node: fx.Node) -> _Norm:
    bound = bind_args(node)
    x, weight, eps = bound["input"], bound["weight"], bound["eps"]
    if not isinstance(eps, (int, float)):
        raise NoMatch("eps is not a constant")
    if len(bound["normalized_shape"]) != 1:
        raise NoMatch(f"the norm is over {bound['normalized_shape']}, not over the last dimension")
    if weight is None:
        raise NoMatch("the norm has no weight")
    if node.meta["val"].dtype != x.meta["val"].dtype:
        raise NoMatch(
            f"the result is {node.meta['val'].dtype} and what is normalized is"
            f" {x.meta['val'].dtype}"
        )
    _require_floats([x, weight])
    return _Norm(node, x, weight, float(eps), unit_offset=False)


def _require_floats(nodes: list[fx.Node]) -> None:
    for node in nodes:
        value: Tensor = node.meta["val"]
        if value.dtype not in _DTYPES:
            raise NoMatch(f"{node.name} is {value.dtype}, which float32 does not hold")


def _fuse(norm: _Norm) -> None:
    graph = norm.end.graph
    with graph.inserting_before(norm.end):
        fused = emit_call(graph, ops.rms_norm, norm.x, norm.weight, norm.eps, norm.unit_offset)
    _copy_stack(norm.end, fused)
    replace(norm.end, fused)
    _allow_other_strides(fused)


def _why_no_residual(total: fx.Node, norm: fx.Node) -> str | None:
    terms = [arg for arg in total.args if isinstance(arg, fx.Node)]
    if len(terms) != 2 or total.kwargs.get("alpha", 1) != 1:
        return "the sum is not one of two tensors"
    values = [item.meta["val"] for item in (*terms, total)]
    if len({value.dtype for value in values}) > 1:
        return "the two terms of the sum differ in dtype"
    if not all(same_shape(value, values[-1]) for value in values):
        return "the two terms of the sum differ in shape"
    if not norm.args[1] < total:
        return "the weight is computed after the sum"
    return None


def _allow_other_strides(node: fx.Node) -> None:
    """Views of what is contiguous now, whatever its strides were, may have to copy."""
    for user in list(node.users):
        if user.target is aten.view.default:
            with user.graph.inserting_before(user):
                shaped = emit_call(user.graph, aten.reshape.default, *user.args)
            replace(user, shaped)
            user = shaped
        if is_view(user):
            _allow_other_strides(user)


def _copy_stack(source: fx.Node, target: fx.Node) -> None:
    if "nn_module_stack" in source.meta:
        target.meta["nn_module_stack"] = source.meta["nn_module_stack"]
