"""Attention sums in plain decoding's order: a node of a tree has the bits of its path alone.

Each node of each tree is computed once more as plain decoding would: by itself, on one thread,
after a cache where its ancestors are committed rows. Wherever they lie in the tree's region, and
whatever else is in the pass, the output must be the same bits.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from specc.kernels.reference.kv_rows import store_rows
from tests.kernels.attention_loops import to_words

BLOCK = 16


pytestmark = pytest.mark.usefixtures("native_operators", "one_thread_afterwards")


@dataclass(frozen=True)
class Pass:
    """A batch of trees after committed rows.

    Args:
        lengths: committed rows of each sequence.
        parents: of each node of each tree, -1 of the root.
        heads, kv_heads, dim, value_dim: shapes.
        dtype: of queries, and of caches unless they hold int8.
        int8: whether caches hold int8.
        options: window, sink, softcap and chunk of the operator.
        sinks, slopes: whether heads have any.
    """

    lengths: tuple[int, ...]
    parents: tuple[tuple[int, ...], ...]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    value_dim: int = 32
    dtype: torch.dtype = torch.float32
    int8: bool = False
    options: tuple[tuple[str, float], ...] = ()
    sinks: bool = False
    slopes: bool = False

    def check(self, *threads: int) -> None:
        """Every node, computed by as many threads in one pass, equals itself alone."""
        torch.manual_seed(0)
        torch.set_num_threads(1)  # of the oracle
        count = sum(map(len, self.parents))
        rows = [
            self._rows(n + len(tree)) for n, tree in zip(self.lengths, self.parents, strict=True)
        ]
        q = torch.randn(self.heads, count, self.dim).to(self.dtype)
        alone = self._alone(q, rows)
        for number in threads:
            torch.set_num_threads(number)
            together = self._together(q, rows)
            wrong = (together != alone).any(dim=-1).any(dim=0).nonzero().flatten().tolist()
            assert not wrong, f"{len(wrong)} of {count} nodes on {number} threads: {wrong[:8]}"

    def _rows(self, count: int) -> tuple[Tensor, Tensor]:
        """K and V [count, HK, D] of a sequence: committed rows, then nodes."""
        return tuple(  # type: ignore[return-value]
            torch.randn(count, self.kv_heads, dim).to(self.dtype)
            for dim in (self.dim, self.value_dim)
        )

    def _together(self, q: Tensor, rows: list[tuple[Tensor, Tensor]]) -> Tensor:
        slots, positions, words, starts = [], [], [], [0]
        num_words = max(-(-len(tree) // 64) for tree in self.parents)
        for length, tree in zip(self.lengths, self.parents, strict=True):
            for node in range(len(tree)):
                path = path_of(tree, node)
                slots.append(length + node)
                positions.append(length + len(path) - 1)
                words.append(to_words(frozenset(path), num_words))
            starts.append(len(slots))
        return self._call(
            q,
            [(k[:n], v[:n]) for n, (k, v) in zip(self.lengths, rows, strict=True)],
            [(k[n:], v[n:]) for n, (k, v) in zip(self.lengths, rows, strict=True)],
            starts, positions, slots, words,
        )  # fmt: skip

    def _alone(self, q: Tensor, rows: list[tuple[Tensor, Tensor]]) -> Tensor:
        outputs = []
        for length, tree, (k, v) in zip(self.lengths, self.parents, rows, strict=True):
            for node in range(len(tree)):
                path = path_of(tree, node)
                before = list(range(length)) + [length + n for n in path[:-1]]
                own = slice(length + node, length + node + 1)
                first = len(outputs)
                at = len(before)
                outputs.append(
                    self._call(
                        q[:, first : first + 1],
                        [(k[before], v[before])],
                        [(k[own], v[own])],
                        [0, 1], [at], [at], [[1]],
                    )
                )  # fmt: skip
        return torch.cat(outputs, dim=1)

    def _call(
        self,
        q: Tensor,
        committed: list[tuple[Tensor, Tensor]],
        nodes: list[tuple[Tensor, Tensor]],
        starts: list[int],
        positions: list[int],
        slots: list[int],
        words: list[list[int]],
    ) -> Tensor:
        needed = [len(k) + len(n) for (k, _), (n, _) in zip(committed, nodes, strict=True)]
        per_sequence = -(-max(needed) // BLOCK)
        table = torch.arange(len(committed) * per_sequence).view(-1, per_sequence).flip(1)
        caches = []
        for which, dim in enumerate((self.dim, self.value_dim)):
            cache = torch.full((table.numel(), BLOCK, self.kv_heads, dim), float("nan"))
            for b, pair in enumerate(committed):
                at = torch.arange(len(pair[which]))
                cache[table[b][at // BLOCK], at % BLOCK] = pair[which].float()
            caches.append(store_rows(cache, torch.int8) if self.int8 else cache.to(self.dtype))
        k, v = (torch.cat([pair[i] for pair in nodes]).transpose(0, 1) for i in range(2))
        sinks = torch.linspace(-1, 2, self.heads).to(self.dtype) if self.sinks else None
        slopes = 0.5 * 0.7 ** torch.arange(self.heads).float() if self.slopes else None
        return torch.ops.specc_cpu.tree_attention(
            q, k, v, *caches,
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(positions, dtype=torch.int64),
            torch.tensor(slots, dtype=torch.int32),
            torch.tensor([len(k) for k, _ in committed], dtype=torch.int32),
            torch.tensor(words, dtype=torch.int64),
            table.int(), sinks, slopes,
            scale=self.dim**-0.5,
            **dict(self.options),
        )  # fmt: skip


def path_of(tree: tuple[int, ...], node: int) -> list[int]:
    """A node's ancestors and itself, from the root on."""
    path = [node]
    while tree[path[-1]] >= 0:
        path.append(tree[path[-1]])
    return path[::-1]


def bushy(count: int, seed: int) -> tuple[int, ...]:
    """A tree whose paths leave out many of the nodes between, and grow long."""
    chooser = random.Random(seed)
    return tuple(chooser.randrange(max(0, i - 5), i) if i else -1 for i in range(count))


def static(*widths: int) -> tuple[int, ...]:
    """tree-3-2-1 and its like: levels in order."""
    parents, level = [-1], [0]
    for width in widths:
        below = []
        for parent in level:
            for _ in range(width):
                below.append(len(parents))
                parents.append(parent)
        level = below
    return tuple(parents)


TREES = (static(3, 2, 1), static(2, 2, 2, 2), bushy(70, 1), bushy(200, 2), tuple(range(-1, 40)))
DTYPES = [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)]
IDS = ["float32", "bfloat16", "int8"]


@pytest.mark.parametrize(("dtype", "int8"), DTYPES, ids=IDS)
@pytest.mark.parametrize("length", [0, 5, 40, 61, 64, 120, 250, 255, 256, 318, 700])
def test_where_a_tree_begins(length, dtype, int8):
    """Whatever is a tile or a piece of the line of tiles in plain decoding is one in a tree."""
    for tree in TREES:
        Pass((length,), (tree,), dtype=dtype, int8=int8).check(1)


@pytest.mark.parametrize(("dtype", "int8"), DTYPES, ids=IDS)
def test_threads_and_batches(dtype, int8):
    """Threads cut between pieces that plain decoding has, too, and merge them in its order."""
    trees = tuple(bushy(n, n) for n in (9, 30, 1, 80))
    shapes = {"dim": 64, "value_dim": 48, "dtype": dtype, "int8": int8}
    Pass((2300, 250, 900, 61), trees, heads=8, **shapes).check(1, 2, 3, 5)
    Pass((3000,), (static(3, 2, 1),), heads=4, kv_heads=1, **shapes).check(2, 3, 4)


@pytest.mark.parametrize(("dtype", "int8"), DTYPES, ids=IDS)
@pytest.mark.parametrize(
    "options",
    [
        {"window": 100},
        {"window": 300, "sink": 4},
        {"window": 90, "sink": 70},
        {"softcap": 5.0},
        {"chunk": 7},
        {"chunk": 100},
        {"chunk": 512},
    ],
    ids=str,
)
def test_what_tokens_see(options, dtype, int8):
    """Each token's window begins elsewhere, and the pass reads from the lowest on."""
    shapes = {"dtype": dtype, "int8": int8, "options": tuple(options.items())}
    # the window of 300 of the node at 1068 begins with a tile, those of nodes before it earlier
    for lengths in ((61, 700), (1200, 250), (1060, 3)):
        Pass(lengths, (bushy(70, 3), static(3, 2, 1)), **shapes).check(1, 3)


@pytest.mark.default("sinks-float32", "slopes-int8")
@pytest.mark.parametrize(("dtype", "int8"), DTYPES, ids=IDS)
@pytest.mark.parametrize("kind", ["sinks", "slopes"])
def test_heads_with_sinks_and_slopes(kind, dtype, int8):
    shapes = {"dtype": dtype, "int8": int8, kind: True}
    Pass((61, 1200, 250), (bushy(70, 3), static(3, 2, 1), bushy(40, 4)), **shapes).check(1, 3)


@pytest.mark.default(
    "8-8-64-64-float32", "8-8-64-64-int8", "7-1-33-20-bfloat16", "6-2-128-96-float32"
)
@pytest.mark.parametrize(("dtype", "int8"), DTYPES, ids=IDS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "value_dim"), [(8, 8, 64, 64), (7, 1, 33, 20), (6, 2, 128, 96)]
)
def test_shapes(heads, kv_heads, dim, value_dim, dtype, int8):
    sizes = (heads, kv_heads, dim, value_dim)
    Pass((58, 500), (bushy(70, 5), static(2, 2, 2)), *sizes, dtype=dtype, int8=int8).check(1, 2)
