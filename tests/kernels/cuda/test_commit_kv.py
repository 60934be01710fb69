"""`commit_kv` in Triton against its oracle."""

from __future__ import annotations

import random

import pytest
import torch

from specc.kernels.cuda import commit_kv as kernels
from specc.kernels.reference.commit import commit_kv_reference

pytestmark = pytest.mark.usefixtures("poisoned_memory")

Move = tuple[int, int]
PADDING = 512


def check_commit_kv(
    moves: list[list[Move]],
    device: torch.device,
    *,
    layers: int = 2,
    parts: int = 2,
    block_size: int = 4,
    num_slots: int = 24,
    heads: int = 2,
    dim: int = 4,
    dtype: torch.dtype = torch.float32,
    index_dtype: torch.dtype = torch.int32,
    bad_blocks: dict[tuple[int, int], int] | None = None,
    canary: int = 77,
) -> None:
    """`moves[b]` are (source, target) slots of sequence b, as many for each.

    The slab lies between canaries, some of its blocks belong to nobody, and all of its rows differ.
    Moves into slots beyond the table, or blocks beyond the slab (`bad_blocks`), are none.
    """
    batch, width = len(moves), max((len(row) for row in moves), default=0)
    per_sequence = num_slots // block_size
    num_blocks = batch * per_sequence + 3
    ids = list(range(1, batch * per_sequence + 2))
    random.Random(3).shuffle(ids)
    table = torch.tensor(ids[: batch * per_sequence], dtype=torch.int32).view(batch, per_sequence)
    shape = (layers, parts, num_blocks, block_size, heads, dim)
    size = torch.Size(shape).numel()
    memory = torch.full((size + 2 * PADDING,), canary, dtype=torch.uint8).to(dtype)
    # neighbouring integers that all dtypes hold exactly
    values = torch.arange(size) % 251
    memory[PADDING:-PADDING] = values.to(dtype)
    expected = memory.clone()
    memory = memory.to(device)

    def is_inside(b: int, slot: int) -> bool:
        block = (b, slot // block_size)
        return 0 <= slot < num_slots and block not in (bad_blocks or {})

    good = [
        [(s, t) if is_inside(b, s) and is_inside(b, t) else (-1, -1) for s, t in row]
        for b, row in enumerate(moves)
    ]

    def slots(rows: list[list[Move]], at: int) -> torch.Tensor:
        chosen = [[move[at] for move in row] for row in rows]
        return torch.tensor(chosen, dtype=index_dtype).view(batch, width)

    commit_kv_reference(
        expected[PADDING:-PADDING].view(shape), slots(good, 0), slots(good, 1), table
    )
    for (b, block), found in (bad_blocks or {}).items():
        table[b, block] = found
    # a wider table, whose next column would be a block of the sequence
    wide = torch.cat([table, torch.ones(batch, 2, dtype=torch.int32)], dim=1).to(device)
    source = slots(moves, 0).to(device)
    # strides of its own
    target = slots(moves, 1).T.contiguous().T.to(device)
    slab = memory[PADDING:-PADDING].view(shape)
    result = kernels.commit_kv(slab, source, target, wide[:, :per_sequence])
    assert result is None
    assert torch.equal(memory.cpu().float(), expected.float())


def path_moves(length: int, path: list[int], width: int) -> list[Move]:
    """Moves of an accepted path: target row length + j takes row length + path[j]."""
    moves = [(length + node, length + j) for j, node in enumerate(path)]
    return moves + [(-1, -1)] * (width - len(path))


def random_moves(seed: int, batch: int, width: int, num_slots: int) -> list[list[Move]]:
    """Sources anywhere, ascending targets; some of both are none."""
    generator = random.Random(seed)
    moves = []
    for _ in range(batch):
        targets = sorted(generator.sample(range(num_slots), width))
        row = [(generator.randrange(-1, num_slots), target) for target in targets]
        moves.append([(s, t if generator.random() < 0.8 else -1) for s, t in row])
    return moves


@pytest.mark.parametrize(
    ("moves", "options"),
    [
        pytest.param([path_moves(5, [0, 1, 3, 4, 8], 5)], {}, id="path"),
        pytest.param(
            [path_moves(3, [0, 2, 3], 5), path_moves(9, [0, 1, 4, 8, 12], 5), [(-1, -1)] * 5],
            {"block_size": 1, "dtype": torch.bfloat16},
            id="batch-bf16-block1",
        ),
        pytest.param(
            [path_moves(2, [0, 2, 3, 4, 5, 6, 7], 7)],
            {"block_size": 24, "dtype": torch.float16, "index_dtype": torch.int64},
            id="shifted-run-fp16-dense-i64",
        ),
        pytest.param(
            [path_moves(0, [0, 3], 2), path_moves(20, [0, 2], 2)],
            {"heads": 3, "dim": 80, "layers": 3, "dtype": torch.bfloat16},
            id="row240-bf16",
        ),
        pytest.param(
            [path_moves(1, [0, 2], 2)],
            {"heads": 20, "dim": 128, "layers": 1, "num_slots": 8, "dtype": torch.float16},
            id="row2560-fp16-2-programs",
        ),
        pytest.param(
            random_moves(1, 2, 70, 96),
            {"num_slots": 96, "block_size": 16, "heads": 1, "dim": 160, "layers": 1},
            id="70-moves-row160-2-programs",
        ),
        pytest.param(
            random_moves(2, 1, 90, 96),
            {"num_slots": 96, "heads": 1, "dtype": torch.uint8},
            id="90-moves-8-bits",
        ),
        pytest.param(
            [path_moves(3, [0, 2, 3], 5), path_moves(9, [0, 1, 4, 8, 12], 5)],
            {"layers": 1, "parts": 1, "heads": 1, "dim": 96},
            id="one-part",
        ),
    ],
)
def test_commit_kv(moves, options, device):
    check_commit_kv(moves, device, **options)


@pytest.mark.parametrize("block_size", [4, 24], ids="block{}".format)
@pytest.mark.parametrize(
    "moves",
    [
        pytest.param([(1, 0), (2, 1), (3, 2), (4, 3)], id="shift-down"),
        pytest.param([(0, 1), (1, 2), (2, 3), (3, 4)], id="shift-up"),
        pytest.param([(4, 3), (3, 2), (2, 1), (1, 0)], id="shift-down-in-reverse"),
        pytest.param([(3, 0), (2, 1), (1, 2), (0, 3)], id="reversed"),
        pytest.param([(5, 0), (0, 5)], id="swap"),
        pytest.param([(7, 1), (7, 2), (7, 7)], id="one-source"),
    ],
)
def test_all_rows_are_read_before_any_is_written(moves, block_size, device):
    check_commit_kv([moves], device, block_size=block_size)


def test_dead_moves_do_nothing(device):
    check_commit_kv([[(-1, 4), (6, -1), (-1, -1), (8, 6)]], device)


def test_slots_beyond_the_table_are_not_touched(device):
    far = [(24, 1), (1, 24), (27, 26), (2**30, 3), (3, 2**30), (6, 5)]
    check_commit_kv([far, far], device)
    check_commit_kv([[(2**40, 1), (2, 2**62), (-(2**40), 3), (6, 5)]], device,
                          index_dtype=torch.int64)  # fmt: skip


@pytest.mark.parametrize("found", [-1, 15, 2**30, -(2**31)], ids="block{}".format)
def test_blocks_beyond_the_slab_are_not_touched(found, device):
    """15 is the first id that the slab lacks."""
    moves = [(6, 5), (9, 8), (2, 9), (3, 2)]
    check_commit_kv([moves, moves], device, bad_blocks={(0, 2): found, (1, 1): found})


@pytest.mark.parametrize("shape", [(0, 2), (1, 0)], ids=["no-sequence", "no-moves"])
def test_nothing_to_do(shape, device):
    check_commit_kv([[(1, 0)] * shape[1]] * shape[0], device)


def inputs() -> dict:
    integers = torch.zeros(2, 3, dtype=torch.int32)
    return {
        "slab": torch.zeros(1, 2, 4, 4, 1, 2),
        "source": integers,
        "target": integers,
        "block_table": torch.zeros(2, 2, dtype=torch.int32),
    }


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"slab": torch.zeros(1, 3, 4, 4, 1, 2)}, r"slab \[1, 3"),
        ({"slab": torch.zeros(1, 2, 4, 4, 2, 1).transpose(4, 5)}, None),
        ({"slab": torch.zeros(1, 2, 4, 4, 2, 3).transpose(4, 5)}, "strides"),
        ({"source": torch.zeros(2, 3)}, "torch.float32"),
        ({"target": torch.zeros(2, 4, dtype=torch.int32)}, r"target \[2, 4\]"),
        ({"block_table": torch.zeros(2, 2, dtype=torch.int64)}, "torch.int64"),
        ({"block_table": torch.zeros(1, 2, dtype=torch.int32)}, r"block_table \[1, 2\]"),
        ({n: torch.zeros(2, 1025, dtype=torch.int32) for n in ("source", "target")}, "1025 moves"),
    ],
    ids=["kv", "contiguous", "strides", "float", "width", "table-i64", "batch", "1025"],
)
def test_bad_inputs_are_refused_with_their_values(change, found, device):
    given = {name: value.to(device) for name, value in (inputs() | change).items()}
    if found is None:
        kernels.commit_kv(**given)
        return
    with pytest.raises(ValueError, match=found):
        kernels.commit_kv(**given)
