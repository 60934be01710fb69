"""The C++ of trees that come as data, and of the token history, against the oracles.

All results are integers, so everything is compared exactly.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specc.kernels.reference import sampling as reference_sampling
from specc.kernels.reference import trees as reference_trees
from tests.kernels import tree_cases as cases
from tests.kernels.cuda.cases_merge import candidate_tree, random_forest
from tests.kernels.tree_cases import PADDING, int32

pytestmark = pytest.mark.usefixtures("poisoned_memory")
EXAMPLES = settings(max_examples=150, deadline=None, derandomize=True)
seeds = st.integers(0, 2**31)


def same(got: Any, want: Any) -> None:
    pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
    for one, other in pairs:
        assert torch.equal(one, other)
        assert one.dtype == other.dtype
        assert one.is_contiguous()


def inside(tensor: Tensor, canary: float) -> Tensor:
    """The same values as rows of a wider tensor, canaries all around."""
    shape = (tensor.shape[0] + 2, tensor.shape[1] + 5)
    wide = torch.full(shape, canary, dtype=tensor.dtype)
    return wide[1:-1, 2:-3].copy_(tensor)


@EXAMPLES
@given(
    batch=st.integers(0, 3),
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    num_tokens=st.sampled_from([1, 2, 3, 1000]),
    seed=seeds,
)
def test_merge_trees(operators, batch, sizes, num_tokens, seed):
    tokens, parents, start = random_forest(random.Random(seed), batch, sizes, num_tokens)
    # tokens that differ in their upper words alone are others
    tokens = torch.where(tokens % 2 == 0, tokens, tokens << 40)
    want = reference_sampling.merge_trees_reference(tokens, parents, start)
    same(operators.merge_trees(tokens, parents, start), want)
    same(operators.merge_trees(inside(tokens, 1), inside(parents, 0), start), want)


@pytest.mark.parametrize("num_tokens", [1, 3, 100_000], ids="tokens{}".format)
def test_merge_trees_of_many_nodes(operators, num_tokens):
    arguments = random_forest(random.Random(3), 2, [1024, 512, 1024], num_tokens)
    want = reference_sampling.merge_trees_reference(*arguments)
    same(operators.merge_trees(*arguments), want)


def test_parents_that_do_not_precede_are_none(operators):
    tokens = torch.tensor([[9, 1, 2, 3, 4, 9, 1, 2]])
    parents = int32([[-1, 1, 10**9, -(2**31), 0, 5, 0, 1]])
    start = int32([0, 5, 8])
    want = reference_sampling.merge_trees_reference(tokens, parents, start)
    assert want[2].tolist() == [[0, -1, -1, -1, 1, 0, 2, 3]]
    same(operators.merge_trees(tokens, parents, start), want)


@EXAMPLES
@given(data=st.data(), seed=seeds)
def test_rerank_tree(operators, data, seed):
    size = data.draw(st.integers(1, 70))
    num_nodes = data.draw(st.integers(1, size) | st.just(size))
    kind = data.draw(st.sampled_from(["distinct", "ties", "masked", "nan"]))
    arguments = candidate_tree(random.Random(seed), data.draw(st.integers(0, 3)), size, kind)
    scores = arguments[2]
    if kind == "ties":
        # 0 and -0 are equal; so are all NaNs
        scores = torch.where(torch.rand_like(scores) < 0.3, -scores.abs() * 0, scores)
    arguments = (*arguments[:2], scores)
    want = reference_sampling.rerank_tree_reference(*arguments, num_nodes)
    same(operators.rerank_tree(*arguments, num_nodes), want)
    views = [inside(tensor, canary) for tensor, canary in zip(arguments, (1, 0, 1.0), strict=True)]
    same(operators.rerank_tree(*views, num_nodes), want)


@pytest.mark.parametrize("kind", ["distinct", "ties"])
def test_rerank_tree_of_many_candidates(operators, kind):
    arguments = candidate_tree(random.Random(4), 2, 4096, kind)
    want = reference_sampling.rerank_tree_reference(*arguments, 1024)
    same(operators.rerank_tree(*arguments, 1024), want)


def test_rerank_ranks_every_kind_of_number(operators):
    numbers = [float("nan"), -float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, -1e-40]
    numbers += [1.0, -1.0, 3e38, -3e38]
    for seed in range(20):
        scores = torch.tensor([random.Random(seed).choices(numbers, k=24)])
        tokens, parents = torch.arange(24)[None], torch.zeros(1, 24).int()
        for num_nodes in (1, 5, 12, 23):
            want = reference_sampling.rerank_tree_reference(tokens, parents, scores, num_nodes)
            same(operators.rerank_tree(tokens, parents, scores, num_nodes), want)


def test_rerank_leaves_no_dangling_parent(operators):
    tokens, parents = torch.tensor([[5, 6, 7, 8]]), int32([[-1, 0, 1, 9]])
    scores = torch.tensor([[0.0, -9.0, -1.0, -2.0]])
    want = (torch.tensor([[5, 7, 8]]), int32([[-1, -1, -1]]), int32([[0, 2, 3]]))
    same(operators.rerank_tree(tokens, parents, scores, 3), want)


@EXAMPLES
@given(
    batch=st.integers(0, 3),
    num_nodes=st.integers(1, 20) | st.sampled_from([63, 64, 65, 128, 130, 200]),
    reach=st.sampled_from([1, 3, 1000]),
    dead=st.sampled_from([0.0, 0.1]),
    seed=seeds,
)
def test_ancestor_words(operators, batch, num_nodes, reach, dead, seed):
    chooser = random.Random(seed)
    rows = [
        [
            -1
            if not node or chooser.random() < dead
            else chooser.randrange(max(0, node - reach), node)
            for node in range(num_nodes)
        ]
        for _ in range(batch)
    ]
    parents = int32(rows).view(batch, num_nodes)
    want = reference_sampling.ancestor_words_reference(parents)
    same(operators.ancestor_words(parents), want)
    same(operators.ancestor_words(inside(parents, 0)), want)


@pytest.mark.parametrize("shape", ["chain", "star"])
def test_ancestor_words_of_many_nodes(operators, shape):
    above = range(-1, 1023) if shape == "chain" else [-1, *[0] * 1023]
    parents = int32([list(above)])
    same(operators.ancestor_words(parents), reference_sampling.ancestor_words_reference(parents))


def test_parents_that_do_not_precede_end_the_walk(operators):
    words, depths = operators.ancestor_words(int32([[3, 2, 1, 3, 10**9, 3]]))
    assert words.flatten().tolist() == [1, 2, 6, 8, 16, 40]
    assert depths.tolist() == [0, 0, 1, 0, 0, 1]


@EXAMPLES
@given(
    batch=st.integers(0, 3),
    num_own=st.integers(1, 12),
    num_nodes=st.integers(1, 9),
    shared=st.booleans(),
    seed=seeds,
)
def test_image_slots(operators, batch, num_own, num_nodes, shared, seed):
    image, slots = cases.image_inputs(random.Random(seed), batch, num_own, num_nodes, shared)
    want = reference_trees.image_slots_reference(image, slots, num_nodes)
    same(operators.image_slots(image, slots, num_nodes), want)
    wide = slots if shared else inside(slots, 3)
    same(operators.image_slots(inside(image, 0), wide, num_nodes), want)


@EXAMPLES
@given(batch=st.integers(0, 3), num_drafts=st.integers(1, 6), length=st.integers(0, 7), seed=seeds)
def test_vote_chain(operators, batch, num_drafts, length, seed):
    arguments = cases.vote_inputs(random.Random(seed), batch, num_drafts, length)
    same(operators.vote_chain(*arguments), reference_trees.vote_chain_reference(*arguments))


@EXAMPLES
@given(num_drafts=st.integers(2, 40), seed=seeds)
def test_votes_are_added_in_the_order_of_the_drafts(operators, num_drafts, seed):
    """Weights whose sum depends on the order, and many ties of it."""
    torch.manual_seed(seed)
    tokens = torch.randint(0, 2, (20, num_drafts, 3))
    weights = 2.0 ** torch.randint(0, 26, (20, num_drafts))
    same(
        operators.vote_chain(tokens, weights), reference_trees.vote_chain_reference(tokens, weights)
    )


lookups = st.builds(
    cases.Lookup,
    kind=st.sampled_from(cases.CONTEXTS),
    lengths=st.lists(st.integers(-1, 120), max_size=4).map(tuple),
    block_size=st.sampled_from([0, 1, 3, 16, 32]),
    ngram=st.integers(1, 8) | st.sampled_from([31, 32, 33, 34, 60, 200]),
    num_tokens=st.integers(1, 12),
    num_last=st.integers(1, 3),
    seed=seeds,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(lookups)
def test_lookup(operators, case):
    arguments, _ = case.make()
    before = [tensor.clone() for tensor in arguments[:4]]
    same(operators.lookup(*arguments), reference_trees.lookup_reference(*arguments))
    for tensor, copy in zip(arguments, before, strict=False):
        assert torch.equal(tensor, copy)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.builds(
        cases.Lookup,
        kind=st.sampled_from(cases.CONTEXTS),
        # what is looked at together is 2048 tokens long
        lengths=st.tuples(
            st.integers(2000, 9000) | st.sampled_from([2047, 2048, 2049, 2080, 4096, 6144])
        ),
        block_size=st.sampled_from([0, 1, 3, 16, 256, 3000]),
        ngram=st.integers(1, 5) | st.sampled_from([32, 40, 100]),
        num_tokens=st.integers(1, 12),
        num_last=st.just(1),
        seed=seeds,
    )
)
def test_lookup_of_many_tokens(operators, case):
    arguments, _ = case.make()
    same(operators.lookup(*arguments), reference_trees.lookup_reference(*arguments))


@pytest.mark.parametrize(
    "block_size", [16, pytest.param(5000, marks=pytest.mark.slow)], ids="page{}".format
)
@pytest.mark.parametrize(
    "matched",
    [1, pytest.param(2, marks=pytest.mark.slow), 33, pytest.param(70, marks=pytest.mark.slow)],
    ids="matched{}".format,
)
def test_lookup_finds_a_suffix_at_every_place(operators, matched, block_size):
    """Wherever it stands: across blocks, registers and what is looked at together."""
    length, ngram = 4200, 64
    pages = cases.Pages(random.Random(1), [length], block_size, -(-length // block_size), [0])
    context = list(range(10, 10 + length + 1))
    last = torch.tensor([context[-1:]])
    for end in [*range(matched, 120), *range(2000, 2200), *range(length - 100, length + 1)]:
        tokens = list(context)
        # later and shorter, where there is room
        if matched > 1 and end + 70 < length:
            tokens[end + 20 - matched : end + 20] = context[length + 2 - matched : length + 1 + 1]
        tokens[end - matched : end] = context[length + 1 - matched :]
        pages.write(0, tokens[:-1])
        arguments = (pages.history, pages.block_table, pages.cache_len, last, ngram, 3)
        want = reference_trees.lookup_reference(*arguments)
        same(operators.lookup(*arguments), want)


def test_a_root_that_fits_no_history_is_not_found(operators):
    history = torch.zeros(1, 16, dtype=torch.int32)
    for root in (2**32, -(2**32), 2**63 - 1):
        tokens, parents = operators.lookup(
            history, int32([[0]]), int32([9]), torch.tensor([[root]]), 2, 2
        )
        assert (tokens.tolist(), parents.tolist()) == ([[root, 0, 0]], [[-1, -1, -1]])


@EXAMPLES
@given(
    st.builds(
        cases.Record,
        lengths=st.lists(st.integers(-1, 40), max_size=4).map(tuple),
        width=st.integers(1, 9),
        block_size=st.sampled_from([1, 3, 16, 60]),
        missing=st.integers(0, 1),
        num_last=st.integers(1, 3),
        seed=seeds,
    )
)
def test_record_tokens(operators, case):
    pages, arguments, written = case.make()
    wanted = pages.memory.clone()
    for (block, row), token in written.items():
        wanted[1 + block, row] = token
    places = (pages.history, pages.block_table, pages.cache_len)
    assert operators.record_tokens(*places, *arguments) is None
    assert torch.equal(pages.memory, wanted)


def test_the_bonus_token_may_have_no_row(operators):
    history = torch.zeros(3, 2, dtype=torch.int32)
    last, output = torch.tensor([[8, 9]]), torch.tensor([[1, 2, 3]])
    operators.record_tokens(history, int32([[1, 2]]), int32([1]), last, output, int32([2]))
    assert history.tolist() == [[0, 0], [0, 9], [1, 2]]


def calls() -> dict[str, tuple[Any, ...]]:
    """Arguments of each operator."""
    forest = random_forest(random.Random(0), 2, [4, 3], 2)
    candidates = candidate_tree(random.Random(0), 2, 9, "distinct")
    history, table, lengths = torch.zeros(5, 4).int(), int32([[1, 0], [2, 3]]), int32([6, PADDING])
    last, output = torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1], [2]])
    return {
        "merge_trees": forest,
        "rerank_tree": (*candidates, 5),
        "ancestor_words": (candidates[1],),
        "image_slots": (int32([[0, 1, 1], [2, 0, -1]]), int32([4, 5, 6]), 3),
        "vote_chain": (torch.zeros(2, 3, 4).long(), torch.ones(2, 3)),
        "lookup": (history, table, lengths, last, 3, 4),
        "record_tokens": (history, table, lengths, last, output, int32([0, 9])),
    }


LONG, BIG = torch.zeros(2, 7).long(), torch.zeros(2, 7).int()


@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        ("merge_trees", 0, BIG, "tokens is"),
        ("merge_trees", 0, torch.zeros(7, 2).long().T, "tokens is .* contiguous"),
        ("merge_trees", 1, BIG[:, :3], "parents is"),
        ("merge_trees", 1, LONG, "parents is"),
        ("merge_trees", 2, torch.tensor([0, 4, 7]), "start is"),
        ("merge_trees", 2, int32([0]), "1 … T trees"),
        ("merge_trees", 2, int32([0, 4, 8]), "found start = 0, 4, 8, needed .* from 0 to 7"),
        ("merge_trees", 2, int32([1, 4, 7]), "found start = 1, 4, 7, needed"),
        ("merge_trees", 2, int32([0, 4, 4, 7]), "found start = 0, 4, 4, 7, needed"),
        ("merge_trees", 2, int32([0, 9, 2, 7]), "found start = 0, 9, 2, 7, needed"),
        ("rerank_tree", 2, torch.zeros(2, 8), "scores is"),
        ("rerank_tree", 2, torch.zeros(2, 9).double(), "scores is"),
        ("rerank_tree", 3, 0, "1 … M nodes"),
        ("rerank_tree", 3, 10, "1 … M nodes"),
        ("ancestor_words", 0, LONG, "parents is"),
        ("ancestor_words", 0, torch.zeros(2, 0).int(), "a root"),
        ("image_slots", 0, LONG[:, :3], "image is"),
        ("image_slots", 1, int32([1, 2]), "slots is"),
        ("image_slots", 1, int32([[1, 2, 3]]), "slots is"),
        ("image_slots", 1, torch.zeros(3), "slots is"),
        ("image_slots", 2, 0, "a root"),
        ("vote_chain", 0, torch.zeros(2, 3).long(), "tokens is"),
        ("vote_chain", 1, torch.zeros(2, 4), "tokens and weights agree"),
        ("vote_chain", 1, torch.zeros(2, 3).double(), "weights is"),
        ("lookup", 0, torch.zeros(5, 4).long(), "history is"),
        ("lookup", 0, torch.zeros(5, 8).int()[:, ::2], "history is"),
        ("lookup", 0, torch.zeros(5, 0).int(), "1 row"),
        ("lookup", 1, int32([[1, 0]]), "agree"),
        ("lookup", 1, int32([[5, 0], [0, 0]]), r"found block_table\[0\]\[0\] = 5, needed 0 … 4"),
        ("lookup", 1, int32([[0, -1], [0, 0]]), r"found block_table\[0\]\[1\] = -1, needed 0 … 4"),
        ("lookup", 2, int32([9, 0]), r"found cache_len\[0\] = 9, needed 0 … 8"),
        ("lookup", 2, torch.tensor([6, 0]), "cache_len is"),
        ("lookup", 3, torch.zeros(2, 0).long(), "last_tokens has"),
        ("lookup", 3, torch.zeros(1, 2).long(), "last_tokens has"),
        ("lookup", 4, 0, "ngram"),
        ("lookup", 5, 0, "num_tokens"),
        ("record_tokens", 1, int32([[1, 5], [0, 0]]), r"block_table\[0\]\[1\] = 5, needed 0 … 4"),
        ("record_tokens", 2, int32([8, 0]), r"found cache_len\[0\] = 9, needed 0 … 8"),
        ("record_tokens", 3, torch.zeros(2, 2).int(), "last_tokens is"),
        ("record_tokens", 4, torch.zeros(3, 1).long(), "agree"),
        ("record_tokens", 5, int32([1, 0]), r"found num_accepted\[0\] = 1, needed 0 … 0"),
        ("record_tokens", 5, int32([-1, 0]), r"found num_accepted\[0\] = -1, needed"),
    ],
)
def test_refuses(operators, name, place, value, message):
    arguments = list(calls()[name])
    arguments[place] = value
    with pytest.raises(RuntimeError, match=f"specc: .*{message}"):
        getattr(operators, name)(*arguments)


def test_what_is_not_used_may_be_anything(operators):
    """Blocks after a sequence's last, and all of padding."""
    history, last = torch.full((2, 4), 7, dtype=torch.int32), torch.tensor([[7], [7]])
    lengths = int32([4, PADDING])
    for entry in cases.WRONG_BLOCKS:
        table = int32([[1, entry], [entry, entry]])
        tokens, _ = operators.lookup(history, table, lengths, last, 3, 2)
        assert tokens.tolist() == [[7, 7, 7], [7, 0, 0]]
        outputs = (torch.tensor([[5], [5]]), int32([0, entry]))
        operators.record_tokens(history, table, int32([3, PADDING]), last, *outputs)
        assert history.tolist() == [[7] * 4] * 2
