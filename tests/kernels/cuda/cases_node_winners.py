"""Checks of `node_winners` on any device."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from specc.kernels.cuda import node_best
from specc.kernels.cuda.node_winners import node_winners
from specc.kernels.reference.accept import node_winners_reference
from tests.kernels.cuda.cases_accept import SMALL
from tests.kernels.cuda.near_ties import check_equal_or_near, permitted_winners
from tests.kernels.cuda.typed_trees import (
    PADDING,
    Forest,
    Row,
    inside,
    options_of,
    sizes,
    spoil_padding,
)


def check_node_winners(
    inputs: Forest, tile: int, device: torch.device, *, is_small: bool = False
) -> Tensor:
    """Tile by tile equal to the oracle, on a GPU but for near ties; returns winners [B, N]."""
    batch, num_nodes = inputs.tokens.shape
    by_node = inputs.logits.view(batch, num_nodes, -1)
    rows = ("values", "words", "cache_len", "history", "block_table")
    tiles = [(first, by_node[:, first : first + tile]) for first in range(0, num_nodes, tile)]
    wanted = [
        node_winners_reference(
            logits.flatten(0, 1), inputs.tokens, inputs.parents, first,
            *(getattr(inputs, name) for name in rows),
        )
        for first, logits in tiles
    ]  # fmt: skip
    before = copy.deepcopy(inputs)
    spoil_padding(inputs)
    shared = inputs.parents.stride(0) == 0
    parents = inputs.parents.to(device) if shared else inside(inputs.parents, 0, device)
    options = (inside(inputs.values, 0.5, device), inside(inputs.words, 1, device))
    paged = (inside(inputs.history, 1, device), inside(inputs.block_table, 0, device))
    by_node = inputs.logits.view(batch, num_nodes, -1)
    for (first, logits), want in zip(tiles, wanted, strict=True):
        # beyond a row lies what would win
        own = inside(by_node[:, first : first + logits.shape[1]].flatten(0, 1), torch.nan, device)
        with sizes(**(SMALL if is_small else {})):
            found = node_winners(
                own, inside(inputs.tokens, 0, device), parents, first,
                *options, inputs.cache_len.to(device), *paged,
            )  # fmt: skip
        assert found.dtype == want.dtype
        width = logits.shape[1]
        check_equal_or_near(
            found.tolist(), want.tolist(), device,
            lambda r, found=found, first=first, width=width: (
                int(found[r]) in permitted_winners(before, r // width, first + r % width)
            ),
        )  # fmt: skip
    return torch.cat([want.view(batch, -1) for want in wanted], dim=1)


def check_best(vocab: int, max_programs: int, value: float, device: torch.device) -> None:
    """Greedy roots; the best comes twice, whole blocks or single tokens apart: the lower wins."""
    pairs = [(0, 256), (3, 4), (255, 257), (255, 511), (600, 1112), (1023, 1024), (1024, 1280)]
    pairs.append((vocab - 300, vocab - 1))
    logits = torch.randn(len(pairs), vocab, generator=torch.Generator().manual_seed(vocab))
    for row, (first, second) in enumerate(pairs):
        logits[row, [first, second]] = value
    inputs = roots_of([Row(temperature=0.0)] * len(pairs), logits)
    with sizes(MAX_PROGRAMS=(node_best, max_programs)):
        winners = check_node_winners(inputs, 1, device)
    assert winners.flatten().tolist() == [first for first, _ in pairs]


def roots_of(rows: list[Row], logits: Tensor) -> Forest:
    """Trees of one node."""
    count = len(rows)
    return Forest(
        logits, torch.zeros(count, 1).long(), torch.full((count, 1), -1).int(),
        0, None, None, [], *options_of(rows, 3),
        torch.zeros(1, 4).int(), torch.zeros(count, 1).int(),
    )  # fmt: skip


def check_dead_nodes(device: torch.device) -> None:
    """Cycles, parents beyond the tree, nodes below dead ones, and padding have no winner."""
    rows = [Row(), Row(temperature=0.0), Row(length=PADDING)]
    inputs = roots_of(rows, torch.randn(3 * 7, 9))
    inputs.tokens = torch.randint(9, (3, 7))
    inputs.parents = torch.tensor([[-1, 0, 3, 2, 9, -1, 5]] * 3, dtype=torch.int32)
    inputs.cache_len = torch.tensor([0, 1, PADDING], dtype=torch.int32)
    for tile in (7, 2):
        winners = check_node_winners(inputs, tile, device)
        assert (winners >= 0).tolist() == [[True] * 2 + [False] * 5] * 2 + [[False] * 7]
