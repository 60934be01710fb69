"""Shapes of a graph before it runs: whether it can run at all, and what it would take.

A stored graph multiplies and joins what it is given as it likes; how much memory that takes shows
only where its inputs are known. So it is computed without values, on torch's meta device, before it
runs with larger inputs than before: in milliseconds, and without memory.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from specc.artifact.graph_operators import is_known
from specc.errors import EngineError, SpeccError
from specc.kernels.ranks import rank_error
from specc.runtime.backends.program_files import last_used
from specc.system.files import format_bytes

# values that are alive at a time, besides inputs: so much, and so many times what the inputs take
_LEAST_BYTES, _TIMES = 1 << 30, 4
_META = torch.device("meta")


@functools.cache
def _import_shapes() -> None:
    """Let torch import what it computes shapes with, 2 s of it, where an engine is loaded.

    In its first pass ranks would wait for each other meanwhile, and give each other up.
    """
    row = torch.empty(1, 1, device=_META)
    torch.cat([row @ row] * 2)


class Rehearsal:
    """Computes the shapes of a graph's values, where its inputs are larger than they were.

    Args:
        graph: of operators that engines call, and of calls of modules that have a method
            `rehearse`; with others, which a backend has put there, nothing is computed.
        modules: name → module.
        bound: of its first inputs, those that stay the same.
    """

    def __init__(
        self,
        name: str,
        graph: fx.Graph,
        modules: Mapping[str, nn.Module] | None = None,
        bound: Sequence[Tensor] = (),
    ) -> None:
        _import_shapes()
        self._name, self._graph = name, graph
        called = {str(node.target) for node in graph.find_nodes(op="call_module")}
        self._calls = {
            key: getattr(module, "rehearse", None) for key, module in (modules or {}).items()
        }
        self._is_known = all(self._calls.get(key) is not None for key in called) and all(
            is_known(node.target) for node in graph.nodes if node.op == "call_function"
        )
        self._bound = [_as_meta(value) for value in bound]
        self._bound_bytes = sum(value.nbytes for value in bound)
        # dimensions of the inputs → the largest sizes of each
        self._largest: dict[tuple[int, ...], list[int]] = {}
        (output,) = graph.find_nodes(op="output")
        nodes = [node for node in graph.nodes if node is not output]
        self._dead = last_used(nodes, set(output.all_input_nodes))

    def check(self, inputs: Sequence[Tensor | None]) -> None:
        """Look at shapes, unless inputs as large as these have been seen.

        Raises:
            EngineError: the graph cannot run with these, or takes memory that no program does.
        """
        if not self._is_known:
            return
        shapes = [() if value is None else tuple(value.shape) for value in inputs]
        # inputs that are left out, or have other dimensions, are other calls
        kind = tuple(map(len, shapes))
        sizes = [size for shape in shapes for size in shape]
        largest = self._largest.get(kind)
        if largest is not None and all(map(operator.le, sizes, largest)):
            return
        self.run([None if value is None else _as_meta(value) for value in inputs])
        self._largest[kind] = list(map(max, sizes, largest or sizes))

    @torch.inference_mode()
    def run(self, inputs: Sequence[Tensor | None]) -> Any:
        """The result, without values.

        Args:
            inputs: after those that are bound, on the meta device.
        Raises:
            EngineError: see `check`.
        """
        given = iter((*self._bound, *inputs))
        most = _LEAST_BYTES + _TIMES * (
            self._bound_bytes + sum(x.nbytes for x in inputs if x is not None)
        )
        values: dict[fx.Node, Any] = {}
        alive = _Alive(most)
        for node in self._graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            if node.op == "output":
                return args[0]
            try:
                values[node] = self._call(node, args, kwargs)
                alive.add(values[node])
            except Exception as error:
                raise cannot_run(f"{node.name} of {self._name}", error) from error
            for dead in self._dead[node]:
                if dead.op != "placeholder":
                    alive.remove(values[dead])
        return None

    def _call(self, node: fx.Node, args: Any, kwargs: dict[str, Any]) -> Any:
        if node.op == "call_module":
            call = self._calls[str(node.target)]
            assert call is not None, "it is known"
            return call(*args, **kwargs)
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _META}
        return node.target(*args, **kwargs)  # type: ignore[operator]


class _Alive:
    """Bytes of the values that are alive; views share theirs."""

    def __init__(self, most: int) -> None:
        self._most, self._count, self._bytes = most, Counter[int](), 0

    def add(self, value: Any) -> None:
        for storage in _storages(value):
            key = storage._cdata
            self._bytes += storage.nbytes() if not self._count[key] else 0
            self._count[key] += 1
        if self._bytes > self._most:
            found, most = format_bytes(self._bytes), format_bytes(self._most)
            raise ValueError(f"values of {found} at a time; at most {most}")

    def remove(self, value: Any) -> None:
        for storage in _storages(value):
            key = storage._cdata
            self._count[key] -= 1
            if not self._count[key]:
                self._bytes -= storage.nbytes()


def _storages(value: Any) -> list[torch.UntypedStorage]:
    values = value if isinstance(value, list | tuple) else (value,)
    return [item.untyped_storage() for item in values if isinstance(item, Tensor)]


def _as_meta(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)


def cannot_run(what: str, error: Exception) -> Exception:
    """The error of a graph that failed; that of a rank where one is to blame."""
    if isinstance(error, SpeccError):
        return error
    lines = str(error).strip().splitlines()
    return rank_error(error) or EngineError(
        f"{what} cannot run: {type(error).__name__}: {lines[0] if lines else ''}",
        "a graph that this version of specc has written",
        "compile the engine again",
    )
