"""FX graphs as JSON: readable, diffable, and without pickle.

Only calls of operators, a few `operator` functions and named modules can be stored, so that loading
a graph cannot execute anything else; which operators, and with what, `graph_checks` says.
"""

from __future__ import annotations

import keyword
import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx

from specc.artifact.graph_checks import MOST_NODES, check_graph
from specc.artifact.graph_operators import KNOWN, PYTHON, python_name
from specc.errors import EngineError, UnsupportedGraphError

# operators of models as they are traced, before passes have replaced what no engine holds
_NAMESPACES = ("aten", "prims", "specc")

_MALFORMED = (
    KeyError,
    TypeError,
    AttributeError,
    ValueError,
    RuntimeError,
    AssertionError,
    SyntaxError,
    RecursionError,
)


def target_name(target: Any) -> str:
    """Stable name of a call_function target, e.g. `aten.linear.default` or `operator.getitem`.

    Raises:
        UnsupportedGraphError: the target is outside the namespaces that a program may call.
    """
    if isinstance(target, torch._ops.OpOverload) and target.namespace in _NAMESPACES:
        return str(target)
    if (name := python_name(target)) is not None:
        return name
    raise UnsupportedGraphError(
        f"the graph calls {target}",
        f"operators of {', '.join(_NAMESPACES)} or {', '.join(sorted(PYTHON))}",
        "report the architecture: a pass has to replace this operator",
    )


def graph_to_json(graph: fx.Graph) -> dict[str, Any]:
    """Encode a graph of placeholders, calls and one output.

    Raises:
        UnsupportedGraphError: an operator or an argument type that a program may not hold.
    """
    nodes: list[dict[str, Any]] = []
    names: dict[fx.Node, str] = {}
    for node in graph.nodes:
        names.setdefault(node, node.name)
        if node.op == "output":
            return {"nodes": nodes, "output": _encode(node.args[0], names)}
        entry: dict[str, Any] = {"name": node.name, "op": node.op}
        if node.op == "placeholder":
            # fx renames a placeholder that shadows a builtin; inputs are bound by target
            entry["name"] = names[node] = str(node.target)
        if node.op == "call_function":
            entry["target"] = target_name(node.target)
        elif node.op == "call_module":
            entry["target"] = node.target
        elif node.op != "placeholder":
            raise UnsupportedGraphError(
                f"node {node.name} is a {node.op}",
                "placeholders, calls and one output",
                "report the architecture: a pass has to remove this node",
            )
        if node.args:
            entry["args"] = [_encode(arg, names) for arg in node.args]
        if node.kwargs:
            entry["kwargs"] = {k: _encode(arg, names) for k, arg in node.kwargs.items()}
        if (value := describe_value(node.meta.get("val"))) is not None:
            entry["val"] = value
        nodes.append(entry)
    raise UnsupportedGraphError("a graph without an output", "one output", "report this")


def store_graph(graph: fx.Graph) -> dict[str, Any]:
    """Encode a graph that an engine is to hold.

    Raises:
        UnsupportedGraphError: `graph_to_json` refuses it, or whatever loads the engine would.
    """
    try:
        check_graph(graph)
    except ValueError as error:
        raise UnsupportedGraphError(
            str(error)[:1].upper() + str(error)[1:],
            "operators and arguments that programs of engines may hold",
            "report the architecture: a pass has to replace this operator",
        ) from error
    return graph_to_json(graph)


def graph_from_json(
    data: Mapping[str, Any],
    modules: Mapping[str, torch.nn.Module] | None = None,
    *,
    keeps_names: bool = False,
) -> fx.GraphModule:
    """Decode a graph, and have what torch runs it as.

    Args:
        data: of `graph_to_json`.
        modules: what its call_module nodes name.
        keeps_names: nodes have their names of before, not new ones.
    Raises:
        EngineError: an unknown operator, an unknown node, or a malformed entry.
    """
    named = dict(modules or {})
    graph = read_graph(data, named, keeps_names=keeps_names)
    try:
        return fx.GraphModule(named, graph)
    except _MALFORMED as error:
        raise _cannot_be_decoded(error) from error


def read_graph(
    data: Mapping[str, Any], modules: Collection[str] = (), *, keeps_names: bool = False
) -> fx.Graph:
    """`graph_from_json` without Python code that would run it.

    Args:
        data: of `graph_to_json`.
        modules: names that its call_module nodes may have.
        keeps_names: see `graph_from_json`.
    Raises:
        EngineError: see `graph_from_json`.
    """
    graph = fx.Graph()
    env: dict[str, fx.Node] = {}
    try:
        if len(data["nodes"]) > MOST_NODES:
            raise ValueError(f"{len(data['nodes'])} nodes, at most {MOST_NODES}")
        for entry in data["nodes"]:
            name = _identifier(entry["name"])
            if name in env:
                raise ValueError(f"two nodes are called {name}")
            args = tuple(_decode(arg, env) for arg in entry.get("args", ()))
            kwargs = {
                _identifier(key): _decode(arg, env) for key, arg in entry.get("kwargs", {}).items()
            }
            if entry["op"] == "placeholder":
                node = graph.placeholder(name)
            elif entry["op"] == "call_module":
                if entry["target"] not in modules:
                    raise ValueError(f"no module {entry['target']}")
                node = graph.call_module(entry["target"], args, kwargs)
            elif entry["op"] == "call_function":
                node = graph.create_node(
                    "call_function",
                    resolve_target(entry["target"]),
                    args,
                    kwargs,
                    name=name if keeps_names else None,
                )
            else:
                raise ValueError(f"node {name} is a {entry['op']}")
            if "val" in entry:
                node.meta["described"] = entry["val"]
            env[name] = node
        graph.output(_decode(data["output"], env))
        check_graph(graph)
        return graph
    except _MALFORMED as error:
        raise _cannot_be_decoded(error) from error


def _cannot_be_decoded(error: Exception) -> EngineError:
    return EngineError(
        f"a program that cannot be decoded: {type(error).__name__}: {error}",
        "a graph written by this version of specc",
        "compile the engine again",
    )


def resolve_target(name: str) -> Any:
    """The operator that has a name of `target_name`.

    Raises:
        EngineError: the name is not one that a program may call, or torch does not have it.
    """
    if name in PYTHON:
        return PYTHON[name]
    if name in KNOWN:
        namespace, packet, overload = name.split(".")
        found = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload, None)
        if found is not None:
            return found
    raise EngineError(
        f"operator {name!r:.100}",
        "one that programs of engines call (specc/artifact/graph_operators.py)",
        "compile the engine again with the installed versions",
    )


def describe_value(value: Any) -> str | None:
    """A node's value as `float32[1, s0, 64]`; sizes that are not fixed keep their symbol."""
    if isinstance(value, torch.Tensor):
        return f"{_short(value.dtype)}[{', '.join(str(size) for size in value.shape)}]"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(describe_value(item) or "None" for item in value) + ")"
    return str(value) if isinstance(value, (torch.SymInt, int)) else None


def _short(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _identifier(name: Any) -> str:
    """Names become Python code in fx: nothing but plain identifiers may."""
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"the name {name!r}")
    return name


def _encode(arg: Any, names: Mapping[fx.Node, str]) -> Any:
    if arg is None or isinstance(arg, (bool, int, str)):
        return arg
    if isinstance(arg, float):
        return arg if math.isfinite(arg) else {"float": str(arg)}
    if isinstance(arg, fx.Node):
        return {"node": names[arg]}
    if isinstance(arg, list):
        return [_encode(item, names) for item in arg]
    if isinstance(arg, tuple):
        return {"tuple": [_encode(item, names) for item in arg]}
    if isinstance(arg, dict):
        return {"dict": {key: _encode(item, names) for key, item in arg.items()}}
    if isinstance(arg, slice):
        return {"slice": [_encode(item, names) for item in (arg.start, arg.stop, arg.step)]}
    for kind in ("dtype", "layout", "memory_format"):
        if isinstance(arg, getattr(torch, kind)):
            return {kind: _short(arg)}
    if isinstance(arg, torch.device):
        return {"device": str(arg)}
    raise UnsupportedGraphError(
        f"an argument of type {type(arg).__name__}: {arg}",
        "numbers, strings, nodes, lists, dtypes, layouts, memory formats or devices",
        "report the architecture: a pass has to remove this argument",
    )


def _decode(data: Any, env: Mapping[str, fx.Node]) -> Any:
    if isinstance(data, list):
        return [_decode(item, env) for item in data]
    if not isinstance(data, dict):
        return data
    ((kind, value),) = data.items()
    if kind == "node":
        return env[value]
    if kind == "float":
        return float(value)
    if kind == "tuple":
        return tuple(_decode(item, env) for item in value)
    if kind == "dict":
        return {key: _decode(item, env) for key, item in value.items()}
    if kind == "slice":
        return slice(*(_decode(item, env) for item in value))
    if kind == "device":
        return torch.device(value)
    if kind in ("dtype", "layout", "memory_format"):
        decoded = getattr(torch, value)
        if isinstance(decoded, getattr(torch, kind)):
            return decoded
    raise ValueError(f"unknown argument {data}")
