"""The dynamic program for optimal static trees, for acceptance that may rise with the rank.

A node's children are the draft's best tokens in order, so a node that has the child of rank r also
has those of rank 0 … r - 1, however unlikely they are: a likely rank after an unlikely one has to
be paid for. T[d][b][n] is the most expected tokens, counted from a node of depth d on, of its
subtree of at most n nodes in which it has exactly b children, and B[d][n] is the best over b:

    T[d][0][n] = 1        T[d][b][n] = max over m of T[d][b - 1][n - m] + p[d][b - 1] · B[d + 1][m]

Depths that share a row and have the same number of levels below share a table. Where depth has no
limit, the table of the last row refers to itself at smaller n, so one table serves all depths.

Source: Sequoia, arXiv:2402.12374 §3.2, extended by the depth.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from specc.cost.acceptance import Rows, row_at

_Floats = NDArray[np.float64]
# n is cut into pieces, whose windows stay in the cache of one core
_PIECE = 64


@dataclass(frozen=True)
class _Layer:
    """Tables of one depth; n counts from 0, and no tree has 0 nodes.

    Args:
        by_children: [R + 1, N + 1] T, -inf where n nodes are too few for b children.
        best: [N + 1] B.
        gains: [R, N + 1] p[r] · B of the next depth.
    """

    by_children: _Floats
    best: _Floats
    gains: _Floats


class TreeTables:
    """Optimal trees of every size up to `num_nodes` and any depth limit.

    Args:
        rows: as `check_acceptance` returns them.
        num_nodes: most nodes, root included.
    """

    def __init__(self, rows: Rows, num_nodes: int) -> None:
        self._rows = rows
        self._num_nodes = num_nodes
        # row and levels below (None: no limit) → tables
        self._layers: dict[tuple[int, int | None], _Layer] = {}

    def expected(self, max_depth: int | None) -> _Floats:
        """[N + 1] expected tokens of the best tree of at most n nodes; n = 0 is -inf."""
        return self._layer(0, self._limit(max_depth)).best

    def parents(self, num_nodes: int, max_depth: int | None) -> list[int]:
        """Parent of each node of the best tree of at most `num_nodes`.

        A child comes after its parent and after the siblings of smaller rank. Nodes that would
        add nothing are left out.
        """
        limit = self._limit(max_depth)
        parents = [-1]
        # node, its depth, and how many nodes its subtree may have
        todo = [(0, 0, num_nodes)]
        while todo:
            node, depth, left = todo.pop()
            below = None if limit is None else limit - depth
            for size in _split(self._layer(depth, below), left):
                todo.append((len(parents), depth + 1, size))
                parents.append(node)
        return parents

    def _limit(self, max_depth: int | None) -> int | None:
        """None where the nodes run out first."""
        is_free = max_depth is None or max_depth >= self._num_nodes - 1
        return None if is_free else max_depth

    def _layer(self, depth: int, below: int | None) -> _Layer:
        """Tables of nodes of this depth with so many levels below."""
        wanted = (min(depth, len(self._rows) - 1), below)
        if wanted not in self._layers:
            # not by recursion: there may be a thousand levels
            for d, b in reversed(self._missing(depth, below)):
                self._layers[min(d, len(self._rows) - 1), b] = self._make(d, b)
        return self._layers[wanted]

    def _missing(self, depth: int, below: int | None) -> list[tuple[int, int | None]]:
        missing = []
        while (min(depth, len(self._rows) - 1), below) not in self._layers:
            missing.append((depth, below))
            if below == 0 or (below is None and depth >= len(self._rows) - 1):
                break
            depth, below = depth + 1, None if below is None else below - 1
        return missing

    def _make(self, depth: int, below: int | None) -> _Layer:
        row = np.array(row_at(self._rows, depth)[: self._num_nodes - 1])
        if below == 0:
            return _fill(row[:0], _ones(self._num_nodes))
        if below is None and depth >= len(self._rows) - 1:
            return _fill_endless(row, self._num_nodes)
        next_below = None if below is None else below - 1
        next_row = min(depth + 1, len(self._rows) - 1)
        return _fill(row, self._layers[next_row, next_below].best)


def _ones(num_nodes: int) -> _Floats:
    values = np.ones(num_nodes + 1)
    values[0] = -np.inf
    return values


def _gains(row: _Floats, best: _Floats) -> _Floats:
    gains = np.full((len(row), len(best)), -np.inf)
    gains[:, 1:] = row[:, None] * best[1:]
    return gains


def _fill(row: _Floats, next_best: _Floats) -> _Layer:
    """Tables of a depth whose next depth is known."""
    gains = _gains(row, next_best)
    tables = [_ones(len(next_best) - 1)]
    for gain in gains:
        tables.append(_best_sums(tables[-1], gain))
    by_children = np.stack(tables)
    return _Layer(by_children, by_children.max(0), gains)


def _best_sums(first: _Floats, second: _Floats) -> _Floats:
    """[N + 1] max over m of first[n - m] + second[m], 1 ≤ m ≤ n."""
    num_nodes = len(first) - 1
    padded = np.concatenate([first[::-1], np.full(num_nodes, -np.inf)])
    # windows[n - 1][m - 1] == first[n - m]
    windows = sliding_window_view(padded, num_nodes)[num_nodes:0:-1]
    sums = np.full(num_nodes + 1, -np.inf)
    for start in range(1, num_nodes + 1, _PIECE):
        stop = min(start + _PIECE, num_nodes + 1)
        sums[start:stop] = (windows[start - 1 : stop - 1, : stop - 1] + second[1:stop]).max(1)
    return sums


def _fill_endless(row: _Floats, num_nodes: int) -> _Layer:
    """Tables of a depth whose next depth has these tables, too: a subtree is always smaller."""
    best = _ones(num_nodes)
    by_children = np.full((len(row) + 1, num_nodes + 1), -np.inf)
    by_children[0] = best
    gains = np.full((len(row), num_nodes + 1), -np.inf)
    for n in range(1, num_nodes + 1):
        if n > 1:
            # first[n - m] for m = 1 … n - 1
            sums = by_children[:-1, n - 1 : 0 : -1] + gains[:, 1:n]
            by_children[1:, n] = sums.max(1, initial=-np.inf)
        best[n] = by_children[:, n].max()
        gains[:, n] = row * best[n]
    return _Layer(by_children, best, gains)


def _split(layer: _Layer, num_nodes: int) -> list[int]:
    """Nodes that each child's subtree gets, by rank; the least of them among equals."""
    sizes = []
    # the tables hold the maxima of these very sums, so the first maximum is found again
    for rank in range(int(layer.by_children[:, num_nodes].argmax()) - 1, -1, -1):
        fewer = layer.by_children[rank, num_nodes - 1 : 0 : -1]
        size = 1 + int((fewer + layer.gains[rank, 1:num_nodes]).argmax())
        sizes.append(size)
        num_nodes -= size
    return sizes[::-1]
