"""Token trees: properties of random trees, expansion, words of bits, and errors."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specc.errors import SpeccError, TreeError
from specc.speculation.tree import MAX_NODES, WORD_BITS, TokenTree, pack_bits


@st.composite
def parent_lists(draw, max_nodes: int = 90):
    """Any valid tree; a small reach makes it deep, a large one wide."""
    num_nodes = draw(st.integers(1, max_nodes))
    reach = draw(st.integers(1, max_nodes))
    return (-1, *(draw(st.integers(max(0, n - reach), n - 1)) for n in range(1, num_nodes)))


# at most 1 + 4 + … + 4**4 = 341 nodes
WIDTHS = st.lists(st.integers(1, 4), min_size=1, max_size=4)


def closure(parents: tuple[int, ...]) -> list[set[int]]:
    """Reflexive transitive closure of "parent of", by fixed point."""
    reach = [{node} for node in range(len(parents))]
    changed = True
    while changed:
        changed = False
        for node in range(len(parents)):
            for seen in list(reach[node]):
                if parents[seen] >= 0 and parents[seen] not in reach[node]:
                    reach[node].add(parents[seen])
                    changed = True
    return reach


def bit(words: list[int], column: int) -> bool:
    """Bit `column` of two's complement words, in Python integers."""
    return bool((words[column // 64] % 2**64) // 2 ** (column % 64) % 2)


@given(parent_lists())
@settings(deadline=None)
def test_levels_and_depths(parents):
    tree = TokenTree(parents)
    paths = closure(parents)
    assert tree.depths == tuple(len(path) - 1 for path in paths)
    assert tree.max_depth == max(tree.depths)
    assert len(tree.levels) == tree.max_depth + 1
    assert tree.levels[0] == (0,)
    assert sorted(itertools.chain(*tree.levels)) == list(range(tree.num_nodes))
    for depth, level in enumerate(tree.levels):
        assert list(level) == sorted(level)
        assert all(tree.depths[node] == depth for node in level)
    assert tree.num_nodes == len(parents)
    assert tree.num_draft_tokens == len(parents) - 1


@given(parent_lists())
@settings(deadline=None)
def test_children_and_leaves(parents):
    tree = TokenTree(parents)
    for node in range(tree.num_nodes):
        children = tree.children(node)
        assert all(parents[child] == node for child in children)
        assert list(children) == sorted(children)
        assert (node in tree.leaves) == (not children)
    assert sum(len(tree.children(node)) for node in range(tree.num_nodes)) == len(parents) - 1


@given(parent_lists())
@settings(deadline=None, max_examples=60)
def test_ancestor_mask_is_the_transitive_closure(parents):
    mask = TokenTree(parents).ancestor_mask()
    assert mask.dtype == torch.bool
    assert mask.shape == (len(parents), len(parents))
    assert [set(row.nonzero()[:, 0].tolist()) for row in mask] == closure(parents)


@given(parent_lists(max_nodes=140))
@settings(deadline=None, max_examples=40)
def test_ancestor_words_are_the_bits_of_the_mask(parents):
    tree = TokenTree(parents)
    words = tree.ancestor_words()
    assert words.dtype == torch.int64
    assert words.shape == (len(parents), math.ceil(len(parents) / 64))
    paths = closure(parents)
    for node, row in enumerate(words.tolist()):
        set_bits = {column for column in range(64 * len(row)) if bit(row, column)}
        assert set_bits == paths[node]


@pytest.mark.parametrize("num_nodes", [1, 63, 64, 65, 127, 128, 129, 1024], ids="n{}".format)
def test_words_of_a_chain_at_word_borders(num_nodes):
    words = TokenTree(tuple(range(-1, num_nodes - 1))).ancestor_words()
    assert words.shape == (num_nodes, math.ceil(num_nodes / 64))
    for node in {0, num_nodes // 2, num_nodes - 1}:
        row = words[node].tolist()
        assert [bit(row, column) for column in range(64 * len(row))] == [
            column <= node for column in range(64 * len(row))
        ]


def test_bit_63_is_the_sign_bit():
    assert WORD_BITS == 64
    words = TokenTree((-1, *[0] * 64)).ancestor_words()
    assert words[62].tolist() == [2**62 + 1, 0]
    assert words[63].tolist() == [-(2**63) + 1, 0]
    assert words[64].tolist() == [1, 1]


@given(st.integers(1, 4), st.integers(1, 150), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=40)
def test_pack_bits_of_any_mask(rows, columns, chooser):
    mask = [[chooser.random() < 0.5 for _ in range(columns)] for _ in range(rows)]
    words = pack_bits(torch.tensor(mask)).tolist()
    for row, packed in zip(mask, words, strict=True):
        assert len(packed) == math.ceil(columns / 64)
        unpacked = [bit(packed, column) for column in range(64 * len(packed))]
        assert unpacked == row + [False] * (64 * len(packed) - columns)


def test_pack_bits_all_ones():
    assert pack_bits(torch.ones(2, 128, dtype=torch.bool)).tolist() == [[-1, -1]] * 2


@given(WIDTHS)
def test_expansion(widths):
    tree = TokenTree.from_widths(widths)
    assert tree.widths == tuple(widths)
    # 1 + Σ_i Π_{j≤i} k_j
    sizes = [math.prod(widths[:level]) for level in range(len(widths) + 1)]
    assert tree.num_nodes == sum(sizes)
    assert tree.max_depth == len(widths)
    assert [len(level) for level in tree.levels] == sizes
    assert tree.parents[0] == -1
    assert all(0 <= parent < node for node, parent in enumerate(tree.parents) if node)
    for level, width in zip(tree.levels, widths, strict=False):
        for node in level:
            children = tree.children(node)
            assert list(children) == list(range(children[0], children[0] + width))
    assert tree.leaves == frozenset(tree.levels[-1])
    # level by level
    assert list(tree.depths) == sorted(tree.depths)


def test_expansion_of_3_2_1_by_hand():
    tree = TokenTree.from_widths((3, 2, 1))
    assert tree.parents == (-1, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 9)
    assert tree.depths == (0, 1, 1, 1, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3)


def test_widths_of_specinfer():
    assert TokenTree.from_widths([1, 1, 3, 1, 1, 1, 1, 1]).num_nodes == 1 + 2 + 6 * 3


@pytest.mark.parametrize("length", [1, 2, 7, 70, MAX_NODES - 1], ids="k{}".format)
def test_chain(length):
    tree = TokenTree.chain(length)
    assert tree.parents == tuple(range(-1, length))
    assert tree.widths == (1,) * length
    assert tree.max_depth == tree.num_draft_tokens == length


def test_chain_of_nothing_is_the_root():
    tree = TokenTree.chain(0)
    assert tree == TokenTree((-1,))
    assert (tree.num_nodes, tree.num_draft_tokens, tree.max_depth) == (1, 0, 0)
    assert tree.levels == ((0,),)
    assert tree.leaves == {0}
    assert tree.ancestor_words().tolist() == [[1]]


def test_equal_trees_are_equal_keys():
    first, second = TokenTree.from_widths([2, 1]), TokenTree.from_widths((2, 1))
    assert first.levels  # a cached property changes neither equality nor hash
    assert first == second
    assert len({first, second}) == 1


def assert_three_lines(error: SpeccError, found: str, needed: str) -> None:
    assert found in error.found
    assert needed in error.needed
    assert error.do
    assert str(error) == f"found:  {error.found}\nneeded: {error.needed}\ndo:     {error.do}"


@pytest.mark.parametrize(
    ("parents", "found", "needed"),
    [
        pytest.param((), "parents ()", "parents[0] == -1", id="empty"),
        pytest.param((0,), "(0,)", "parents[0] == -1", id="root-is-its-own-parent"),
        pytest.param((0, -1), "(0, -1)", "parents[0] == -1", id="root-second"),
        pytest.param((-1, -1), "node 1 has parent -1", "0 … 0", id="two-roots"),
        pytest.param((-1, 1), "node 1 has parent 1", "0 … 0", id="own-parent"),
        pytest.param((-1, 0, 3, 0), "node 2 has parent 3", "0 … 1", id="parent-behind"),
        pytest.param((-1, 0, -2), "node 2 has parent -2", "0 … 1", id="negative"),
        pytest.param((-1, *[0] * MAX_NODES), "1025 nodes", "1024", id="too-many"),
    ],
)
def test_malformed_parents(parents, found, needed):
    with pytest.raises(TreeError) as caught:
        TokenTree(parents)
    assert_three_lines(caught.value, found, needed)


def test_most_nodes():
    assert TokenTree((-1, *[0] * (MAX_NODES - 1))).num_nodes == MAX_NODES
    assert TokenTree.from_widths((MAX_NODES - 1,)).num_nodes == MAX_NODES


@pytest.mark.parametrize(
    ("widths", "found", "needed"),
    [
        pytest.param((), "(none)", "one or more levels", id="no-level"),
        pytest.param((0,), "widths 0", "width 1 or more", id="zero"),
        pytest.param((3, 0, 2), "3,0,2", "width 1 or more", id="zero-inside"),
        pytest.param((2, -1), "2,-1", "width 1 or more", id="negative"),
        pytest.param((MAX_NODES,), "1024", "at most 1024", id="one-node-too-many"),
        pytest.param((2,) * 10, "more than 1024", "at most 1024", id="binary-of-10-levels"),
        pytest.param((10**6,) * 50, "more than 1024", "at most 1024", id="astronomic"),
    ],
)
def test_malformed_widths(widths, found, needed):
    with pytest.raises(TreeError) as caught:
        TokenTree.from_widths(widths)
    assert_three_lines(caught.value, found, needed)


@pytest.mark.parametrize("length", [-1, MAX_NODES], ids="k{}".format)
def test_malformed_chain(length):
    with pytest.raises(TreeError):
        TokenTree.chain(length)
