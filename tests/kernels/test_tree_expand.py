"""`specc::tree_expand` against a sort in Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.usefixtures("poisoned_memory")

NEVER = float("-inf")


@pytest.fixture(scope="module")
def tree_expand(implementation):
    return implementation.tree_expand.default


def best_tokens(logits: list[list[float]], num_children: int) -> list[list[int]]:
    """By descending logit, then ascending token id."""
    return [
        sorted(range(len(row)), key=lambda token: (-row[token], token))[:num_children]
        for row in logits
    ]


def check(
    tree_expand: torch._ops.OpOverload, logits: torch.Tensor, num_children: int
) -> torch.Tensor:
    before = logits.clone()
    tokens = tree_expand(logits, num_children)
    assert tokens.dtype == torch.int64
    assert tokens.shape == (logits.shape[0], num_children)
    assert tokens.tolist() == best_tokens(logits.tolist(), num_children)
    assert torch.equal(logits, before)
    return tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_children", [1, 2, 3, 8, 37], ids="k{}".format)
def test_random_logits(tree_expand, num_children, dtype):
    check(tree_expand, torch.randn(7, 37).to(dtype), num_children)


@pytest.mark.parametrize("num_children", [1, 2, 5], ids="k{}".format)
@pytest.mark.parametrize(
    "row",
    [
        pytest.param([1.0, 1.0, 1.0, 1.0, 1.0], id="all-equal"),
        pytest.param([0.0, 2.0, 1.0, 2.0, 1.0], id="two-pairs"),
        pytest.param([2.0, 2.0, 3.0, 3.0, 3.0], id="triple-last"),
        pytest.param([0.0, -0.0, 0.0, -0.0, -1.0], id="signed-zeros"),
        pytest.param([-5.0, -4.0, -4.0, -3.0, -3.0], id="all-negative"),
    ],
)
def test_ties_go_to_the_lower_token(tree_expand, row, num_children):
    check(tree_expand, torch.tensor([row, row[::-1]]), num_children)


@pytest.mark.parametrize("num_children", [1, 2, 3, 4], ids="k{}".format)
@pytest.mark.parametrize(
    "row",
    [
        pytest.param([1.0, NEVER, NEVER, NEVER], id="first-alone"),
        pytest.param([NEVER, NEVER, 1.0, NEVER], id="one-alone"),
        pytest.param([NEVER, 3.0, NEVER, 4.0], id="two"),
        pytest.param([NEVER] * 4, id="none"),
    ],
)
def test_siblings_stay_distinct_where_tokens_are_masked(tree_expand, row, num_children):
    """A masked token may fill a place, but no token comes twice: siblings carry distinct tokens."""
    check(tree_expand, torch.tensor([row]), num_children)


def test_no_rows(tree_expand):
    assert tree_expand(torch.randn(0, 9), 3).shape == (0, 3)


@pytest.mark.parametrize("num_children", [1, 3], ids="k{}".format)
def test_strided_logits(tree_expand, num_children):
    check(tree_expand, torch.randn(6, 11)[::2], num_children)
    check(tree_expand, torch.randn(6, 17)[:, 3:14], num_children)


@pytest.mark.parametrize("num_children", [1, 3], ids="k{}".format)
def test_logits_that_lie_by_column(reference_operators, num_children):
    """The oracle alone: the C++ reads rows of one piece, which is what a program computes."""
    check(reference_operators.tree_expand.default, torch.randn(11, 5).T, num_children)


# few distinct values, so that ties are frequent
@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 9).flatmap(
        lambda vocab: st.tuples(
            st.lists(
                st.lists(st.sampled_from([-1.5, 0.0, 0.25, 2.0]), min_size=vocab, max_size=vocab),
                min_size=1,
                max_size=4,
            ),
            st.integers(1, vocab),
        )
    )
)
def test_any_logits(tree_expand, case):
    rows, num_children = case
    check(tree_expand, torch.tensor(rows), num_children)
