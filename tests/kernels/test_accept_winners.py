"""`specc::accept_winners` against a walk over Python lists."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.usefixtures("poisoned_memory")

VOCAB = 11
ROOT = [-1]
CHAIN = [-1, 0, 1, 2, 3]
STAR = [-1, 0, 0, 0, 0]
BUSHY = [-1, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 9]
UNEVEN = [-1, 0, 1, 0, 3, 4, 1, 6, 5]
TREES = {"root": ROOT, "chain": CHAIN, "star": STAR, "bushy-3-2-1": BUSHY, "uneven": UNEVEN}


@pytest.fixture(scope="module")
def accept_winners(implementation):
    return implementation.accept_winners.default


def depth_of(parents: list[int]) -> int:
    depths = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return max(depths)


def path_to(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def walk(
    best: list[int], tokens: list[int], parents: list[int], max_depth: int
) -> tuple[list[int], int, list[int]]:
    """One sequence: `best` is the target's token after each node."""
    node, path = 0, [0]
    while True:
        following = [
            child
            for child in range(1, len(parents))
            if parents[child] == node and tokens[child] == best[node]
        ]
        if not following:
            break
        node = following[0]
        path.append(node)
    emitted = [tokens[accepted] for accepted in path[1:]] + [best[node]]
    padding = [-1] * (max_depth + 1 - len(path))
    return path + padding, len(path) - 1, emitted + padding


def distinct_siblings(parents: list[int]) -> list[int]:
    """Siblings count up from 0, so that cousins carry equal tokens; the root carries 0."""
    return [parents[:node].count(parent) for node, parent in enumerate(parents)]


def run(
    accept_winners: torch._ops.OpOverload,
    best: list[list[int]],
    tokens: list[list[int]],
    parents: list[list[int]],
    max_depth: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run the operator on a batch, check it against the walk, return (path, accepted, output)."""
    inputs = (torch.tensor(best), torch.tensor(tokens), torch.tensor(parents, dtype=torch.int32))
    copies = [tensor.clone() for tensor in inputs]
    path, accepted, output = accept_winners(*inputs, max_depth)
    walks = [walk(*row, max_depth) for row in zip(best, tokens, parents, strict=True)]
    assert (path.dtype, accepted.dtype, output.dtype) == (torch.int32, torch.int32, torch.int64)
    assert path.tolist() == [row[0] for row in walks]
    assert accepted.tolist() == [row[1] for row in walks]
    assert output.tolist() == [row[2] for row in walks]
    for tensor, copy in zip(inputs, copies, strict=True):
        assert torch.equal(tensor, copy)
    return path, accepted, output


@pytest.mark.parametrize(
    ("parents", "last"),
    [
        pytest.param(parents, node, id=f"{name}-ends-at-{node}")
        for name, parents in TREES.items()
        for node in range(len(parents))
    ],
)
def test_walk_ends_at_each_node(accept_winners, parents, last):
    """The target agrees up to `last` and then wants a token that no child carries."""
    tokens = distinct_siblings(parents)
    best = [VOCAB - 1] * len(parents)
    path = path_to(parents, last)
    for node, child in itertools.pairwise(path):
        best[node] = tokens[child]
    got, accepted, output = run(accept_winners, [best], [tokens], [parents], depth_of(parents))
    assert got[0, : len(path)].tolist() == path
    assert accepted.item() == len(path) - 1
    assert output[0, len(path) - 1].item() == VOCAB - 1


def test_full_acceptance_of_a_chain(accept_winners):
    _, accepted, output = run(accept_winners, [[1, 2, 3, 4, 5]], [[9, 1, 2, 3, 4]], [CHAIN], 4)
    assert accepted.tolist() == [4]
    assert output.tolist() == [[1, 2, 3, 4, 5]]


def test_a_node_without_a_winner_ends_the_walk(accept_winners):
    """The root of padding, and a node that is dead: token 0, though a child has token -1."""
    tokens = torch.tensor([[5, -1, 0], [5, 3, -1]])
    parents = torch.tensor([[-1, 0, 0], [-1, 0, 1]], dtype=torch.int32)
    winners = torch.tensor([[-1, 4, 4], [3, -1, 4]])
    path, accepted, output = accept_winners(winners, tokens, parents, 2)
    assert path.tolist() == [[0, -1, -1], [0, 1, -1]]
    assert accepted.tolist() == [0, 1]
    assert output.tolist() == [[0, -1, -1], [3, 0, -1]]


def test_the_first_of_equal_siblings_is_entered(accept_winners):
    parents = torch.tensor([[-1, 0, 0, 1, 2]], dtype=torch.int32)
    tokens, winners = torch.tensor([[0, 3, 3, 1, 2]]), torch.tensor([[3, 1, 2, 7, 7]])
    path, _, output = accept_winners(winners, tokens, parents, 2)
    assert path.tolist() == [[0, 1, 3]]
    assert output.tolist() == [[3, 1, 7]]


def test_rows_of_wider_tensors_and_parents_of_one_tree(accept_winners):
    wide = torch.full((2, 9), 3)
    wide[:, 2:7] = torch.tensor([[1, 2, 3, 4, 5], [1, 7, 3, 4, 5]])
    tokens = torch.full((2, 8), 3)
    tokens[:, 1:6] = torch.tensor([[9, 1, 2, 3, 4]])
    parents = torch.tensor(CHAIN, dtype=torch.int32).expand(2, -1)
    path, accepted, output = accept_winners(wide[:, 2:7], tokens[:, 1:6], parents, 4)
    assert path.tolist() == [[0, 1, 2, 3, 4], [0, 1, -1, -1, -1]]
    assert accepted.tolist() == [4, 1]
    assert output.tolist() == [[1, 2, 3, 4, 5], [1, 7, -1, -1, -1]]


def test_the_root_is_nobodys_child(accept_winners):
    """Whatever the parents say: a walk does not go round."""
    parents, tokens = torch.tensor([[1, 0]], dtype=torch.int32), torch.full((1, 2), 2)
    path, accepted, output = accept_winners(tokens, tokens, parents, 3)
    assert path.tolist() == [[0, 1, -1, -1]]
    assert accepted.tolist() == [1]
    assert output.tolist() == [[2, 2, -1, -1]]


def test_a_walk_is_cut_at_its_last_level(accept_winners):
    parents, tokens = torch.tensor([CHAIN], dtype=torch.int32), torch.tensor([[9, 1, 2, 3, 4]])
    _, accepted, output = accept_winners(torch.tensor([[1, 2, 3, 4, 5]]), tokens, parents, 2)
    assert accepted.tolist() == [2]
    assert output.tolist() == [[1, 2, 3]]


@st.composite
def batches(draw):
    """Trees of one width with distinct siblings; few tokens, so that walks go deep."""
    width = draw(st.integers(1, 9))
    best, tokens, parents = [], [], []
    for _ in range(draw(st.integers(1, 4))):
        num_nodes = draw(st.integers(1, width))
        tree, labels = [-1], [draw(st.integers(0, 4))]
        for node in range(1, num_nodes):
            parent = draw(st.integers(0, node - 1))
            taken = {labels[i] for i in range(1, node) if tree[i] == parent}
            labels.append(draw(st.sampled_from([t for t in range(12) if t not in taken])))
            tree.append(parent)
        dead = width - num_nodes
        parents.append(tree + [-1] * dead)
        tokens.append(labels + [draw(st.integers(0, 11)) for _ in range(dead)])
        best.append([draw(st.sampled_from([*labels, 0, 1])) for _ in range(width)])
    max_depth = max(map(depth_of, parents)) + draw(st.integers(0, 2))
    return best, tokens, parents, max_depth


@settings(max_examples=80, deadline=None)
@given(batches())
def test_any_batch_equals_the_walk(accept_winners, batch):
    run(accept_winners, *batch)
