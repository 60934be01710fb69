"""Checks of `merge_trees`, `rerank_tree` and `ancestor_words` on any device."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from specc.kernels.cuda import merge
from specc.kernels.reference import sampling as reference


def random_forest(
    generator: random.Random, batch: int, sizes: list[int], num_tokens: int = 3
) -> tuple[Tensor, Tensor, Tensor]:
    """Trees of few tokens, so that many paths are equal; some nodes are dead."""
    tokens, parents = [], []
    for _ in range(batch):
        row, above = [], []
        for size in sizes:
            row += [generator.randrange(num_tokens) for _ in range(size)]
            above += [-1]
            above += [
                -1 if generator.random() < 0.1 else generator.randrange(max(0, node - 3), node)
                for node in range(1, size)
            ]
        tokens.append(row)
        parents.append(above)
    start = [sum(sizes[:s]) for s in range(len(sizes) + 1)]
    return (
        torch.tensor(tokens).view(batch, start[-1]).long(),
        torch.tensor(parents, dtype=torch.int32).view(batch, start[-1]),
        torch.tensor(start, dtype=torch.int32),
    )


def candidate_tree(
    generator: random.Random, batch: int, size: int, kind: str
) -> tuple[Tensor, Tensor, Tensor]:
    """A tree whose scores fall from parent to child: many ties, masked tokens or NaN if asked."""
    tokens, parents, scores = [], [], []
    for _ in range(batch):
        above, value = [-1], [0.0]
        for node in range(1, size):
            parent = generator.randrange(node)
            step = -generator.random()
            if kind == "ties":
                step = -float(generator.randrange(2))
            elif generator.random() < 0.2 and kind in ("masked", "nan"):
                step = float("-inf") if kind == "masked" or node % 2 else float("nan")
            above.append(parent)
            value.append(value[parent] + step)
        # the root's score is not looked at
        value[0] = -1e30
        tokens.append([generator.randrange(1000) for _ in range(size)])
        parents.append(above)
        scores.append(value)
    return (
        torch.tensor(tokens).view(batch, size).long(),
        torch.tensor(parents, dtype=torch.int32).view(batch, size),
        torch.tensor(scores).view(batch, size),
    )


def inside(tensor: Tensor, canary: float, device: torch.device) -> Tensor:
    """The same values as rows of a wider tensor."""
    wide = torch.full((tensor.shape[0], tensor.shape[1] + 5), canary, dtype=tensor.dtype)
    wide[:, 2:-3] = tensor
    return wide.to(device)[:, 2:-3]


def same(outputs: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for got, want in zip(outputs, wanted, strict=True):
        assert got.dtype == want.dtype
        assert got.tolist() == want.tolist()


def check_merge_trees(
    batch: int, sizes: list[int], device: torch.device, num_tokens: int = 3
) -> None:
    tokens, parents, start = random_forest(
        random.Random(sum(sizes)), batch, sizes, num_tokens=num_tokens
    )
    wanted = reference.merge_trees_reference(tokens, parents, start)
    same(
        merge.merge_trees(inside(tokens, 1, device), inside(parents, 0, device), start.to(device)),
        wanted,
    )


def check_rerank_tree(
    batch: int, size: int, num_nodes: int, kind: str, device: torch.device
) -> None:
    tokens, parents, scores = candidate_tree(random.Random(size), batch, size, kind)
    wanted = reference.rerank_tree_reference(tokens, parents, scores, num_nodes)
    inputs = (inside(tokens, 1, device), inside(parents, 0, device), inside(scores, 1.0, device))
    same(merge.rerank_tree(*inputs, num_nodes), wanted)


def check_left_behind(device: torch.device) -> None:
    """A score above its parent's breaks the contract: the node is dead, and nothing is touched."""
    tokens = torch.tensor([[5, 6, 7, 8]])
    parents = torch.tensor([[-1, 0, 1, 9]], dtype=torch.int32)
    scores = torch.tensor([[0.0, -9.0, -1.0, -2.0]])
    got = merge.rerank_tree(tokens.to(device), parents.to(device), scores.to(device), 3)
    same(
        got,
        (
            torch.tensor([[5, 7, 8]]),
            torch.tensor([[-1, -1, -1]], dtype=torch.int32),
            torch.tensor([[0, 2, 3]], dtype=torch.int32),
        ),
    )


def check_ancestor_words(batch: int, num_nodes: int, shape: str, device: torch.device) -> None:
    generator = random.Random(num_nodes)
    rows = []
    for b in range(batch):
        row = [-1]
        for node in range(1, num_nodes):
            parent = {"chain": node - 1, "star": 0}.get(shape, generator.randrange(node))
            # dead nodes come last
            row.append(-1 if b and node > num_nodes * 3 // 4 else parent)
        rows.append(row)
    parents = torch.tensor(rows, dtype=torch.int32)
    wanted = reference.ancestor_words_reference(parents)
    same(merge.ancestor_words(inside(parents, 0, device)), wanted)


def check_bad_parents_end(device: torch.device) -> None:
    """Parents that do not precede their children, in a cycle or beyond the tree."""
    parents = torch.tensor([[-1, 2, 1, 3, 99, 3]], dtype=torch.int32)
    words, depths = merge.ancestor_words(parents.to(device))
    assert words.flatten().tolist() == [1, 2, 6, 8, 16, 40]
    assert depths.tolist() == [0, 0, 1, 0, 0, 1]
