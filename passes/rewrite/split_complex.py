"""Write arithmetic with complex numbers as arithmetic with their real and imaginary parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

from specc.errors import UnsupportedGraphError
from specc.passes.base import Pass, PassResult
from specc.passes.facts import is_off_meta_device
from specc.passes.program import Program, bind_args, emit_call, module_path

aten = torch.ops.aten
# operators that move numbers and compute nothing: alike for both parts, whose shape is the number's
_MOVES = {
    aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim,
    aten.transpose.int, aten.permute.default, aten.expand.default, aten.slice.Tensor,
    aten.select.int, aten.flatten.using_ints, aten.unflatten.int, aten.clone.default,
    aten.contiguous.default, aten.alias.default,
}  # fmt: skip
_CONVERSIONS = {aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten._to_copy.default}


def has_no_complex_numbers(program: Program) -> bool:
    """No value is complex."""
    return not any(_is_complex(node) for node in program.graph.nodes)


class SplitComplex(Pass):
    """`view_as_real(view_as_complex(x) · polar(1, angle))` → products and sums of real numbers.

    Models that rotate pairs of columns (Llama 4, DeepSeek V2) write a pair as one complex number
    and the rotation as a product: (a + bi)(c + di) = (ac - bd) + (ad + bc)i. Formats without
    complex numbers get the same products and sums, each rounded once, as torch rounds them.

    Raises:
        UnsupportedGraphError: another operator reads or makes complex numbers.
    """

    requires = (is_off_meta_device,)
    ensures = (has_no_complex_numbers,)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        parts: dict[fx.Node, _Parts] = {}
        for node in list(program.graph.nodes):
            if _is_complex(node):
                with program.graph.inserting_before(node):
                    parts[node] = _split(node, parts)
            elif node.op == "call_function" and any(map(_is_complex, node.all_input_nodes)):
                if node.target is not aten.view_as_real.default:
                    raise _refusal(node, "reads complex numbers")
                with program.graph.inserting_before(node):
                    real = emit_call(program.graph, aten.stack.default, [*parts[node.args[0]]], -1)
                real.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
                node.replace_all_uses_with(real)
                result.rewrites += 1
        program.graph.eliminate_dead_code()
        return result


class SplitComplexWhereKnown(Pass):
    """`SplitComplex` of programs that it takes as a whole; others stay as they are."""

    requires = (is_off_meta_device,)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        if has_no_complex_numbers(program):
            return result
        try:
            SplitComplex().run(program.copy(program.name))
        except UnsupportedGraphError as error:
            result.decline("complex numbers", error.found)
            return result
        return SplitComplex().run(program)


class _Parts(NamedTuple):
    """A complex number: nodes of its shape and of a real type each."""

    real: fx.Node
    imaginary: fx.Node


def _split(node: fx.Node, parts: dict[fx.Node, _Parts]) -> _Parts:
    """The parts of a complex value, before where calls are being inserted."""
    if node.op != "call_function":
        raise _refusal(node, "is an input of complex numbers")
    if node.target in _MOVES:
        return _each(node, lambda part: _call(node, node.target, part, *node.args[1:]), parts)
    if node.target in _CONVERSIONS and _is_complex(node.args[0]):
        if node.meta["val"].dtype != node.args[0].meta["val"].dtype:
            raise _refusal(node, "converts complex numbers")
        return parts[node.args[0]]
    make = _RULES.get(node.target)
    if make is None:
        raise _refusal(node, "makes complex numbers")
    return make(node, parts)


def _of_pairs(node: fx.Node, parts: dict[fx.Node, _Parts]) -> _Parts:
    """[..., n, 2] real numbers are [..., n] complex ones."""
    return _Parts(*(_call(node, aten.select.int, node.args[0], -1, i) for i in range(2)))


def _of_angle(node: fx.Node, parts: dict[fx.Node, _Parts]) -> _Parts:
    bound = bind_args(node)
    length, angle = bound["abs"], bound["angle"]
    waves = (_call(node, wave, angle) for wave in (aten.cos.default, aten.sin.default))
    return _Parts(*(_call(node, aten.mul.Tensor, length, wave) for wave in waves))


def _product(node: fx.Node, parts: dict[fx.Node, _Parts]) -> _Parts:
    bound = bind_args(node)
    left, right = bound["self"], bound["other"]
    if not _is_complex(left):
        left, right = right, left
    if isinstance(right, complex):
        raise _refusal(node, "multiplies by a complex constant")
    if not _is_complex(right):
        return _Parts(*(_call(node, aten.mul.Tensor, part, right) for part in parts[left]))
    (a, b), (c, d) = parts[left], parts[right]
    mul = lambda x, y: _call(node, aten.mul.Tensor, x, y)  # noqa: E731
    return _Parts(
        _call(node, aten.sub.Tensor, mul(a, c), mul(b, d)),
        _call(node, aten.add.Tensor, mul(a, d), mul(b, c)),
    )


def _conjugate(node: fx.Node, parts: dict[fx.Node, _Parts]) -> _Parts:
    real, imaginary = parts[node.args[0]]
    return _Parts(real, _call(node, aten.neg.default, imaginary))


_RULES: dict[Any, Callable[[fx.Node, dict[fx.Node, _Parts]], _Parts]] = {
    aten.view_as_complex.default: _of_pairs,
    aten.polar.default: _of_angle,
    aten.mul.Tensor: _product,
    aten.mul.Scalar: _product,
    aten._conj.default: _conjugate,
    aten.conj.default: _conjugate,
}


def _each(
    node: fx.Node, emit: Callable[[fx.Node], fx.Node], parts: dict[fx.Node, _Parts]
) -> _Parts:
    if node.kwargs:
        raise _refusal(node, "moves complex numbers with options")
    return _Parts(*map(emit, parts[node.args[0]]))


def _call(node: fx.Node, target: Any, *args: Any) -> fx.Node:
    """A call that stands in the model where `node` does."""
    made = emit_call(node.graph, target, *args)
    made.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
    return made


def _is_complex(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.dtype.is_complex


def _refusal(node: fx.Node, does: str) -> UnsupportedGraphError:
    where = module_path(node)
    return UnsupportedGraphError(
        f"{where + ': ' if where else ''}node {node.name} ({node.target}), which {does}",
        "complex numbers that are made of pairs or angles, multiplied, moved and read as pairs",
        "compile with --backend cpu or cuda, which compute with complex numbers",
    )
