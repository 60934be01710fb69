"""Bring a fresh trace into canonical form: flat, on no device, without bookkeeping nodes."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from specc.errors import UnsupportedAttentionError, UnsupportedGraphError
from specc.passes.base import Pass, PassResult
from specc.passes.facts import (
    DENSE_ATTENTION,
    has_runtime_inputs,
    is_flat_call_graph,
    is_off_meta_device,
)
from specc.passes.program import (
    Program,
    bind_args,
    emit_call,
    is_update,
    is_view,
    module_path,
    replace,
    upstream,
)
from specc.passes.rewrite.join_copies import join_copies
from specc.passes.rewrite.write_slices import write_slices

aten = torch.ops.aten

_CHECKS = (
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten._assert_async.msg,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
)
_IDENTITIES = (
    aten.detach.default,
    aten.detach_.default,
    aten.alias.default,
    aten.lift_fresh_copy.default,
    aten.lift_fresh.default,
)
_DROPOUTS = (aten.dropout.default, aten.native_dropout.default, aten.feature_dropout.default)
_CONVERSIONS = (
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten._to_copy.default,
)
# other names of operators
_ALIASES = {
    aten.concat.default: aten.cat.default,
    aten.concatenate.default: aten.cat.default,
    aten.broadcast_to.default: aten.expand.default,
    aten.multiply.Tensor: aten.mul.Tensor,
    aten.divide.Tensor: aten.div.Tensor,
    aten.subtract.Tensor: aten.sub.Tensor,
}
# x.op_(…) → op(x, …), where nothing reads x afterwards
_FUNCTIONAL = {
    aten.div_.Tensor: aten.div.Tensor,
    aten.mul_.Tensor: aten.mul.Tensor,
    aten.add_.Tensor: aten.add.Tensor,
    aten.sub_.Tensor: aten.sub.Tensor,
    aten.mul_.Scalar: aten.mul.Scalar,
    aten.clamp_.default: aten.clamp.default,
    aten.masked_fill_.Scalar: aten.masked_fill.Scalar,
    aten.index_put_.default: aten.index_put.default,
    aten.scatter_.src: aten.scatter.src,
    aten.scatter_.value: aten.scatter.value,
}


class Normalize(Pass):
    """Inline nested graphs, drop checks and identities, make in-place ops functional.

    Devices named in the trace (meta) become the CPU: a program names no device but the one that
    its tensors live on, and a backend moves them.
    """

    requires = (has_runtime_inputs,)
    ensures = (is_flat_call_graph, is_off_meta_device)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        graph = program.graph
        for node in list(graph.nodes):
            if node.op == "call_function" and _is_wrapper(node):
                _inline(program.graph_module, node)
                result.rewrites += 1
        for node in list(graph.nodes):
            if node.op != "call_function":
                continue
            if node.target in _CHECKS:
                graph.erase_node(node)
            elif node.target in _IDENTITIES or _is_inactive_dropout(node) or _takes_all(node):
                replace(node, node.args[0])
            elif node.target in _CONVERSIONS:
                _simplify_conversion(node)
            elif node.target in _ALIASES:
                node.target = _ALIASES[node.target]
            elif node.target in _FUNCTIONAL:
                if not _redirect_readers(node):
                    result.decline(node.name, "what it updates in place is read afterwards")
                    continue
                _make_functional(node)
            else:
                if not _set_device(node):
                    continue
            result.rewrites += 1
        result.rewrites += join_copies(graph) + write_slices(graph, _FUNCTIONAL)
        result.rewrites += _fill_by_masks(graph)
        result.rewrites += _drop_dead(graph)
        program.graph_module.delete_all_unused_submodules()
        _refuse_nested(program)
        return result


def _fill_by_masks(graph: fx.Graph) -> int:
    """`x[mask] = number` → `where(mask, number, x)`; returns how many.

    Wrappers write tokens of images over so, before they are looked up.
    """
    count = 0
    for node in graph.find_nodes(op="call_function", target=aten.index_put.default):
        bound = bind_args(node)
        x, (mask, *others), value = bound["self"], bound["indices"], bound["values"]
        shape = x.meta["val"].shape
        is_mask = not others and mask is not None and mask.meta["val"].dtype == torch.bool
        is_mask = is_mask and mask.meta["val"].shape == shape
        if not is_mask or value.meta["val"].dim() or bound["accumulate"]:
            continue
        with graph.inserting_before(node):
            replace(node, emit_call(graph, aten.where.self, mask, value, x))
        count += 1
    return count


def _refuse_nested(program: Program) -> None:
    """Name the layer whose mask torch.export could only keep as a program inside the program."""
    nested = {
        node
        for node in program.graph.nodes
        if node.op in ("get_attr", "call_module", "call_method")
        or isinstance(node.target, torch._ops.HigherOrderOperator)
    }
    if not nested:
        return
    for node in program.calls(*DENSE_ATTENTION):
        mask = bind_args(node)["attn_mask"]
        if isinstance(mask, fx.Node) and not nested.isdisjoint(upstream(mask)):
            raise UnsupportedAttentionError(
                f"layer {module_path(node) or node.name}: a mask built by a function of positions"
                " that the trace keeps closed (bidirectional or custom attention)",
                "causal attention, optionally with one sliding window",
                "choose a model of a supported architecture (see docs/guide/models.md)",
            )
    raise UnsupportedGraphError(
        f"{program.name}: node {min(nested).name} is a program inside the program",
        "a trace of plain operators",
        "report the architecture",
    )


def _wrapper_name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", "") or getattr(node.target, "_name", "")


def _is_wrapper(node: fx.Node) -> bool:
    return _wrapper_name(node) in ("wrap_with_set_grad_enabled", "wrap_with_autocast")


def _inline(graph_module: fx.GraphModule, node: fx.Node) -> None:
    """Replace a higher-order call by the nodes of its body.

    Raises:
        UnsupportedGraphError: the region casts, which its nodes do not say.
    """
    if _wrapper_name(node) == "wrap_with_autocast" and node.args[2]:
        raise UnsupportedGraphError(
            f"{module_path(node) or node.name}: an autocast region computes in {node.args[1]}",
            "a forward that names its dtypes",
            "disable autocast in the model's forward, or outside of it",
        )
    at = next(
        i for i, arg in enumerate(node.args) if isinstance(arg, fx.Node) and arg.op == "get_attr"
    )
    body = graph_module.get_submodule(node.args[at].target)  # type: ignore[union-attr]
    holders = body.graph.find_nodes(op="placeholder")
    env: dict[fx.Node, Any] = dict(zip(holders, node.args[at + 1 :], strict=True))
    graph, outputs = node.graph, ()
    with graph.inserting_before(node):
        for inner in body.graph.nodes:
            if inner.op == "output":
                outputs = fx.map_arg(inner.args[0], lambda item: env[item])
            elif inner.op != "placeholder":
                env[inner] = graph.node_copy(inner, lambda item: env[item])
    for user in list(node.users):
        replace(user, outputs[user.args[1]])
    attribute = node.args[at]
    graph.erase_node(node)
    if not attribute.users:
        graph.erase_node(attribute)


def _is_inactive_dropout(node: fx.Node) -> bool:
    if node.target not in _DROPOUTS:
        return False
    bound = bind_args(node)
    return not bound["train"] or not bound["p"]


def _simplify_conversion(node: fx.Node) -> None:
    """Keep a dtype conversion that converts; drop devices, layouts and copies."""
    source, dtype = node.args[0], node.meta["val"].dtype
    is_copy = node.target is aten._to_copy.default or bool(bind_args(node).get("copy"))
    is_same = source.meta["val"].dtype == dtype
    if is_same and not is_copy:
        replace(node, source)
        return
    with node.graph.inserting_before(node):
        # a copy stays one: what updates its source in place must not reach it
        if is_same:
            plain = emit_call(node.graph, aten.clone.default, source)
        else:
            plain = emit_call(node.graph, aten.to.dtype, source, dtype)
    _copy_meta(node, plain)
    replace(node, plain)


def _redirect_readers(node: fx.Node) -> bool:
    """Let what reads the updated value later read the node's result; False where that is not all.

    Another view of the same memory would see the update too, and cannot be redirected.
    """
    root = node.args[0]
    if root.op == "placeholder":
        return False
    later = [user for user in root.users if user is not node and user > node]
    if is_view(root) or any(is_view(user) for user in root.users):
        return not _is_read_later(node)
    for user in later:
        user.replace_input_with(root, node)
    return True


def _is_read_later(node: fx.Node) -> bool:
    """Whether anything reads what the node updates afterwards, also through another view of it."""
    root = node.args[0]
    while is_view(root):
        root = root.args[0]
    if root.op == "placeholder":
        return True
    aliases, stack = {root}, [root]
    while stack:
        views = [user for user in stack.pop().users if is_view(user) and user not in aliases]
        aliases.update(views)
        stack += views
    readers = {user for alias in aliases for user in alias.users}
    return any(reader is not node and reader > node for reader in readers)


def _takes_all(node: fx.Node) -> bool:
    """Whether a slice from a place that sizes say takes everything: `x[:, -x.shape[1] :]`."""
    if node.target is not aten.slice.Tensor:
        return False
    bound = bind_args(node)
    sizes = [str(item.meta["val"].shape) for item in (node, node.args[0])]
    return isinstance(bound["start"], fx.Node) and bound["step"] == 1 and sizes[0] == sizes[1]


def _make_functional(node: fx.Node) -> None:
    with node.graph.inserting_before(node):
        plain = emit_call(node.graph, _FUNCTIONAL[node.target], *node.args, **node.kwargs)
    _copy_meta(node, plain)
    replace(node, plain)


def _set_device(node: fx.Node) -> bool:
    changed = False
    if isinstance(node.kwargs.get("device"), torch.device):
        node.update_kwarg("device", torch.device("cpu"))
        changed = True
    if "pin_memory" in node.kwargs:
        node.kwargs = {key: value for key, value in node.kwargs.items() if key != "pin_memory"}
        changed = True
    return changed


def _copy_meta(source: fx.Node, target: fx.Node) -> None:
    for key in ("nn_module_stack", "stack_trace"):
        if key in source.meta:
            target.meta[key] = source.meta[key]


def _drop_dead(graph: fx.Graph) -> int:
    count = 0
    for node in reversed(list(graph.nodes)):
        # what updates in place has an effect without users; verification refuses it
        if not node.users and node.op in ("call_function", "get_attr") and not is_update(node):
            graph.erase_node(node)
            count += 1
    return count
