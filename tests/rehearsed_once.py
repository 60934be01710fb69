"""Shapes of graphs are computed once in a process, and not by every engine that has the graph."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import pytest
from torch import Tensor, fx

from specc.runtime.backends.eager.rehearsal import Rehearsal

CHECK = Rehearsal.check
_known: set[Hashable] = set()


@contextlib.contextmanager
def rehearsed_once() -> Iterator[None]:
    """Look at a graph when it first runs with so many dimensions, and not when its inputs grow.

    A look takes as long as tens of passes of a tiny model. What it sees of larger inputs is tested
    in tests/runtime/backends/eager/test_rehearsal.py, with `CHECK` in its place again.
    """

    def check(self: Any, inputs: Sequence[Tensor | None]) -> None:
        if "described" not in vars(self):
            self.described = _described(self)
        key = self.described, tuple(None if x is None else (x.dim(), x.dtype) for x in inputs)
        if key not in _known:
            CHECK(self, inputs)
            _known.add(key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rehearsal, "check", check)
        yield


def _described(rehearsal: Any) -> Hashable:
    """All that a look depends on but its inputs; where that is not known, an object of its own."""
    called = [getattr(call, "__self__", None) for call in rehearsal._calls.values()]
    graphs = [rehearsal._graph, *(getattr(model, "graph", None) for model in called)]
    if not all(isinstance(graph, fx.Graph) for graph in graphs):
        return object()
    bound = [rehearsal._bound]
    bound += [getattr(getattr(model, "_rehearsal", None), "_bound", []) for model in called]
    text = hashlib.sha256(rehearsal._name.encode())
    text.update(repr([[(x.shape, x.stride(), x.dtype) for x in one] for one in bound]).encode())
    for graph in graphs:
        for node in graph.nodes:
            text.update(f"{node.op} {node.target} {node.args} {node.kwargs}\n".encode())
    return text.digest()
