"""Graphs of operators that stand for what programs do: views, lists, several results, sizes."""

from __future__ import annotations

import operator
import random

import torch
from torch import fx

aten = torch.ops.aten
# rows come first and are many or few, columns are these
COLUMNS = 6


def random_graph(seed: int, num_nodes: int = 40) -> fx.Graph:
    """A graph over two inputs [n, COLUMNS] float32 whose values are all of that shape.

    Some values are read by nobody, some by views of views; some calls change what they are given.
    """
    return _Maker(seed).make(num_nodes)


class _Maker:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._graph = fx.Graph()
        self._values: list[fx.Node] = []
        # what may be written to: nobody's input, and no view that is expanded
        self._own: list[fx.Node] = []

    def make(self, num_nodes: int) -> fx.Graph:
        self._values = [self._graph.placeholder(name) for name in ("a", "b")]
        self._rows = self._call(aten.sym_size.int, self._values[0], 0)
        makers = [
            self._sum, self._scaled, self._turned, self._reshaped, self._joined, self._split,
            self._extremes, self._changed, self._sliced, self._stacked, self._expanded,
        ]  # fmt: skip
        for _ in range(num_nodes):
            self._random.choice(makers)()
        # not of the last ones alone: some values live long
        first, second = self._one(), self._one()
        self._graph.output(self._call(aten.add.Tensor, first, second))
        return self._graph

    def _call(self, target, *args, **kwargs) -> fx.Node:
        return self._graph.call_function(target, args, kwargs)

    def _one(self) -> fx.Node:
        return self._random.choice(self._values)

    def _add(self, node: fx.Node, is_own: bool = True) -> None:
        self._values.append(node)
        if is_own:
            self._own.append(node)

    def _sum(self) -> None:
        self._add(self._call(aten.add.Tensor, self._one(), self._one(), alpha=0.5))

    def _scaled(self) -> None:
        # no sum, and no function that is rounded: all kernels have the same bits
        scaled = self._call(aten.mul.Tensor, self._one(), 1.5)
        self._add(self._call(aten.clamp.default, scaled, -4.0, 4.0))

    def _turned(self) -> None:
        turned = self._call(aten.transpose.int, self._one(), 0, 1)
        again = self._call(aten.transpose.int, turned, 0, 1)
        self._add(self._call(aten.contiguous.default, again) if self._flip() else again, False)

    def _reshaped(self) -> None:
        count = self._call(operator.mul, self._rows, COLUMNS)
        flat = self._call(aten.reshape.default, self._one(), [count])
        self._add(self._call(aten.reshape.default, flat, [self._rows, -1]), False)

    def _joined(self) -> None:
        both = self._call(aten.cat.default, [self._one(), self._one()], 1)
        begin = self._random.randrange(COLUMNS)
        self._add(self._call(aten.slice.Tensor, both, 1, begin, begin + COLUMNS), False)

    def _split(self) -> None:
        both = self._call(aten.cat.default, [self._one(), self._one(), self._one()], 1)
        parts = self._call(aten.split.Tensor, both, COLUMNS, 1)
        self._add(self._call(operator.getitem, parts, self._random.randrange(3)), False)

    def _extremes(self) -> None:
        both = self._call(aten.max.dim, self._one(), 1, True)
        values = self._call(operator.getitem, both, 0)
        places = self._call(operator.getitem, both, 1)
        taken = values if self._flip() else self._call(aten.to.dtype, places, torch.float32)
        self._add(self._call(aten.add.Tensor, self._one(), taken))

    def _changed(self) -> None:
        if not self._own:
            return
        own = self._random.choice(self._own)
        rows = self._call(aten.arange.default, self._rows, device=torch.device("cpu"))
        column = self._call(aten.select.int, self._one(), 1, self._random.randrange(COLUMNS))
        wide = self._call(aten.unsqueeze.default, column, 1)
        wide = self._call(aten.clone.default, self._call(aten.expand.default, wide, [-1, COLUMNS]))
        self._add(self._call(aten.index_put_.default, own, [rows], wide), False)

    def _sliced(self) -> None:
        begin = self._random.randrange(COLUMNS)
        left = self._call(aten.slice.Tensor, self._one(), 1, 0, begin)
        right = self._call(aten.slice.Tensor, self._one(), 1, begin, COLUMNS)
        self._add(self._call(aten.cat.default, [left, right], 1))

    def _stacked(self) -> None:
        both = self._call(aten.stack.default, [self._one(), self._one()], 0)
        self._add(self._call(aten.select.int, both, 0, self._random.randrange(2)), False)

    def _expanded(self) -> None:
        column = self._call(aten.select.int, self._one(), 1, self._random.randrange(COLUMNS))
        wide = self._call(aten.unsqueeze.default, column, 1)
        self._add(self._call(aten.expand.default, wide, [self._rows, COLUMNS]), False)

    def _flip(self) -> bool:
        return self._random.random() < 0.5
