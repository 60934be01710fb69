"""`specc::block_mass` against loops over Python floats, which know rows by (sequence, slot)."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from specc.kernels.reference.kv_rows import read_rows, store_rows
from tests.kernels.attention_loops import (
    BUSHY,
    CHAIN,
    DEAD,
    LAYOUTS,
    NAN,
    STAR,
    Token,
    World,
    causal_tokens,
    random_parents,
    to_words,
    tree_tokens,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")

CANARY = -77.0


@pytest.fixture(scope="module")
def block_mass(implementation: Any) -> Any:
    return implementation.block_mass.default


def dot(one: list[float], other: list[float]) -> float:
    return math.fsum(x * y for x, y in zip(one, other, strict=True))


class Pass:
    """Tokens of a pass whose keys are in the cache, and the call over them.

    Args:
        lengths: committed rows of each sequence.
        causal: leave out the ancestors.
        options: of the caches, see `World`.
    """

    def __init__(
        self,
        lengths: list[int],
        tokens: list[list[Token]],
        *,
        causal: bool = False,
        **options: Any,
    ) -> None:
        self.world = World(torch.ops.specc.tree_attention.default, lengths, **options)
        self.tokens, self.causal = tokens, causal
        world, dim = self.world, self.world.dims[0]
        flat = [(b, token) for b, sequence in enumerate(tokens) for token in sequence]
        self.q = torch.randn(world.heads, len(flat), dim).to(world.dtype)
        for index, (b, token) in enumerate(flat):
            if not token.is_live:
                self.q[:, index] = NAN
                continue
            block, row = world.place(b, token.slot)
            key = torch.randn(world.kv_heads, dim).to(world.dtype)
            world.caches[0][block, row] = key
            world.rows[b, token.slot] = [key.tolist()]
        num_words = max((n for _, t in flat for n in t.nodes), default=0) // 64 + 1
        words = [to_words(token.nodes, num_words) for _, token in flat]
        starts = [0, *itertools.accumulate(map(len, tokens))]
        self.scale = 1.7 / math.sqrt(dim)
        self.inputs = [
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor([token.position for _, token in flat]),
            torch.tensor([token.slot for _, token in flat], dtype=torch.int32),
            torch.tensor(lengths, dtype=torch.int32),
            None if causal else torch.tensor(words).view(len(flat), num_words),
            torch.tensor(world.table, dtype=torch.int32),
        ]

    def quantize_caches(self, stored: torch.dtype) -> None:
        """Quantize the cache to this type; votes are those of the values that they are."""
        world = self.world
        world.caches[0] = store_rows(world.caches[0], stored)
        for b, slot in world.rows:
            world.rows[b, slot] = [read_rows(world.caches[0][world.place(b, slot)]).tolist()]

    def call(self, block_mass: Any, mass: torch.Tensor) -> None:
        """Run it; nothing but the mass changes."""
        given = [self.q, self.world.caches[0], *self.inputs]
        copies = [None if x is None else x.clone() for x in given]
        assert block_mass(*given, mass, scale=self.scale) is None
        for tensor, copy in zip(given, copies, strict=True):
            if tensor is not None:
                torch.testing.assert_close(tensor, copy, rtol=0, atol=0, equal_nan=True)

    def wanted(self, b: int, columns: int) -> list[float]:
        """Sums of one sequence, vote by vote."""
        world = self.world
        found = [0.0] * columns
        first = sum(map(len, self.tokens[:b]))
        live = [(first + i, t) for i, t in enumerate(self.tokens[b]) if t.is_live]
        for index, token in live[-32:]:
            seen = world.visible(b, token, self.causal, 0, 0)
            for head in range(world.heads):
                query = self.q[head, index].double().tolist()
                kv_head = head * world.kv_heads // world.heads
                scores = [self.scale * dot(query, world.rows[b, slot][0][kv_head]) for slot in seen]
                weights = [math.exp(score - max(scores)) for score in scores]
                for slot, weight in zip(seen, weights, strict=True):
                    found[slot // world.block_size] += weight / math.fsum(weights)
        return found

    def check(self, block_mass: Any, voters: list[int], before: float = 0.0) -> torch.Tensor:
        """Let these sequences vote; rows of the others, and rows of nobody, stay."""
        columns = self.inputs[5].shape[1] + 1
        mass = torch.full((len(self.tokens) + 2, columns), CANARY)
        mass[voters] = before
        wanted = mass.double()
        for b in voters:
            wanted[b] += torch.tensor(self.wanted(b, columns), dtype=torch.float64)
        self.call(block_mass, mass)
        torch.testing.assert_close(mass.double(), wanted, rtol=1e-5, atol=1e-5)
        return mass


@pytest.mark.parametrize("block_size", LAYOUTS)
@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(1, 1), (4, 4), (6, 2), (5, 1)], ids=["1", "mha4", "gqa6-2", "mqa5"]
)
def test_trees(block_mass: Any, block_size: int, heads: int, kv_heads: int) -> None:
    lengths = [0, 5, 17, 16]
    trees = [BUSHY, [-1], CHAIN, STAR]
    tokens = [tree_tokens(t, n) for t, n in zip(trees, lengths, strict=True)]
    options = {"block_size": block_size, "heads": heads, "kv_heads": kv_heads}
    Pass(lengths, tokens, **options).check(block_mass, [0, 1, 2, 3])


@pytest.mark.parametrize("block_size", LAYOUTS)
def test_prompts(block_mass: Any, block_size: int) -> None:
    """Chunks, one of them a single token, one of more tokens than vote."""
    lengths = [0, 8, 15]
    tokens = [causal_tokens(0, 40), causal_tokens(8, 17), causal_tokens(15, 16)]
    made = Pass(lengths, tokens, causal=True, block_size=block_size)
    mass = made.check(block_mass, [0, 1, 2])
    # votes of a query and a head are 1
    torch.testing.assert_close(mass[:3].sum(1), torch.tensor([32.0, 9.0, 1.0]) * 4)


def test_many_nodes(block_mass: Any) -> None:
    """Bits of several words, more nodes than vote."""
    tokens = [tree_tokens(random_parents(130), 11), tree_tokens(random_parents(70, 1), 3)]
    Pass([11, 3], tokens, capacity=160, block_size=16).check(block_mass, [0, 1])


def test_who_votes(block_mass: Any) -> None:
    """Sequences whose rows say so, live tokens, sequences with tokens; they add."""
    lengths = [6, 9, 4, 0]
    trees = [tree_tokens(t, n) for t, n in zip((BUSHY, CHAIN, STAR), lengths, strict=False)]
    tokens = [trees[0] + [DEAD] * 40, trees[1], [], [DEAD, DEAD]]
    made = Pass(lengths, tokens)
    mass = made.check(block_mass, [0, 2, 3], before=0.5)
    assert (mass[2] == 0.5).all()
    assert (mass[1] == CANARY).all()
    made.check(block_mass, [1])
    made.check(block_mass, [])


def test_nobody_votes(block_mass: Any) -> None:
    """No column: nothing is looked at, whatever it is."""
    made = Pass([6], [tree_tokens(CHAIN, 6)])
    made.inputs[5].fill_(-1)
    for rows in (0, 1, 4):
        made.call(block_mass, torch.zeros(rows, 0))


@pytest.mark.parametrize("head_dim", [3, 16, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_types(block_mass: Any, dtype: torch.dtype, head_dim: int) -> None:
    tokens = [tree_tokens(BUSHY, 30), tree_tokens(CHAIN, 7)]
    Pass([30, 7], tokens, dtype=dtype, dim=head_dim).check(block_mass, [0, 1])


def test_large_scores(block_mass: Any) -> None:
    """The largest is subtracted: nothing overflows, what is far below it counts nothing."""
    made = Pass([30], [tree_tokens(BUSHY, 30)], dim=16)
    made.scale = 300.0
    made.check(block_mass, [0])


def test_shared_blocks(block_mass: Any) -> None:
    """Two sequences with one prefix in the same blocks, at other columns' places even."""
    made = Pass([9, 9], [tree_tokens(CHAIN, 9), tree_tokens(STAR, 9)])
    world, table = made.world, made.inputs[5]
    for column in range(3):
        world.table[1][column] = world.table[0][column]
    table[1, :3] = table[0, :3]
    for slot in range(9):
        world.rows[1, slot] = world.rows[0, slot]
    made.check(block_mass, [0, 1])
    # the same block twice: what each place gets is its own
    world.table[0][1] = world.table[0][0]
    table[0, 1] = table[0, 0]
    for slot in range(3, 6):
        world.rows[0, slot] = world.rows[0, slot - 3]
    made.check(block_mass, [0, 1])


def test_what_does_not_fit(block_mass: Any) -> None:
    made = Pass([9, 9], [tree_tokens(CHAIN, 9), tree_tokens(STAR, 9)])
    with pytest.raises((RuntimeError, ValueError), match="columns of mass"):
        made.call(block_mass, torch.zeros(2, 4))
    with pytest.raises((RuntimeError, ValueError), match="mass"):
        made.call(block_mass, torch.zeros(1, 16))


def test_threads(native_operators: Any) -> None:
    """The number of threads changes no bit."""
    made = Pass([300, 200], [tree_tokens(BUSHY, 300), tree_tokens(CHAIN, 200)], capacity=330)
    before, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            mass = torch.zeros(2, 110)
            made.call(native_operators.block_mass.default, mass)
            found.append(mass)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], mass) for mass in found[1:])


@pytest.mark.parametrize("head_dim", [3, 16, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_int8(block_mass: Any, dtype: torch.dtype, head_dim: int) -> None:
    """Votes are those of the values that codes and scales stand for."""
    tokens = [tree_tokens(BUSHY, 30), tree_tokens(CHAIN, 7)]
    made = Pass([30, 7], tokens, dtype=dtype, dim=head_dim)
    made.quantize_caches(torch.int8)
    made.check(block_mass, [0, 1])
