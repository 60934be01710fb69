"""Fuse a layer's products with the norm before them and with what follows them."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx

from specc.artifact.fragments import HALF
from specc.artifact.kv_rows import holds_quantized
from specc.artifact.quantized_layout import QuantizedLayout
from specc.kernels import ops
from specc.passes.base import NoMatch, Pass, PassResult
from specc.passes.program import Program, bind_args, emit_call, replace
from specc.passes.rewrite.columns import only_user
from specc.passes.rewrite.fuse_rope_write import attention_reads_caches

aten = torch.ops.aten
_RESHAPES = (aten.reshape.default, aten.view.default)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# between a projection and the heads of q, k and v
_VIEWS = (
    aten.slice.Tensor, aten.narrow.default, aten.view.default, aten.reshape.default,
    aten.transpose.int, aten.permute.default, aten.squeeze.dim, aten.unsqueeze.default,
    aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default, aten.split.sizes,
    operator.getitem,
)  # fmt: skip
# tokens that views are tried with; no size of a model's own
_TOKENS = 3


class FuseAddNorm(Pass):
    """`add_rms_norm`, a linear layer, and what reads it alone → one operator.

    With `rope_write` after it `specc.add_norm_rope_write`, with `act_and_mul` after it
    `specc.add_norm_gate_up`, else `specc.add_norm_linear`. On a device each of them is one kernel
    for few rows, and the operators that it replaces for many. A weight may be quantized, if it is
    in fragments (`specc.artifact.fragments`).
    """

    requires = (attention_reads_caches,)
    ensures = (attention_reads_caches,)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in program.calls(ops.add_rms_norm):
            with result.attempt(node.name):
                _fuse(program, node)
        program.graph.eliminate_dead_code()
        return result


def _fuse(program: Program, norm: fx.Node) -> None:
    outputs = {user.args[1]: user for user in norm.users}
    normed, total = outputs.get(0), outputs.get(1)
    linear = None if normed is None else _linear_after(normed)
    if linear is None:
        raise NoMatch("the norm is not read by one linear layer alone")
    weight, bias = linear.args[1], linear.args[2] if len(linear.args) > 2 else None
    dtype = norm.args[0].meta["val"].dtype
    layout = None
    if linear.target is ops.linear_q:
        layout = _layout_of(program, linear)
        require_parameters(program, dtype, norm.args[2], None, bias)
    else:
        require_parameters(program, dtype, norm.args[2], weight, bias)
    operands = (*norm.args, *(() if len(norm.args) > 4 else (False,)), weight)
    last, target, more = _after(linear, bias) if layout is None else _after_rows(linear, layout)
    if total is not None and any(user < last for user in total.users):
        raise NoMatch("the sum is read before the product is done")
    graph = program.graph
    with graph.inserting_before(last):
        both = emit_call(graph, target, *operands, *more)
        found = emit_call(graph, operator.getitem, both, 0)
        stream = emit_call(graph, operator.getitem, both, 1)
    both.meta["nn_module_stack"] = last.meta.get("nn_module_stack")
    replace(last, found)
    if total is not None:
        replace(total, stream)


def _linear_after(normed: fx.Node) -> fx.Node | None:
    """The product that alone reads a norm, of a quantized weight through flattened rows."""
    user = only_user(normed)
    if user is None or user.args[0] is not normed:
        return None
    if user.target is aten.linear.default:
        return user
    linear = only_user(user) if user is in_shape(normed) else None
    if linear is None or linear.target is not ops.linear_q or linear.args[0] is not user:
        return None
    return linear


def _layout_of(program: Program, linear: fx.Node) -> QuantizedLayout:
    """How the weight of a quantized product lies, if there is a kernel with a norm for it."""
    layout = program.weights[linear.args[1].target].quantized  # type: ignore[union-attr]
    assert layout is not None
    if not layout.is_fragments or linear.args[3] % layout.rows_together:  # type: ignore[operator]
        raise NoMatch(f"no kernel with a norm for {linear.args[3]} outputs in {layout.name}")
    return layout


def in_shape(node: fx.Node) -> fx.Node:
    """A value of rows in the shape in which it is read."""
    user = only_user(node)
    if user is None or user.target not in _RESHAPES:
        return node
    return user if user.meta["val"].shape[-1] == node.meta["val"].shape[-1] else node


def distance_after(linear: fx.Node) -> int | None:
    """Between two outputs of a product that what follows it reads together; None where it does not.

    Args:
        linear: or the result of a product of flattened rows in its shape.
    """
    user = only_user(linear)
    if user is not None and user.target is ops.act_and_mul:
        return int(linear.meta["val"].shape[-1]) // 2
    rope = rope_after(linear)
    return None if rope is None else int(bind_args(rope)["q"].meta["val"].shape[-1]) // 2


def _after_rows(
    linear: fx.Node, layout: QuantizedLayout
) -> tuple[fx.Node, torch._ops.OpOverload, tuple]:
    """As `_after`, of a product of flattened rows, by a weight whose blocks say what may follow."""
    rows, shaped, bias = linear.args[0].args[0], in_shape(linear), linear.args[2]  # type: ignore[union-attr]
    leading = [str(list(x.meta["val"].shape[:-1])) for x in (rows, shaped)]  # type: ignore[union-attr]
    if leading[0] != leading[1]:
        raise NoMatch(f"the product is read as {leading[1]}, its rows are {leading[0]}")
    last, target, more = _after(shaped, bias)  # type: ignore[arg-type]
    apart = HALF if target is ops.add_norm_linear else distance_after(shaped)
    if layout.distance != apart:
        if layout.distance != HALF:
            raise NoMatch(f"what follows reads other outputs together than {layout.name} has")
        last, target, more = shaped, ops.add_norm_linear, (bias,)
    return last, target, (*more, layout.name)


def _after(linear: fx.Node, bias: fx.Node | None) -> tuple[fx.Node, torch._ops.OpOverload, tuple]:
    """The node that the fused operator takes the place of, the operator, and its last arguments."""
    user = only_user(linear)
    if user is not None and user.target is ops.act_and_mul and bias is None:
        return user, ops.add_norm_gate_up, (user.args[1],)
    rope = rope_after(linear)
    if rope is not None:
        bound = bind_args(rope)
        names = ("cos", "sin", "k_cache", "v_cache", "q_start", "slot", "block_table")
        return rope, ops.add_norm_rope_write, (bias, *(bound[name] for name in names))
    return linear, ops.add_norm_linear, (bias,)


def rope_after(linear: fx.Node) -> fx.Node | None:
    """The `rope_write` whose q, k and v are the heads of a linear layer, and nothing else reads.

    None, too, where caches are quantized.
    """
    seen, stack, found = {linear}, [linear], set()
    while stack:
        for user in stack.pop().users:
            if user.target is ops.rope_write:
                found.add(user)
            elif user.target not in _VIEWS:
                return None
            elif user not in seen:
                seen.add(user)
                stack.append(user)
    if len(found) != 1:
        return None
    (rope,) = found
    bound = bind_args(rope)
    if holds_quantized(bound["k_cache"].meta["val"].dtype):
        # a scale is that of a whole row, of which a program has some columns
        return None
    heads, kv_heads, head_dim = (int(x) for x in _shape(bound["q"], bound["k"]))
    sizes = {int(bound[name].meta["val"].shape[-1]) for name in ("q", "k", "v", "cos", "sin")}
    if sizes != {head_dim} or head_dim % 2:
        return None
    width = (heads + 2 * kv_heads) * head_dim
    if int(linear.meta["val"].shape[-1]) != width:
        return None
    # every number tells where in the projection it is from
    ndim = linear.meta["val"].dim()
    numbers = torch.arange(_TOKENS * width).view(*(1,) * (ndim - 2), _TOKENS, width)
    wanted = numbers.view(_TOKENS, -1, head_dim).transpose(0, 1)
    parts = wanted.split([heads, kv_heads, kv_heads])
    for name, part in zip(("q", "k", "v"), parts, strict=True):
        value = _evaluate(bound[name], linear, numbers)
        if value is None or value.shape != part.shape or not torch.equal(value, part):
            return None
    return rope


def _shape(q: fx.Node, k: fx.Node) -> tuple[int, int, int]:
    return q.meta["val"].shape[0], k.meta["val"].shape[0], q.meta["val"].shape[2]


def _evaluate(node: fx.Node, source: fx.Node, value: Tensor) -> Tensor | None:
    """What views make of a source of this value; None where something else is between."""
    if node is source:
        return value
    if node.target is aten.sym_size.int:
        return _TOKENS  # type: ignore[return-value]
    if node.target not in _VIEWS:
        return None
    made = {item: _evaluate(item, source, value) for item in node.all_input_nodes}
    if any(item is None for item in made.values()):
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), made.__getitem__)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def require_parameters(
    program: Program,
    dtype: torch.dtype,
    gamma: fx.Node,
    weight: fx.Node | None,
    bias: fx.Node | None,
) -> None:
    """Raises NoMatch: a product of another dtype than x, or of what is no parameter.

    Args:
        weight: None of one that is quantized.
    """
    if gamma.target not in program.weights:
        raise NoMatch(f"{gamma.name} is computed, not a parameter")
    require_linear(program, dtype, weight, bias)


def require_linear(
    program: Program, dtype: torch.dtype, weight: fx.Node | None, bias: fx.Node | None
) -> None:
    """As `require_parameters`, of a product without a norm."""
    if dtype not in _DTYPES:
        raise NoMatch(f"the product is of {dtype}")
    for item in (weight, bias):
        if item is None:
            continue
        if item.target not in program.weights:
            raise NoMatch(f"{item.name} is computed, not a parameter")
        if item.meta["val"].dtype != dtype:
            raise NoMatch(f"{item.name} is {item.meta['val'].dtype}, what it meets is {dtype}")
