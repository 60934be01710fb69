"""Trace equal layers once: the others get copies of the first one's nodes, while it is traced.

Tracing costs milliseconds for each operator: shapes are symbols, and every operator is computed
with them. Copying a node costs a fiftieth of that. What makes two layers equal is in
`equal_layers`; in addition they have to be called alike: with tensors of the same kind, and the
same of all else. Whatever is not covered is traced.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental import proxy_tensor
from torch.utils import _pytree as pytree

from specc.passes.frontend.equal_layers import (
    Place,
    WatchedAttributes,
    groups_of_layers,
    read_the_same,
    structure_of,
)
from specc.passes.values import describe_tensor

# arguments besides tensors that say all by their value
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


@contextlib.contextmanager
def equal_layers_once(model: nn.Module) -> Iterator[Counts]:
    """While a model is traced, trace one of each kind of its layers and copy the others.

    Args:
        model: that is traced by `torch.export` meanwhile; as it was, afterwards.
    Yields:
        how many layers were traced and copied, so far.
    """
    counts = Counts()
    with contextlib.ExitStack() as stack:
        for layers in groups_of_layers(model):
            watched = WatchedAttributes(layers)
            if not watched.can_be_watched:
                continue
            watched.begin()
            stack.callback(watched.end)
            group = _Group(watched, counts)
            for layer in layers:
                forward = layer.forward
                vars(layer)["forward"] = functools.wraps(forward)(
                    functools.partial(group.call, layer, forward)
                )
                stack.callback(vars(layer).pop, "forward")
        yield counts


@dataclass
class Counts:
    """Layers that were traced, and those whose nodes are copies."""

    traced: int = 0
    copied: int = 0


@dataclass(frozen=True)
class _Call:
    """How a layer is called.

    Args:
        key: all that has to be the same in calls of equal layers.
        tensors: its arguments that are tensors, then parameters and buffers of the layer.
        num_arguments: how many of them are arguments.
        leaves: its arguments, tensors and others.
    """

    key: Hashable
    tensors: tuple[Tensor, ...]
    nodes: tuple[fx.Node, ...]
    num_arguments: int
    leaves: tuple[Any, ...]

    def is_like(self, after: _Call) -> bool:
        """Whether the layer has left its arguments and itself as they were."""
        pairs = ((self.leaves, after.leaves), (self.tensors, after.tensors))
        return all(len(old) == len(new) and all(map(operator.is_, old, new)) for old, new in pairs)


@dataclass(frozen=True)
class _Traced:
    """A layer that was traced, and what its nodes come from.

    Args:
        read: attributes that differ between layers of the group, and that its forward has read.
        made: its nodes, in order, but for sizes that no other node of it takes.
        num_calls: of the modules in it, by path.
        spec: how its results nest.
        results: of it: tensors, and plain values.
        result_nodes: of these; None of plain values.
        renamed: place of a tensor in the call → node that it is of afterwards: what converts
            a tensor to the type that it has returns that tensor.
    """

    layer: nn.Module
    path: str
    read: frozenset[Place]
    key: Hashable
    sources: tuple[fx.Node, ...]
    made: tuple[fx.Node, ...]
    num_calls: Mapping[str, int]
    spec: pytree.TreeSpec
    results: tuple[Any, ...]
    result_nodes: tuple[fx.Node | None, ...]
    renamed: Mapping[int, fx.Node]


class _Group:
    """Layers of one class, of which some may be equal."""

    def __init__(self, watched: WatchedAttributes, counts: Counts) -> None:
        self._watched, self._counts = watched, counts
        self._traced: list[_Traced] = []
        self._called: set[int] = set()

    def call(self, layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What the forward of a layer returns, whose nodes are in the graph afterwards."""
        is_again = id(layer) in self._called
        self._called.add(id(layer))
        tracer: Any = getattr(proxy_tensor.get_proxy_mode(), "tracer", None)
        stack: Any = getattr(tracer, "module_stack", None)
        call = None if is_again or not stack else _describe(tracer, layer, args, kwargs)
        if call is None:
            self._counts.traced += 1
            return forward(*args, **kwargs)
        for traced in self._traced:
            if traced.key == call.key and (
                read_the_same(traced.read, traced.layer, layer)
                and _correspond(traced.sources, call.nodes)
            ):
                self._counts.copied += 1
                return _copy(tracer, traced, call)
        self._counts.traced += 1
        self._watched.take_read()
        first, calls = _last(tracer.graph), dict(tracer.num_calls)
        result = forward(*args, **kwargs)
        # where it found that two sizes are one, those of its arguments are described anew
        read, after = self._watched.take_read(), _describe(tracer, layer, args, kwargs)
        made = tuple(_after(first, tracer.graph))
        if after is None or not call.is_like(after) or not _is_closed(made, call):
            return result
        found = _results(tracer, result, made, call)
        if found is None:
            return result
        spec, leaves, nodes = found
        renamed = {i: new for i, new in enumerate(after.nodes) if new is not call.nodes[i]}
        path = next(reversed(stack.values()))[0]
        num_calls = {k: n for k, n in tracer.num_calls.items() if calls.get(k, 0) != n}
        kept = _without_unused_sizes(made, nodes)
        traced = _Traced(
            layer, path, read, after.key, call.nodes, kept, num_calls, spec, leaves, nodes, renamed
        )
        self._traced.append(traced)
        return result


def _describe(tracer: Any, layer: nn.Module, args: Any, kwargs: Any) -> _Call | None:
    """A call of a layer; None where an argument is neither a tensor of the graph nor plain."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    arguments = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves):
        return None
    own: dict[int, Tensor] = {}
    for module in layer.modules():
        for value in (*module._parameters.values(), *module._buffers.values()):
            if value is not None:
                own[id(value)] = value
    tensors = (*arguments, *own.values())
    nodes = tuple(_node_of(tracer, tensor) for tensor in tensors)
    if any(node is None for node in nodes):
        return None
    given = tuple(
        describe_tensor(leaf) if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in leaves
    )
    key = structure_of(layer), repr(spec), given
    return _Call(key, tensors, nodes, len(arguments), tuple(leaves))  # type: ignore[arg-type]


def _node_of(tracer: Any, tensor: Tensor) -> fx.Node | None:
    slot = proxy_tensor.get_proxy_slot(tensor, tracer, None)
    return None if slot is None or slot.constant is not None else slot.proxy.node


def _correspond(first: Sequence[fx.Node], second: Sequence[fx.Node]) -> bool:
    """Whether each node of one has one of the other, and the other way round."""
    pairs = set(zip(first, second, strict=True))
    return len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})


def _last(graph: fx.Graph) -> fx.Node:
    return next(iter(reversed(graph.nodes)))


def _after(node: fx.Node, graph: fx.Graph) -> Iterator[fx.Node]:
    last = _last(graph)
    while node is not last:
        node = node.next
        yield node


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymBool | torch.SymFloat)


def _is_closed(made: Sequence[fx.Node], call: _Call) -> bool:
    """Whether all that nodes of a layer take is its own, or a size, and all that they change."""
    known, given = {*made, *call.nodes}, {_storage(tensor) for tensor in call.tensors}
    for node in made:
        if node.op != "call_function" or "unbacked_bindings" in node.meta:
            return False
        if _is_size(node):
            continue
        if not all(item in known or _is_size(item) for item in node.all_input_nodes):
            return False
        if node.target is operator.getitem:
            continue
        schema = getattr(node.target, "_schema", None)
        if schema is None or any(_storage(value) in given for value in _changed(node, schema)):
            return False
    return True


def _changed(node: fx.Node, schema: Any) -> Iterator[Tensor]:
    """What a call changes in place."""
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            for item in pytree.tree_leaves(given):
                if isinstance(item, fx.Node):
                    yield item.meta["val"]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _without_unused_sizes(
    made: Sequence[fx.Node], results: Sequence[fx.Node | None]
) -> tuple[fx.Node, ...]:
    """Nodes to copy: without sizes that none of them takes, and those of what is not its own."""
    used = {node for node in results if node is not None}
    kept = []
    for node in reversed(made):
        if _is_size(node) and node not in used:
            continue
        kept.append(node)
        used.update(node.all_input_nodes)
    return tuple(reversed(kept))


def _results(
    tracer: Any, result: Any, made: Sequence[fx.Node], call: _Call
) -> tuple[pytree.TreeSpec, tuple[Any, ...], tuple[fx.Node | None, ...]] | None:
    leaves, spec = pytree.tree_flatten(result)
    known = {*made, *call.nodes[: call.num_arguments]}
    nodes: list[fx.Node | None] = []
    for leaf in leaves:
        node = _node_of(tracer, leaf) if isinstance(leaf, Tensor) else None
        if node not in known if isinstance(leaf, Tensor) else not isinstance(leaf, _PLAIN):
            return None
        nodes.append(node)
    return spec, tuple(leaves), tuple(nodes)


def _copy(tracer: Any, traced: _Traced, call: _Call) -> Any:
    """Put copies of a layer's nodes at the end of the graph; the results of the other layer."""
    graph, path = tracer.graph, next(reversed(tracer.module_stack.values()))[0]
    found = dict(zip(traced.sources, call.nodes, strict=True))

    def moved(place: str) -> str:
        return path + place.removeprefix(traced.path) if _is_within(place, traced.path) else place

    for node in traced.made:
        arguments = fx.map_arg((node.args, node.kwargs), lambda item: found.get(item, item))
        copy = graph.create_node(node.op, node.target, *arguments, node.name)
        copy.meta = dict(node.meta)
        modules = node.meta.get("nn_module_stack", {})
        copy.meta["nn_module_stack"] = {
            moved(key): (moved(place), kind) for key, (place, kind) in modules.items()
        }
        found[node] = copy
    for place, number in traced.num_calls.items():
        tracer.num_calls[moved(place)] = number
    tensors = dict(zip(call.nodes, call.tensors, strict=True))
    for i, node in traced.renamed.items():
        tensors[found[node]] = call.tensors[i]
        _track(tracer, call.tensors[i], found[node])
    results: list[Any] = []
    for leaf, node in zip(traced.results, traced.result_nodes, strict=True):
        if node is None:
            results.append(leaf)
            continue
        own = found[node]
        if own not in tensors:
            tensors[own] = proxy_tensor.extract_val(leaf)
            _track(tracer, tensors[own], own)
        results.append(tensors[own])
    return pytree.tree_unflatten(results, traced.spec)


def _track(tracer: Any, tensor: Tensor, node: fx.Node) -> None:
    proxy_tensor.track_tensor_tree(tensor, fx.Proxy(node, tracer), constant=None, tracer=tracer)


def _is_within(place: str, path: str) -> bool:
    return place == path or place.startswith((f"{path}.", f"{path}@"))
