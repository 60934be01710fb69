"""`accept_winners` in Triton against its oracle."""

from __future__ import annotations

import pytest
import torch

from specc.kernels.cuda import accept_winners as kernels
from tests.kernels.cuda import cases_accept_winners as cases

pytestmark = pytest.mark.usefixtures("poisoned_memory")


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
    accepted = cases.check_accept_winners(batch, num_nodes, max_depth, device, shape=shape)
    # cases in which nothing is accepted would show nothing
    assert accepted >= min(batch, num_nodes - 1, 1)


def test_the_first_of_equal_siblings_is_followed(device):
    cases.check_equal_siblings(device)


def test_parents_shared_by_all_sequences(device):
    cases.check_shared_parents(device)


def test_a_node_without_a_winner_ends_the_walk(device):
    cases.check_no_winner(device)


def test_cyclic_parents_end_the_walk(device):
    cases.check_cyclic_parents(device)


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
        ({"winners": torch.zeros(2, 3, dtype=torch.int32)}, "winners of torch.int32"),
        ({"winners": torch.zeros(3, 3, dtype=torch.int64)}, r"winners \[3, 3\]"),
        ({"tokens": torch.zeros(2, 3, dtype=torch.int32)}, "torch.int32"),
        ({"parents": torch.zeros(2, 3, dtype=torch.int64)}, "parents of torch.int64"),
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
