"""`specc::tree_attention` as loops over Python floats, on a cache of known and poisoned rows.

Here K and V are kept by (sequence, slot) and trees are known by their parents; there is no block
table, no flat token index and no word of bits. Every call compares the outputs and the whole cache.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

NAN = float("nan")
CANARY = 12345.0
TOLERANCE = {torch.float32: (1e-5, 1e-6), torch.bfloat16: (6e-3, 1e-3)}
LAYOUTS = [pytest.param(size, id=f"block{size}") for size in (1, 3, 16)] + [
    pytest.param(0, id="dense")
]


@dataclass
class Token:
    """One in-flight token: where it is written, and the slots of the region it may see."""

    slot: int
    position: int
    nodes: frozenset[int] = frozenset()

    @property
    def is_live(self) -> bool:
        return self.slot >= 0


DEAD = Token(-1, 0)


def root_path(parents: list[int], node: int) -> frozenset[int]:
    """The node and its ancestors, followed parent by parent."""
    path = set()
    while node >= 0:
        path.add(node)
        node = parents[node]
    return frozenset(path)


def tree_tokens(parents: list[int], length: int, nodes: list[int] | None = None) -> list[Token]:
    """Tokens of a tree after `length` committed rows; `nodes` picks some, in that order."""
    picked = range(len(parents)) if nodes is None else nodes
    paths = {node: root_path(parents, node) for node in picked}
    return [Token(length + node, length + len(paths[node]) - 1, paths[node]) for node in picked]


def causal_tokens(first: int, last: int) -> list[Token]:
    return [Token(slot, slot) for slot in range(first, last)]


def to_words(nodes: frozenset[int], num_words: int) -> list[int]:
    """Two's complement int64 words; node 64w + j is bit j of word w."""
    words = []
    for word in range(num_words):
        value = sum(2 ** (node - 64 * word) for node in nodes if node // 64 == word)
        words.append(value - 2**64 if value >= 2**63 else value)
    return words


class World:
    """Caches of a batch of sequences, as the operator's tensors and as rows by (sequence, slot).

    Block 0, the last block and one more belong to nobody and hold a canary; rows that nobody wrote
    hold `poison`. With `values_in_keys` a value is the first columns of its key, in one cache.
    """

    def __init__(
        self,
        attention: torch._ops.OpOverload,
        lengths: list[int],
        *,
        capacity: int = 48,
        block_size: int = 3,
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 4,
        value_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
        poison: float = NAN,
        position_dtype: torch.dtype = torch.int64,
        slot_dtype: torch.dtype = torch.int32,
        values_in_keys: bool = False,
    ) -> None:
        self.attention = attention
        self.lengths, self.heads, self.kv_heads = lengths, heads, kv_heads
        self.dims = (dim, value_dim or dim)
        self.dtype = dtype
        self.position_dtype, self.slot_dtype = position_dtype, slot_dtype
        self.block_size = block_size or capacity
        per_sequence = -(-capacity // self.block_size)
        owned = len(lengths) * per_sequence
        blocks = list(range(1, owned + 2))
        random.Random(7).shuffle(blocks)
        nobody = {0, owned + 2, blocks.pop()}
        self.table = [
            blocks[b * per_sequence : (b + 1) * per_sequence] for b in range(len(lengths))
        ]
        self.caches = []
        for size in self.dims:
            shape = (owned + 3, self.block_size, kv_heads, size)
            cache = torch.full(shape, poison, dtype=cache_dtype or dtype)
            cache[sorted(nobody)] = CANARY
            self.caches.append(cache)
        self.values_in_keys = values_in_keys
        if values_in_keys:
            self.caches[1] = self.caches[0][..., : self.dims[1]]
        self.rows: dict[tuple[int, int], list[list[list[float]]]] = {}
        self.positions: dict[tuple[int, int], int] = {}
        for b, length in enumerate(lengths):
            for slot in range(length):
                block, row = self.place(b, slot)
                for cache in self.caches:
                    cache[block, row] = torch.randn(cache.shape[2:]).to(cache.dtype)
                self.rows[b, slot] = [cache[block, row].tolist() for cache in self.caches]
                self.positions[b, slot] = slot

    def place(self, b: int, slot: int) -> tuple[int, int]:
        return self.table[b][slot // self.block_size], slot % self.block_size

    def call(
        self,
        tokens: list[list[Token]],
        *,
        causal: bool = False,
        window: int = 0,
        sink: int = 0,
        num_words: int | None = None,
        dead_value: float = NAN,
        scale: float | None = None,
        atol: float | None = None,
        sinks: list[float] | None = None,
        softcap: float = 0.0,
        slopes: list[float] | None = None,
        rounds_bias: bool = False,
        chunk: int = 0,
    ) -> torch.Tensor:
        """Run the operator, check outputs and caches against the oracle, return the outputs."""
        flat = [(b, token) for b, sequence in enumerate(tokens) for token in sequence]
        count = len(flat)
        q = torch.randn(self.heads, count, self.dims[0])
        k, v = (torch.randn(self.kv_heads, count, size) for size in self.dims)
        for index, (_, token) in enumerate(flat):
            if not token.is_live:
                for tensor in (q, k, v):
                    tensor[:, index] = dead_value
        q, k, v = (tensor.to(self.dtype) for tensor in (q, k, v))
        if self.values_in_keys:
            v = k[..., : self.dims[1]].clone()
        starts = [0]
        for sequence in tokens:
            starts.append(starts[-1] + len(sequence))
        if num_words is None:
            nodes = [node for _, token in flat for node in token.nodes]
            num_words = max(nodes, default=0) // 64 + 1
        ancestors = [to_words(token.nodes, num_words) for _, token in flat]
        scale = 1 / math.sqrt(self.dims[0]) if scale is None else scale
        inputs = [
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor([token.position for _, token in flat], dtype=self.position_dtype),
            torch.tensor([token.slot for _, token in flat], dtype=self.slot_dtype),
            torch.tensor(self.lengths, dtype=torch.int32),
            None if causal else torch.tensor(ancestors, dtype=torch.int64).view(count, num_words),
            torch.tensor(self.table, dtype=torch.int32),
        ]
        copies = [None if tensor is None else tensor.clone() for tensor in (q, k, v, *inputs)]

        expected_caches = [cache.clone() for cache in self.caches]
        for index, (b, token) in enumerate(flat):
            if token.is_live:
                block, row = self.place(b, token.slot)
                written = []
                for cache, source in zip(expected_caches, (k, v), strict=True):
                    cache[block, row] = source[:, index].to(cache.dtype)
                    written.append(cache[block, row].tolist())
                self.rows[b, token.slot] = written
                self.positions[b, token.slot] = token.position

        options = {"scale": scale, "window": window, "sink": sink, "softcap": softcap}
        options["rounds_bias"] = rounds_bias
        if chunk:
            options["chunk"] = chunk
        beside = None if sinks is None else torch.tensor(sinks, dtype=self.dtype)
        tilt = None if slopes is None else torch.tensor(slopes)
        if tilt is not None and rounds_bias:
            tilt = tilt.bfloat16().float()
        out = self.attention(q, k, v, *self.caches, *inputs, beside, tilt, **options)
        assert out.dtype == self.dtype
        assert out.shape == (self.heads, count, self.dims[1])
        for cache, expected in zip(self.caches, expected_caches, strict=True):
            torch.testing.assert_close(cache, expected, rtol=0, atol=0, equal_nan=True)
        for tensor, copy in zip((q, k, v, *inputs), copies, strict=True):
            if tensor is not None:
                torch.testing.assert_close(tensor, copy, rtol=0, atol=0, equal_nan=True)

        expected = torch.zeros(self.heads, count, self.dims[1], dtype=torch.float64)
        queries = q.double().tolist()
        for index, (b, token) in enumerate(flat):
            if token.is_live:
                seen = self.visible(b, token, causal, window, sink)
                if chunk:
                    own = token.position // chunk
                    seen = [slot for slot in seen if self.positions[b, slot] // chunk == own]
                for head in range(self.heads):
                    own = () if sinks is None else (sinks[head],)
                    added = [0.0] * len(seen)
                    if slopes is not None:
                        ends = [self.positions[b, slot] for slot in seen]
                        own_scale = scale if rounds_bias else None
                        added = biases(slopes[head], ends, token.position, own_scale)
                    row = self.attend(
                        b, head, queries[head][index], seen, scale, own, softcap, added
                    )
                    expected[head, index] = torch.tensor(row, dtype=torch.float64)
        rtol, least = TOLERANCE[self.dtype]
        torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=atol or least)
        dead = torch.tensor([not token.is_live for _, token in flat], dtype=torch.bool)
        assert torch.equal(out[:, dead], torch.zeros_like(out[:, dead]))
        return out

    def visible(self, b: int, token: Token, causal: bool, window: int, sink: int) -> list[int]:
        """Slots that a token attends to. Tree nodes are never deeper than the window."""
        before = range(token.position + 1) if causal else range(self.lengths[b])
        seen = [
            slot
            for slot in before
            if not window or slot < sink or not slot <= token.position - window
        ]
        if not causal:
            seen += [self.lengths[b] + node for node in sorted(token.nodes)]
        return seen

    def attend(
        self,
        b: int,
        head: int,
        query: list[float],
        seen: list[int],
        scale: float,
        sinks: tuple[float, ...] = (),
        softcap: float = 0.0,
        added: Sequence[float] | None = None,
    ) -> list[float]:
        kv_head = head * self.kv_heads // self.heads
        scores = []
        for slot, bias in zip(seen, added or [0.0] * len(seen), strict=True):
            key = self.rows[b, slot][0][kv_head]
            scores.append(scale * sum(x * y for x, y in zip(query, key, strict=True)))
            if softcap:
                scores[-1] = softcap * math.tanh(scores[-1] / softcap)
            scores[-1] += bias
        top = max(*scores, *sinks) if sinks else max(scores)
        weights = [math.exp(score - top) for score in scores]
        total = math.fsum([*weights, *(math.exp(sink - top) for sink in sinks)])
        result = [0.0] * self.dims[1]
        for slot, weight in zip(seen, weights, strict=True):
            for d, value in enumerate(self.rows[b, slot][1][kv_head]):
                result[d] += weight / total * value
        return result


def biases(slope: float, keys: list[int], token: int, scale: float | None) -> list[float]:
    """What scores get; with a scale, of positions and products that are rounded to bfloat16."""
    if scale is None:
        return [slope * (key - token) for key in keys]
    ends = torch.tensor([*keys, token]) * torch.tensor(slope, dtype=torch.bfloat16)
    *of_keys, own = ends.double().tolist()
    return [scale * (key - own) for key in of_keys]


def random_parents(num_nodes: int, seed: int = 0) -> list[int]:
    chooser = random.Random(seed)
    return [-1] + [chooser.randrange(max(0, node - 8), node) for node in range(1, num_nodes)]


ROOT = [-1]
CHAIN = [-1, 0, 1, 2, 3]
STAR = [-1, 0, 0, 0, 0, 0]
BUSHY = [-1, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 6]
TREES = {"root": ROOT, "chain": CHAIN, "star": STAR, "bushy": BUSHY}
