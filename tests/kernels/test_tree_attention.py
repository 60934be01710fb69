"""`specc::tree_attention` against loops over Python floats, on a cache of known and poisoned rows.

The oracle keeps K and V by (sequence, slot) and knows trees by their parents; it never sees a block
table, a flat token index or a word of bits. Every call compares the outputs and the whole cache.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

pytestmark = pytest.mark.usefixtures("poisoned_memory")

NAN = float("nan")
CANARY = 12345.0
TOLERANCE = {torch.float32: (1e-5, 1e-6), torch.bfloat16: (6e-3, 1e-3)}
LAYOUTS = [pytest.param(size, id=f"block{size}") for size in (1, 3, 16)] + [
    pytest.param(0, id="dense")
]


@pytest.fixture(scope="module")
def attention(implementation):
    return implementation.tree_attention.default


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
    hold `poison`.
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
        self.rows: dict[tuple[int, int], list[list[list[float]]]] = {}
        for b, length in enumerate(lengths):
            for slot in range(length):
                block, row = self.place(b, slot)
                for cache in self.caches:
                    cache[block, row] = torch.randn(cache.shape[2:]).to(cache.dtype)
                self.rows[b, slot] = [cache[block, row].tolist() for cache in self.caches]

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

        options = {"scale": scale, "window": window, "sink": sink, "softcap": softcap}
        beside = None if sinks is None else torch.tensor(sinks, dtype=self.dtype)
        out = self.attention(q, k, v, *self.caches, *inputs, beside, **options)
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
                for head in range(self.heads):
                    own = () if sinks is None else (sinks[head],)
                    row = self.attend(b, head, queries[head][index], seen, scale, own, softcap)
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
    ) -> list[float]:
        kv_head = head * self.kv_heads // self.heads
        scores = []
        for slot in seen:
            key = self.rows[b, slot][0][kv_head]
            scores.append(scale * sum(x * y for x, y in zip(query, key, strict=True)))
            if softcap:
                scores[-1] = softcap * math.tanh(scores[-1] / softcap)
        top = max(*scores, *sinks) if sinks else max(scores)
        weights = [math.exp(score - top) for score in scores]
        total = math.fsum([*weights, *(math.exp(sink - top) for sink in sinks)])
        result = [0.0] * self.dims[1]
        for slot, weight in zip(seen, weights, strict=True):
            for d, value in enumerate(self.rows[b, slot][1][kv_head]):
                result[d] += weight / total * value
        return result


def random_parents(num_nodes: int, seed: int = 0) -> list[int]:
    chooser = random.Random(seed)
    return [-1] + [chooser.randrange(max(0, node - 8), node) for node in range(1, num_nodes)]


ROOT = [-1]
CHAIN = [-1, 0, 1, 2, 3]
STAR = [-1, 0, 0, 0, 0, 0]
BUSHY = [-1, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 6]
TREES = {"root": ROOT, "chain": CHAIN, "star": STAR, "bushy": BUSHY}


@pytest.mark.parametrize("block_size", LAYOUTS)
@pytest.mark.parametrize(
    ("heads", "kv_heads"),
    [(1, 1), (4, 4), (4, 2), (6, 2), (5, 1)],
    ids=["h1-kv1", "mha4", "gqa4-2", "gqa6-2", "mqa5"],
)
def test_tree_pass_equals_loops(attention, block_size, heads, kv_heads):
    lengths = [0, 5, 17, 16]
    world = World(attention, lengths, block_size=block_size, heads=heads, kv_heads=kv_heads)
    trees = [BUSHY, ROOT, CHAIN, STAR]
    world.call([tree_tokens(t, n) for t, n in zip(trees, lengths, strict=True)])


@pytest.mark.parametrize("parents", TREES.values(), ids=TREES.keys())
@pytest.mark.parametrize("length", [0, 1, 15, 16, 17], ids="cache{}".format)
def test_one_sequence(attention, parents, length):
    World(attention, [length], block_size=16).call([tree_tokens(parents, length)])


@pytest.mark.parametrize("block_size", LAYOUTS)
@pytest.mark.parametrize(
    "empty", [{0}, {1}, {3}, {0, 1}, {1, 2}, {2, 3}, {0, 1, 2}, {0, 1, 2, 3}], ids=str
)
def test_sequences_without_tokens_are_left_alone(attention, block_size, empty):
    lengths = [4, 0, 9, 3]
    world = World(attention, lengths, block_size=block_size)
    trees = [CHAIN, BUSHY, STAR, ROOT]
    world.call([[] if b in empty else tree_tokens(trees[b], lengths[b]) for b in range(4)])


@pytest.mark.parametrize("causal", [False, True], ids=["tree", "causal"])
@pytest.mark.parametrize("dead_value", [NAN, 777.0], ids=["dead-nan", "dead-finite"])
@pytest.mark.parametrize("block_size", LAYOUTS)
def test_dead_tokens_write_nothing_and_give_zero(attention, block_size, dead_value, causal):
    lengths = [6, 0, 3, 2]
    world = World(attention, lengths, block_size=block_size)
    if causal:
        live = [causal_tokens(n, n + 5) for n in lengths]
    else:
        trees = [BUSHY, CHAIN, STAR, ROOT]
        live = [tree_tokens(t, n) for t, n in zip(trees, lengths, strict=True)]
    full_of_bits = Token(-1, 3, frozenset(range(64)))
    tokens = [live[0] + [DEAD], [DEAD, *live[1], DEAD, full_of_bits], [DEAD] * 3, live[3]]
    world.call(tokens, causal=causal, dead_value=dead_value)


def test_only_dead_tokens(attention):
    world = World(attention, [4, 0])
    assert not world.call([[DEAD], [DEAD, DEAD]]).any()


@pytest.mark.parametrize("poison", [NAN, float("inf"), 1e4], ids=["nan", "inf", "stale"])
@pytest.mark.parametrize("block_size", LAYOUTS)
def test_dead_node_between_live_nodes(attention, block_size, poison):
    """Node 2 was cut from the tree: its row is never written, and nobody may read it."""
    world = World(attention, [5, 0], block_size=block_size, poison=poison)
    tokens = [tree_tokens(STAR, 5), tree_tokens(BUSHY, 0)]
    tokens[0][2] = DEAD
    tokens[1][9] = DEAD
    world.call(tokens)


@pytest.mark.parametrize("poison", [float("inf"), 1e4], ids=["inf", "stale"])
def test_rows_of_an_earlier_step_do_not_leak(attention, poison):
    World(attention, [5, 0], poison=poison).call([tree_tokens(BUSHY, 5), tree_tokens(CHAIN, 0)])


@pytest.mark.parametrize("sink", [0, 1, 4], ids="sink{}".format)
@pytest.mark.parametrize("window", [1, 2, 5, 6, 16, 64], ids="window{}".format)
def test_window_and_sink_of_a_tree(attention, window, sink):
    lengths = [0, 5, 6, 17]
    world = World(attention, lengths)
    trees = [t for t in (ROOT, STAR, BUSHY, CHAIN) if max(map(len, paths_of(t))) <= window]
    trees = [trees[b % len(trees)] for b in range(4)]
    world.call(
        [tree_tokens(t, n) for t, n in zip(trees, lengths, strict=True)], window=window, sink=sink
    )


# of heads whose sinks are beside, far above and far below all scores
SINKS = [0.5, 90.0, -90.0, -2.0]


@pytest.mark.parametrize("causal", [False, True], ids=["tree", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("softcap", [0.0, 0.7, 30.0], ids="softcap{}".format)
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["", "sinks"])
def test_sinks_and_softcap(attention, sinks, softcap, dtype, causal):
    """Scores are large beside the softcap, and the scale is far from 1: their order shows."""
    world = World(attention, [0, 5, 17], dim=8, value_dim=6, dtype=dtype)
    if causal:
        tokens = [causal_tokens(n, n + 5) for n in (0, 5, 17)]
    else:
        tokens = [tree_tokens(t, n) for t, n in zip((STAR, BUSHY, CHAIN), (0, 5, 17), strict=True)]
    world.call(tokens, causal=causal, window=16, sink=1, scale=0.3, sinks=sinks, softcap=softcap)


def paths_of(parents: list[int]) -> list[frozenset[int]]:
    return [root_path(parents, node) for node in range(len(parents))]


def test_siblings_of_a_wide_tree_stay_in_the_window(attention):
    """Node 20 lives at slot cache_len + 20, position cache_len + 1: a window of 2 keeps it."""
    parents = [-1] + [0] * 20
    World(attention, [9], capacity=64).call([tree_tokens(parents, 9)], window=2)


@pytest.mark.parametrize("sink", [0, 1, 4], ids="sink{}".format)
@pytest.mark.parametrize("window", [1, 2, 5, 6, 16, 64], ids="window{}".format)
def test_window_and_sink_of_a_prefill_chunk(attention, window, sink):
    lengths = [0, 5, 11]
    world = World(attention, lengths)
    tokens = [causal_tokens(n, n + 9) for n in lengths]
    world.call(tokens, causal=True, window=window, sink=sink)


@pytest.mark.parametrize("block_size", LAYOUTS)
def test_prefill_in_chunks(attention, block_size):
    """Sequences prefill in chunks of their own; each chunk reads the rows of those before it."""
    world = World(attention, [0, 0, 0], block_size=block_size)
    for chunk in ([(0, 5), (0, 1), (0, 0)], [(5, 9), (1, 1), (0, 17)], [(9, 10), (1, 8), (17, 33)]):
        world.lengths = [first for first, _ in chunk]
        world.call([causal_tokens(*span) for span in chunk], causal=True)


def test_causal_does_not_depend_on_cache_len(attention):
    """The catch-up of a draft writes slots cache_len - 1 and cache_len again, without a mask."""
    world = World(attention, [5, 1, 9])
    world.call([causal_tokens(n - 1, n + 1) for n in world.lengths], causal=True)
    world.call([causal_tokens(n - 1, n + 1) for n in world.lengths], causal=True)
    world.lengths = [0, 0, 0]
    world.call([causal_tokens(n, n + 2) for n in (6, 2, 10)], causal=True)


@pytest.mark.parametrize("poison", [NAN, 1e4], ids=["nan", "stale"])
@pytest.mark.parametrize("block_size", LAYOUTS)
def test_draft_levels_read_region_rows_of_earlier_calls(attention, block_size, poison):
    parents = [-1, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6]
    levels = [[1, 2], [3, 4, 5, 6], [7, 8, 9, 10]]
    lengths = [7, 1, 12]
    world = World(attention, lengths, block_size=block_size, poison=poison)
    world.call([causal_tokens(n - 1, n + 1) for n in lengths], causal=True)
    for level in levels:
        world.call([tree_tokens(parents, n, level) for n in lengths])
    world.lengths = [8, 4, 12]
    chain = tree_tokens(CHAIN, 4)
    world.call([tree_tokens(ROOT, 8), chain[:2], tree_tokens(STAR, 12)])


def test_sequences_at_different_levels_share_a_call(attention):
    world = World(attention, [3, 8, 0])
    world.call([tree_tokens(BUSHY, 3, [0]), [], tree_tokens(CHAIN, 0, [0, 1])])
    world.call(
        [
            tree_tokens(BUSHY, 3, [1, 2, 3]),
            tree_tokens(STAR, 8, [0]),
            tree_tokens(CHAIN, 0, [2, 3]),
        ]
    )
    world.call(
        [
            tree_tokens(BUSHY, 3, [4, 5, 6, 7, 8, 9]),
            tree_tokens(STAR, 8, [1, 2, 3, 4, 5]),
            [],
        ]
    )


def test_second_identical_call_gives_the_same(attention):
    """A level that is fed again overwrites its own rows only."""
    world = World(attention, [6, 2])
    tokens = [tree_tokens(BUSHY, 6), tree_tokens(CHAIN, 2)]
    torch.manual_seed(1)
    first = world.call(tokens)
    torch.manual_seed(1)
    second = world.call(tokens)
    assert torch.equal(first, second)


def test_tokens_of_a_sequence_in_any_order(attention):
    order = [0, 6, 2, 11, 1, 3, 5, 4, 9, 8, 7, 10]
    World(attention, [4]).call([tree_tokens(BUSHY, 4, order)])


@pytest.mark.parametrize("block_size", LAYOUTS)
def test_bits_alone_decide_in_the_region(attention, block_size):
    """No node is visible by rule: not the root, which starts the region, and not a parent."""
    lengths = [0, 5, 8]
    seen = [{0}, {1}, {1, 2}, {3}, {0, 2, 4}, {1, 3, 5}]
    tokens = [
        [Token(n + node, n + min(node, 2), frozenset(nodes)) for node, nodes in enumerate(seen)]
        for n in lengths
    ]
    World(attention, lengths, block_size=block_size).call(tokens)


LARGE_TREES = {
    "64-nodes-star": [-1] + [0] * 63,
    "65-nodes-star": [-1] + [0] * 64,
    "65-nodes-chain": list(range(-1, 64)),
    "130-nodes-random": random_parents(130),
    "parent-is-bit-63": [-1] + [0] * 63 + [63] * 4 + [64] * 3,
    "parent-is-bit-127": [-1] + [0] * 127 + [127, 63, 64],
}


@pytest.mark.parametrize("parents", LARGE_TREES.values(), ids=LARGE_TREES.keys())
@pytest.mark.parametrize("block_size", [16, 0], ids=["block16", "dense"])
def test_trees_of_several_words(attention, parents, block_size):
    lengths = [3, 0]
    world = World(
        attention, lengths, capacity=140, block_size=block_size, heads=2, kv_heads=1, dim=2
    )
    world.call([tree_tokens(parents, 3), tree_tokens(CHAIN, 0)])


@pytest.mark.parametrize("num_words", [1, 2, 5], ids="words{}".format)
def test_words_beyond_the_tree_are_zero(attention, num_words):
    World(attention, [3, 4]).call(
        [tree_tokens(BUSHY, 3), tree_tokens(STAR, 4)], num_words=num_words
    )


@pytest.mark.parametrize("causal", [False, True], ids=["tree", "causal"])
@pytest.mark.parametrize("block_size", LAYOUTS)
def test_bfloat16(attention, block_size, causal):
    world = World(attention, [21, 0], block_size=block_size, dtype=torch.bfloat16, dim=16)
    if causal:
        world.call([causal_tokens(n, n + 6) for n in world.lengths], causal=True)
    else:
        world.call([[*tree_tokens(BUSHY, 21), DEAD], tree_tokens(CHAIN, 0)])


def test_softmax_of_bfloat16_runs_in_float32(attention):
    """1000 equal keys: a bfloat16 sum of weights would stop growing at 256."""
    world = World(
        attention, [1000], capacity=1008, block_size=16, dtype=torch.bfloat16, heads=1, kv_heads=1
    )
    world.call([tree_tokens(ROOT, 1000)], scale=0.0)


def test_cache_of_another_dtype(reference_operators):
    """The oracle alone: in C++ a cache has the dtype of its model; it refuses others (below)."""
    attention = reference_operators.tree_attention.default
    world = World(attention, [7, 2], cache_dtype=torch.bfloat16)
    world.call([tree_tokens(BUSHY, 7), tree_tokens(STAR, 2)])


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=["i32", "i64"])
def test_dtype_of_positions_and_slots(reference_operators, index_dtype):
    """The oracle alone: the C++ takes what the schema says, int64 positions and int32 slots."""
    attention = reference_operators.tree_attention.default
    world = World(attention, [7, 2], position_dtype=index_dtype, slot_dtype=index_dtype)
    world.call([tree_tokens(BUSHY, 7), [*tree_tokens(STAR, 2), DEAD]], window=5, sink=1)
    world.call([causal_tokens(7, 9), [DEAD]], causal=True)


def test_values_of_another_head_size(attention):
    World(attention, [7, 0], dim=6, value_dim=3).call(
        [tree_tokens(BUSHY, 7), tree_tokens(CHAIN, 0)]
    )


@pytest.mark.parametrize("scale", [0.0, 0.1, 3.0, -1.0], ids="scale{}".format)
def test_scale(attention, scale):
    World(attention, [9]).call([tree_tokens(BUSHY, 9)], scale=scale)


def test_large_scores_do_not_overflow(attention):
    # the float32 rounding of a score is multiplied by the scale
    World(attention, [9]).call([tree_tokens(BUSHY, 9)], scale=200.0, atol=1e-3)


def test_caches_are_views_of_a_slab(attention):
    """A layer's cache is `slab[layer, part]`; the other layers keep every byte."""
    world = World(attention, [5, 0])
    slab = torch.full((3, 2, *world.caches[0].shape), CANARY)
    for part in (0, 1):
        slab[1, part] = world.caches[part]
    world.caches = [slab[1, 0], slab[1, 1]]
    world.call([tree_tokens(BUSHY, 5), tree_tokens(CHAIN, 0)])
    assert (slab[[0, 2]] == CANARY).all()


@st.composite
def batches(draw):
    """Caches and one call: random trees, random subsets of dead tail tokens, random layout."""
    num_sequences = draw(st.integers(1, 3))
    lengths = [draw(st.integers(0, 12)) for _ in range(num_sequences)]
    causal = draw(st.booleans())
    tokens = []
    for length in lengths:
        count = draw(st.integers(0, 9))
        if causal:
            live = causal_tokens(length, length + count)
        elif count:
            parents = [-1] + [draw(st.integers(0, node - 1)) for node in range(1, count)]
            live = tree_tokens(parents, length, draw(st.permutations(range(count))))
        else:
            live = []
        for _ in range(draw(st.integers(0, 2))):
            live.insert(draw(st.integers(0, len(live))), DEAD)
        tokens.append(live)
    options = {
        "causal": causal,
        "window": draw(st.sampled_from([0, 9, 10, 14])),
        "sink": draw(st.integers(0, 3)),
        "dead_value": draw(st.sampled_from([NAN, 777.0])),
    }
    heads, kv_heads = draw(st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]))
    layout = {
        "block_size": draw(st.sampled_from([0, 1, 2, 5, 16])),
        "heads": heads,
        "kv_heads": kv_heads,
        "dim": draw(st.integers(1, 5)),
    }
    return lengths, layout, tokens, options


@settings(max_examples=60, deadline=None)
@given(batches())
def test_any_batch_equals_loops(attention, batch):
    lengths, layout, tokens, options = batch
    World(attention, lengths, capacity=24, **layout).call(tokens, **options)


def plain_inputs(causal: bool = False, dtype: torch.dtype = torch.float32) -> tuple:
    """Arguments of a small call without NaN: two sequences of 3 and 2 tokens, 4 and 0 rows."""
    parents = [[-1, 0, 0], [-1, 0]]
    words = [to_words(root_path(tree, node), 1) for tree in parents for node in range(len(tree))]
    return (
        torch.randn(4, 5, 8, dtype=dtype),
        torch.randn(2, 5, 8, dtype=dtype),
        torch.randn(2, 5, 6, dtype=dtype),
        torch.randn(5, 4, 2, 8, dtype=dtype),
        torch.randn(5, 4, 2, 6, dtype=dtype),
        torch.tensor([0, 3, 5], dtype=torch.int32),
        torch.tensor([4, 5, 6, 0, 1] if causal else [4, 5, 5, 0, 1]),
        torch.tensor([4, 5, 6, 0, 1], dtype=torch.int32),
        torch.tensor([4, 0], dtype=torch.int32),
        None if causal else torch.tensor(words),
        torch.tensor([[3, 1], [2, 4]], dtype=torch.int32),
    )


@pytest.mark.parametrize("causal", [False, True], ids=["tree", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_opcheck(attention, causal, dtype):
    torch.library.opcheck(
        attention,
        plain_inputs(causal, dtype),
        {"scale": 0.5, "window": 3, "sink": 1},
    )


@pytest.mark.parametrize("causal", [False, True], ids=["tree", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_layout_of_the_output(attention, causal, dtype):
    """[H, Nt, DV] that lies as [Nt, H, DV], from the fake too."""
    args = plain_inputs(causal, dtype)
    with FakeTensorMode() as mode:
        fakes = [None if a is None else mode.from_tensor(a) for a in args]
        fake = attention(*fakes, scale=0.5)
    for out in (fake, attention(*args, scale=0.5)):
        assert (out.shape, out.dtype, out.stride()) == ((4, 5, 6), dtype, (6, 24, 1))


def by_column(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.mT.contiguous().mT


def every_other(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.repeat_interleave(2, 0)[::2]


# argument, what becomes of it, what the error says
REFUSED = [
    pytest.param(5, torch.Tensor.long, "q_start is .* int32", id="q_start-i64"),
    pytest.param(6, torch.Tensor.int, "position is .* int64", id="position-i32"),
    pytest.param(7, torch.Tensor.long, "slot is .* int32", id="slot-i64"),
    pytest.param(8, torch.Tensor.long, "cache_len is .* int32", id="cache_len-i64"),
    pytest.param(9, torch.Tensor.int, "ancestors is .* int64", id="ancestors-i32"),
    pytest.param(9, torch.Tensor.float, "ancestors is .* int64", id="ancestors-fp32"),
    pytest.param(10, torch.Tensor.long, "block_table is .* int32", id="block_table-i64"),
    *(
        pytest.param(i, torch.Tensor.bfloat16, "one dtype", id=f"{name}-bf16")
        for i, name in enumerate(["q", "k", "v", "k_cache", "v_cache"])
    ),
    *(
        pytest.param(i, by_column, "last dimension .* contiguous", id=f"{name}-by-column")
        for i, name in enumerate(["q", "k", "v", "k_cache", "v_cache"])
    ),
    pytest.param(6, every_other, "position is", id="position-strided"),
    pytest.param(7, every_other, "slot is", id="slot-strided"),
    pytest.param(6, lambda x: x[1:], "metadata fits", id="position-short"),
    pytest.param(9, lambda x: x[1:], "a row for each token", id="ancestors-short"),
    pytest.param(10, lambda x: x[1:], "metadata fits", id="block_table-short"),
    pytest.param(0, lambda x: x[1:], "divides that of heads", id="three-heads-on-two"),
    pytest.param(1, lambda x: x[:, 1:], "q, k and v agree", id="k-short"),
    pytest.param(1, lambda x: x[..., 1:], "caches fit", id="k-narrow"),
]


@pytest.mark.parametrize(("index", "change", "message"), REFUSED)
def test_native_refuses_what_it_cannot_read(native_operators, index, change, message):
    args = list(plain_inputs())
    copies = [args[3].clone(), args[4].clone()]
    args[index] = change(args[index])
    with pytest.raises(RuntimeError, match=f"specc: .*{message}"):
        native_operators.tree_attention(*args, scale=0.5)
    for cache, copy in zip(args[3:5], copies, strict=True):
        assert torch.equal(cache.float(), copy.to(cache.dtype).float())


def test_native_refuses_half_precision(native_operators):
    args = [x.half() if i < 5 else x for i, x in enumerate(plain_inputs())]
    with pytest.raises(RuntimeError, match="float32 and bfloat16"):
        native_operators.tree_attention(*args, scale=0.5)


def test_no_tokens(attention):
    args = list(plain_inputs())
    args[:3] = [tensor[:, :0] for tensor in args[:3]]
    args[5] = torch.zeros(3, dtype=torch.int32)
    args[6:8] = [tensor[:0] for tensor in args[6:8]]
    args[9] = args[9][:0]
    caches = [args[3].clone(), args[4].clone()]
    assert attention(*args, scale=0.5).shape == (4, 0, 6)
    assert torch.equal(args[3], caches[0])
    assert torch.equal(args[4], caches[1])


def test_schema_says_what_is_mutated(attention):
    arguments = attention._schema.arguments
    written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    assert written == ["k_cache", "v_cache"]
