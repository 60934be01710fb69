"""`accept_winners` in Triton against its oracle."""

from __future__ import annotations

import random

import pytest
import torch

from specc.kernels.cuda import accept_winners as kernels
from specc.kernels.cuda.accept_winners import accept_winners
from specc.kernels.reference.core import accept_winners_reference

pytestmark = pytest.mark.usefixtures("poisoned_memory")

NUM_LABELS = 3


def random_trees(
    generator: random.Random, batch: int, num_nodes: int, shape: str
) -> tuple[list[list[int]], list[list[int]]]:
    """(tokens, parents); siblings carry 0, 1, …, so that cousins carry equal tokens."""
    tokens, parents = [], []
    for b in range(batch):
        row, above = [generator.randrange(NUM_LABELS)], [-1]
        width = {"chain": 1, "star": num_nodes}.get(shape, NUM_LABELS)
        # sequences of a batch have trees of other sizes; the rest of a row is dead
        live = num_nodes if b == 0 else generator.randrange(1, num_nodes + 1)
        for node in range(1, num_nodes):
            free = [p for p in range(node) if above.count(p) < width and p < live]
            parent = node - 1 if shape == "chain" else generator.choice(free[:4])
            row.append(above.count(parent))
            above.append(parent if node < live else -1)
        tokens.append(row)
        parents.append(above)
    return tokens, parents


def check_accept_winners(
    batch: int, num_nodes: int, max_depth: int, device: torch.device, *, shape: str = "random"
) -> int:
    """Walks of every length; returns how many draft tokens were accepted in all."""
    generator = random.Random(batch * num_nodes + max_depth)
    tokens, parents = random_trees(generator, batch, num_nodes, shape)
    winners = []
    for b in range(batch):
        # nodes want what one of their children carries, or now and then what none does, or nothing
        row = []
        for node in range(num_nodes):
            carried = [tokens[b][child] for child in range(num_nodes) if parents[b][child] == node]
            other = generator.choice([-1, 0, 1 << 40])
            wanted = generator.choice(carried) if carried else other
            row.append(other if generator.random() < 0.1 else wanted)
        winners.append(row)
    # what lies between the rows would go on
    wide = torch.zeros(2, batch, num_nodes + 3, dtype=torch.int64, device=device)
    wide[0, :, :num_nodes] = torch.tensor(winners).view(batch, num_nodes)
    wide[1, :, :num_nodes] = torch.tensor(tokens).view(batch, num_nodes)
    own = torch.tensor(parents, dtype=torch.int32).view(batch, num_nodes)
    inputs = (wide[0, :, :num_nodes], wide[1, :, :num_nodes])
    wanted = accept_winners_reference(*(x.cpu() for x in inputs), own, max_depth)
    outputs = accept_winners(*inputs, own.to(device), max_depth)
    for got, want in zip(outputs, wanted, strict=True):
        assert got.dtype == want.dtype
        assert got.tolist() == want.tolist()
    return int(outputs[1].sum())


@pytest.mark.parametrize(
    ("batch", "num_nodes", "max_depth", "shape"),
    [
        pytest.param(3, 13, 12, "random", id="n13"),
        pytest.param(5, 9, 8, "random", id="n9"),
        pytest.param(1, 17, 16, "chain", id="n17-chain"),
        pytest.param(2, 20, 3, "star", id="n20-star"),
        pytest.param(3, 1, 0, "random", id="root-alone"),
        pytest.param(2, 130, 30, "random", id="n130"),
        pytest.param(1, 400, 30, "random", id="n400"),
        pytest.param(2, 8, 20, "random", id="levels-that-the-tree-lacks"),
        pytest.param(2, 30, 3, "chain", id="walk-is-cut"),
        pytest.param(0, 4, 3, "random", id="no-sequence"),
    ],
)
def test_accept_winners(batch, num_nodes, max_depth, shape, device):
    accepted = check_accept_winners(batch, num_nodes, max_depth, device, shape=shape)
    # cases in which nothing is accepted would show nothing
    assert accepted >= min(batch, num_nodes - 1, 1)


def test_the_first_of_equal_siblings_is_followed(device):
    """The first of siblings with one token is followed."""
    parents = torch.tensor([[-1, 0, 0, 1, 2]], dtype=torch.int32, device=device)
    tokens = torch.tensor([[0, 3, 3, 1, 2]], device=device)
    winners = torch.tensor([[3, 1, 2, 2, 2]], device=device)
    path, _, output = accept_winners(winners, tokens, parents, 2)
    assert path.tolist() == [[0, 1, 3]]
    assert output.tolist() == [[3, 1, 2]]


def test_parents_shared_by_all_sequences(device):
    """One row of parents for all sequences, as a static tree gives it; a label under a sibling."""
    parents = torch.tensor([-1, 0, 0, 2], dtype=torch.int32, device=device).expand(3, 4)
    tokens = torch.tensor([[0, 3, 4, 5], [7, 3, 4, 5], [0, 1, 2, 3]], device=device)
    winners = torch.tensor([[3, 5, 9, 9], [7, 4, 4, 4], [2, 0, 3, 8]], device=device)
    path, accepted, output = accept_winners(winners, tokens, parents, 2)
    # the root's own token is no child; node 1 wants what node 2's child carries
    assert path.tolist() == [[0, 1, -1], [0, -1, -1], [0, 2, 3]]
    assert accepted.tolist() == [1, 0, 2]
    assert output.tolist() == [[3, 5, -1], [7, -1, -1], [2, 3, 8]]


def test_a_node_without_a_winner_ends_the_walk(device):
    """A walk ends there with token 0, though a dead node carries -1; so does that of padding."""
    parents = torch.tensor([[-1, 0, 1], [-1, 0, 0]], dtype=torch.int32, device=device)
    tokens = torch.tensor([[5, 3, -1], [5, -1, 0]], device=device)
    winners = torch.tensor([[3, -1, 4], [-1, 4, 4]], device=device)
    path, accepted, output = accept_winners(winners, tokens, parents, 2)
    assert path.tolist() == [[0, 1, -1], [0, -1, -1]]
    assert accepted.tolist() == [1, 0]
    assert output.tolist() == [[3, 0, -1], [0, -1, -1]]


def test_cyclic_parents_end_the_walk(device):
    """Parents in a cycle end at max_depth: a walk never hangs; the root is nobody's child."""
    parents = torch.tensor([[1, 0, 1, 2]], dtype=torch.int32, device=device)
    tokens, winners = (torch.full((1, 4), 2, device=device) for _ in range(2))
    _, accepted, output = accept_winners(winners, tokens, parents, 5)
    assert accepted.tolist() == [3]
    assert output.tolist() == [[2, 2, 2, 2, -1, -1]]
    parents = torch.tensor([[-1, 0, 3, 2]], dtype=torch.int32, device=device)
    _, accepted, _ = accept_winners(winners, tokens, parents, 5)
    assert accepted.tolist() == [1]


def inputs(batch: int = 2, num_nodes: int = 3) -> dict:
    return {
        "winners": torch.zeros(batch, num_nodes, dtype=torch.int64),
        "tokens": torch.zeros(batch, num_nodes, dtype=torch.int64),
        "parents": torch.zeros(batch, num_nodes, dtype=torch.int32),
        "max_depth": 2,
    }


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"winners": torch.zeros(2, 3, dtype=torch.int32)}, "winners .* of torch.int32"),
        ({"winners": torch.zeros(3, 3, dtype=torch.int64)}, r"winners \[3, 3\]"),
        ({"tokens": torch.zeros(2, 3, dtype=torch.int32)}, "torch.int32"),
        ({"parents": torch.zeros(2, 3, dtype=torch.int64)}, "parents .* of torch.int64"),
        ({"parents": torch.zeros(2, 4, dtype=torch.int32)}, r"parents \[2, 4\]"),
        ({"parents": torch.zeros(3, 2, dtype=torch.int32).T}, "strides"),
        ({"max_depth": -1}, "max_depth -1"),
        ({"max_depth": 1024}, "max_depth 1024"),
        (inputs(1, 1025), "1025 nodes"),
    ],
    ids=["i32", "rows", "t32", "i64", "shape", "strides", "depth-1", "depth1024", "n1025"],
)
def test_bad_inputs_are_refused_with_their_values(change, found):
    with pytest.raises(ValueError, match=found):
        kernels.accept_winners(**(inputs() | change))
