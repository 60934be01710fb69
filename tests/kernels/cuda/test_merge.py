"""`merge_trees`, `rerank_tree` and `ancestor_words` in Triton against their oracles."""

from __future__ import annotations

import pytest
import torch

from specc.kernels.cuda import merge
from tests.kernels.cuda import cases_merge as cases

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize(
    ("batch", "sizes", "num_tokens"),
    [
        pytest.param(3, [5, 9], 3, id="2-trees"),
        pytest.param(2, [1, 1, 1], 2, id="roots-alone"),
        pytest.param(1, [12], 2, id="1-tree-of-equal-siblings"),
        pytest.param(2, [8, 1, 7, 11, 6], 2, id="5-trees"),
        pytest.param(1, [40, 33], 1000, id="nothing-in-common"),
        pytest.param(1, [31, 33], 1, id="chains-of-one-token"),
        pytest.param(0, [3, 3], 2, id="no-sequence"),
    ],
)
def test_merge_trees(batch, sizes, num_tokens, device):
    cases.check_merge_trees(batch, sizes, device, num_tokens)


@pytest.mark.parametrize(
    ("batch", "size", "num_nodes", "kind"),
    [
        pytest.param(2, 21, 8, "distinct", id="21-to-8"),
        pytest.param(3, 16, 7, "ties", id="16-to-7-ties"),
        pytest.param(2, 33, 12, "masked", id="33-to-12-masked"),
        pytest.param(2, 40, 35, "nan", id="40-to-35-nan"),
        pytest.param(1, 64, 64, "ties", id="all"),
        pytest.param(2, 9, 1, "distinct", id="root-alone"),
        pytest.param(1, 1, 1, "distinct", id="1-to-1"),
        pytest.param(0, 5, 2, "distinct", id="no-sequence"),
    ],
)
def test_rerank_tree(batch, size, num_nodes, kind, device):
    cases.check_rerank_tree(batch, size, num_nodes, kind, device)


def test_rerank_leaves_no_dangling_parent(device):
    cases.check_left_behind(device)


@pytest.mark.parametrize(
    ("batch", "num_nodes", "shape"),
    [
        pytest.param(2, 1, "random", id="root"),
        pytest.param(3, 13, "random", id="13"),
        pytest.param(1, 64, "chain", id="64-chain"),
        pytest.param(2, 65, "star", id="65-star"),
        pytest.param(2, 150, "random", id="150"),
        pytest.param(1, 200, "chain", id="200-chain"),
        pytest.param(1, 1024, "random", id="1024"),
    ],
)
def test_ancestor_words(batch, num_nodes, shape, device):
    cases.check_ancestor_words(batch, num_nodes, shape, device)


def test_parents_that_do_not_precede_end_the_walk(device):
    cases.check_bad_parents_end(device)


def tree(num_nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.zeros(1, num_nodes, dtype=torch.int64),
        torch.zeros(1, num_nodes, dtype=torch.int32),
    )


def test_bad_inputs_are_refused_with_their_values():
    tokens, parents = tree(4)
    start = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"torch\.int64"):
        merge.merge_trees(tokens, parents, start.long())
    with pytest.raises(ValueError, match="1 to 4 trees"):
        merge.merge_trees(tokens, parents, torch.arange(7, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"parents .* of torch.int64"):
        merge.merge_trees(tokens, parents.long(), start)
    with pytest.raises(ValueError, match="found 1025 nodes"):
        merge.merge_trees(*tree(1025), start)
    with pytest.raises(ValueError, match="5 nodes of 4 candidates"):
        merge.rerank_tree(tokens, parents, torch.zeros(1, 4), 5)
    with pytest.raises(ValueError, match=r"scores \[1, 3\]"):
        merge.rerank_tree(tokens, parents, torch.zeros(1, 3), 2)
    with pytest.raises(ValueError, match="found 4097 nodes"):
        merge.rerank_tree(*tree(4097), torch.zeros(1, 4097), 5)
    with pytest.raises(ValueError, match="found 1025 nodes"):
        merge.ancestor_words(tree(1025)[1])
    with pytest.raises(ValueError, match="strides"):
        merge.ancestor_words(torch.zeros(4, 3, dtype=torch.int32).T)
