"""Attention in torch takes as many tokens at once as their scores fit, whatever they see."""

from __future__ import annotations

import pytest
import torch

from specc.kernels.reference import core

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 8, 4
LENGTHS = (37, 5, 0)  # committed rows
NODES = 6


def batch(kind: str):
    """Three sequences: causal chunks, or trees of which a node is dead; rows of no one are NaN."""
    generator = torch.Generator().manual_seed(3)
    count = len(LENGTHS) * NODES
    width = -(-(max(LENGTHS) + NODES) // BLOCK)
    table = torch.randperm(len(LENGTHS) * width, generator=generator).int().view(-1, width)
    caches = torch.full((2, table.numel() + 1, BLOCK, KV_HEADS, DIM), torch.nan)
    slots, positions = [], []
    for row, length in enumerate(LENGTHS):
        for slot in range(length):
            place = int(table[row, slot // BLOCK])
            caches[:, place, slot % BLOCK] = torch.randn(2, KV_HEADS, DIM, generator=generator)
        slots += range(length, length + NODES)
        # a tree: a root, and children of it
        positions += [
            length + (node if kind == "causal" else min(node, 1)) for node in range(NODES)
        ]
    words = torch.tensor([1, *(1 | 1 << node for node in range(1, NODES))] * len(LENGTHS))
    slot = torch.tensor(slots, dtype=torch.int32)
    if kind == "tree":
        slot[3] = slot[NODES + 5] = -1
    q, k, v = (torch.randn(n, count, DIM, generator=generator) for n in (HEADS, KV_HEADS, KV_HEADS))
    return (
        (q, k, v, *caches, torch.arange(0, count + 1, NODES, dtype=torch.int32)),
        (torch.tensor(positions), slot, torch.tensor(LENGTHS, dtype=torch.int32)),
        (None if kind == "causal" else words[:, None], table),
    )


@pytest.mark.parametrize("kind", ["causal", "tree"])
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("most", [1, 2 * HEADS * (37 + NODES), 5 * HEADS * (37 + NODES)])
def test_parts_are_the_whole(monkeypatch, kind, window, most):
    options = {"scale": 0.3, "window": window, "sink": 2 if window else 0}
    first, second, third = batch(kind)
    whole = core.tree_attention_reference(*first, *second, *third, **options)
    assert whole.isfinite().all()
    monkeypatch.setattr(core, "_MOST_SCORES", most)
    assert core.rows_at_once(HEADS, 37 + NODES) < NODES
    first, second, third = batch(kind)
    parts = core.tree_attention_reference(*first, *second, *third, **options)
    torch.testing.assert_close(parts, whole, rtol=1e-6, atol=1e-6)


def test_rows_at_once():
    assert core.rows_at_once(32, 4096) == 512
    assert core.rows_at_once(32, 131072) == 16
    assert core.rows_at_once(64, 1 << 24) == 1
