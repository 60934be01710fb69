"""Checks of `commit_kv` on any device."""

from __future__ import annotations

import random

import torch

from specc.kernels.cuda import commit_kv as kernels
from specc.kernels.reference.commit import commit_kv_reference

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
