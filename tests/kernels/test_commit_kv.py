"""`specc::commit_kv` against row copies out of a snapshot."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.usefixtures("poisoned_memory")

LAYERS, KV_HEADS, DIM = 3, 2, 2
CAPACITY = 24
LAYOUTS = [pytest.param(size, id=f"block{size}") for size in (1, 4, 16)] + [
    pytest.param(0, id="dense")
]
Move = tuple[int, int]


@pytest.fixture(scope="module")
def commit_kv(implementation):
    return implementation.commit_kv.default


def make_slab(
    batch: int, block_size: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, list[list[int]]]:
    """A slab whose values are all different, and shuffled tables that leave three blocks unused."""
    block_size = block_size or CAPACITY
    per_sequence = -(-CAPACITY // block_size)
    blocks = list(range(1, batch * per_sequence + 2))
    random.Random(3).shuffle(blocks)
    shape = (LAYERS, 2, batch * per_sequence + 3, block_size, KV_HEADS, DIM)
    count = torch.Size(shape).numel()
    if dtype != torch.float32:
        # all 2**16 patterns of bfloat16 would hold NaN; integers up to 256 are exact
        slab = (torch.arange(count) % 251).to(dtype).view(shape)
    else:
        slab = torch.arange(count, dtype=dtype).view(shape)
    table = [blocks[b * per_sequence : (b + 1) * per_sequence] for b in range(batch)]
    return slab, table


def check(
    commit_kv: torch._ops.OpOverload,
    moves: list[list[Move]],
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    index_dtype: torch.dtype = torch.int64,
) -> None:
    """`moves[b]` are (source, target) slots of sequence b; all have the same length."""
    slab, table = make_slab(len(moves), block_size, dtype)
    block_size = slab.shape[3]
    snapshot, expected = slab.clone(), slab.clone()
    for blocks, sequence in zip(table, moves, strict=True):
        for source, target in sequence:
            if source < 0 or target < 0:
                continue
            read = blocks[source // block_size], source % block_size
            write = blocks[target // block_size], target % block_size
            for layer in range(LAYERS):
                for part in (0, 1):
                    expected[layer, part][write] = snapshot[layer, part][read]
    width = len(moves[0])
    sources = [[source for source, _ in sequence] for sequence in moves]
    targets = [[target for _, target in sequence] for sequence in moves]
    inputs = (
        torch.tensor(sources, dtype=index_dtype).view(len(moves), width),
        torch.tensor(targets, dtype=index_dtype).view(len(moves), width),
        torch.tensor(table, dtype=torch.int32),
    )
    copies = [tensor.clone() for tensor in inputs]
    assert commit_kv(slab, *inputs) is None
    assert torch.equal(slab, expected)
    for tensor, copy in zip(inputs, copies, strict=True):
        assert torch.equal(tensor, copy)


def path_moves(length: int, path: list[int], width: int) -> list[Move]:
    """Moves of an accepted path: target row length + j takes row length + path[j]."""
    moves = [(length + node, length + j) for j, node in enumerate(path)]
    return moves + [(-1, -1)] * (width - len(path))


PATHS = [
    pytest.param([0], id="root"),
    pytest.param([0, 1, 2, 3], id="chain-in-place"),
    pytest.param([0, 2], id="one-row"),
    pytest.param([0, 2, 3], id="row-2-is-read-then-overwritten"),
    pytest.param([0, 2, 3, 4, 5], id="run-shifted-by-one"),
    pytest.param([0, 3, 9, 15], id="rows-do-not-overlap"),
    pytest.param([0, 1, 3, 4, 8], id="mixed"),
]


@pytest.mark.parametrize("block_size", LAYOUTS)
@pytest.mark.parametrize("length", [0, 3, 7], ids="cache{}".format)
@pytest.mark.parametrize("path", PATHS)
def test_accepted_path(commit_kv, path, length, block_size):
    check(commit_kv, [path_moves(length, path, 5)], block_size)


@pytest.mark.parametrize("block_size", LAYOUTS)
@pytest.mark.parametrize(
    "moves",
    [
        pytest.param([(1, 0), (2, 1), (3, 2), (4, 3)], id="shift-down"),
        pytest.param([(4, 3), (3, 2), (2, 1), (1, 0)], id="shift-down-listed-in-reverse"),
        pytest.param([(0, 1), (1, 2), (2, 3), (3, 4)], id="shift-up"),
        pytest.param([(3, 4), (2, 3), (1, 2), (0, 1)], id="shift-up-listed-in-reverse"),
        pytest.param([(0, 3), (1, 2), (2, 1), (3, 0)], id="chain-reversed"),
        pytest.param([(0, 5), (5, 0)], id="swap"),
        pytest.param([(0, 1), (1, 2), (2, 0)], id="cycle"),
        pytest.param([(7, 1), (7, 2), (7, 7)], id="one-source-many-targets"),
    ],
)
def test_all_rows_are_read_before_any_is_written(commit_kv, moves, block_size):
    check(commit_kv, [moves], block_size)


@pytest.mark.parametrize("block_size", LAYOUTS)
def test_sequences_move_their_own_rows(commit_kv, block_size):
    check(
        commit_kv,
        [
            path_moves(3, [0, 2, 3], 5),
            path_moves(0, [0], 5),
            path_moves(9, [0, 1, 4, 8, 12], 5),
            [(-1, -1)] * 5,
            path_moves(15, [0, 2, 4, 5], 5),
        ],
        block_size,
    )


@pytest.mark.parametrize(
    "moves",
    [
        pytest.param([(-1, -1)] * 3, id="all-dead"),
        pytest.param([(-1, 4), (6, 5)], id="source-dead"),
        pytest.param([(6, -1), (7, 5)], id="target-dead"),
        pytest.param([(-1, -1), (6, 5), (-1, -1), (8, 6)], id="dead-between-live"),
        pytest.param([], id="no-moves"),
    ],
)
def test_dead_moves_do_nothing(commit_kv, moves):
    check(commit_kv, [moves, moves])


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=["i32", "i64"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int8], ids=["fp32", "bf16", "int8"]
)
def test_dtypes(commit_kv, dtype, index_dtype):
    check(
        commit_kv, [path_moves(5, [0, 2, 3, 7], 5), path_moves(2, [0, 3], 5)], 4, dtype, index_dtype
    )


@st.composite
def batches(draw):
    """Any moves whose targets are distinct within a sequence, dead ones among them."""
    width = draw(st.integers(1, 6))
    batch = []
    for _ in range(draw(st.integers(1, 3))):
        targets = draw(st.permutations(range(CAPACITY)))[:width]
        sources = [draw(st.integers(-1, CAPACITY - 1)) for _ in range(width)]
        keep = [draw(st.booleans()) for _ in range(width)]
        batch.append([(s, t if k else -1) for s, t, k in zip(sources, targets, keep, strict=True)])
    return batch, draw(st.sampled_from([0, 1, 3, 8]))


@settings(max_examples=60, deadline=None)
@given(batches())
def test_any_moves(commit_kv, case):
    moves, block_size = case
    check(commit_kv, moves, block_size)
