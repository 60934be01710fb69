"""Oracles of lookups, votes and what a step records, against plain Python."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specc.kernels.reference import trees as reference
from tests.kernels import tree_cases as cases
from tests.kernels.tree_cases import PADDING, int32

pytestmark = pytest.mark.usefixtures("poisoned_memory")
EXAMPLES = settings(max_examples=300, deadline=None, derandomize=True)


@EXAMPLES
@given(
    st.builds(
        cases.Lookup,
        kind=st.sampled_from(cases.CONTEXTS),
        lengths=st.lists(st.integers(-1, 60), max_size=4).map(tuple),
        block_size=st.sampled_from([0, 1, 3, 16]),
        ngram=st.integers(1, 5) | st.sampled_from([60, 100]),
        num_tokens=st.integers(1, 9),
        num_last=st.integers(1, 3),
        seed=st.integers(0, 2**31),
    )
)
def test_lookup(case):
    arguments, contexts = case.make()
    tokens, parents = reference.lookup_reference(*arguments)
    wanted = cases.lookup_wanted(contexts, case.ngram, case.num_tokens)
    assert (tokens.tolist(), parents.tolist()) == wanted
    assert (tokens.dtype, parents.dtype) == (torch.int64, torch.int32)


@pytest.mark.parametrize(
    ("tokens", "ngram", "proposed"),
    [
        pytest.param([1, 2, 3, 9, 1, 2, 3], 3, [9, 1, 2, 3], id="trigram"),
        pytest.param([1, 2, 8, 4, 2, 9, 1, 2], 2, [8, 4, 2, 9], id="longer-before-later"),
        pytest.param([1, 2, 8, 4, 2, 9, 1, 2], 1, [9, 1, 2, 9], id="latest-of-equal-length"),
        pytest.param([5, 6, 5], 3, [6, 5, 6, 5], id="period-2"),
        pytest.param([4, 4], 9, [4, 4, 4, 4], id="ngram-beyond-the-context"),
        pytest.param([7, 1, 2, 1, 2, 1], 8, [2, 1, 2, 1], id="suffixes-overlap"),
        pytest.param([1, 2, 3], 3, None, id="nothing"),
        pytest.param([1], 3, None, id="root-alone"),
    ],
)
def test_lookup_by_hand(tokens, ngram, proposed):
    assert cases.look_up(tokens, ngram, 4) == proposed
    history = torch.full((3, 4), 4, dtype=torch.int32)
    history.view(-1)[4 : 4 + len(tokens) - 1] = int32(tokens[:-1])
    got = reference.lookup_reference(
        history, int32([[1, 2]]), int32([len(tokens) - 1]), torch.tensor([tokens[-1:]]), ngram, 4
    )
    assert got[0].tolist() == [[tokens[-1], *(proposed or [0] * 4)]]
    assert got[1].tolist() == [[-1, 0, 1, 2, 3] if proposed else [-1] * 5]


@EXAMPLES
@given(
    st.builds(
        cases.Record,
        lengths=st.lists(st.integers(-1, 20), max_size=4).map(tuple),
        width=st.integers(1, 6),
        block_size=st.sampled_from([1, 3, 16, 40]),
        missing=st.integers(0, 1),
        num_last=st.integers(1, 3),
        seed=st.integers(0, 2**31),
    )
)
def test_record_tokens(case):
    pages, arguments, written = case.make()
    wanted = pages.memory.clone()
    for (block, row), token in written.items():
        wanted[1 + block, row] = token
    reference.record_tokens_reference(pages.history, pages.block_table, pages.cache_len, *arguments)
    assert pages.memory.tolist() == wanted.tolist()


def test_what_is_beyond_the_table_is_not_recorded():
    history = torch.zeros(3, 2, dtype=torch.int32)
    last, output = torch.tensor([[8, 9]]), torch.tensor([[1, 2, 3]])
    reference.record_tokens_reference(
        history, int32([[1, 2]]), int32([1]), last, output, int32([2])
    )
    assert history.tolist() == [[0, 0], [0, 9], [1, 2]]


@pytest.mark.parametrize("seed", range(60), ids="seed{}".format)
def test_vote_chain(seed):
    chooser = random.Random(seed)
    tokens, weights = cases.vote_inputs(
        chooser, chooser.randint(0, 3), chooser.randint(1, 5), chooser.randint(0, 6)
    )
    got = reference.vote_chain_reference(tokens, weights)
    wanted = [cases.vote(*pair) for pair in zip(tokens.tolist(), weights.tolist(), strict=True)]
    assert got.tolist() == wanted
    assert (got.dtype, got.shape) == (torch.int64, (tokens.shape[0], tokens.shape[2]))


def test_votes_are_added_in_the_order_of_the_drafts():
    chains, weights, wanted = cases.ROUNDED_VOTE
    got = reference.vote_chain_reference(torch.tensor([chains]), torch.tensor([weights]))
    assert got.tolist() == [wanted]


def test_a_minority_has_no_say_further_down():
    chains = torch.tensor([[[1, 2, 2], [1, 3, 2], [4, 5, 6], [1, 3, -1]]])
    got = reference.vote_chain_reference(chains, torch.tensor([[1.0, 1.0, 1.5, 1.0]]))
    assert got.tolist() == [[1, 3, 2]]


@pytest.mark.parametrize("seed", range(40), ids="seed{}".format)
def test_image_slots(seed):
    chooser = random.Random(seed)
    batch, num_own, num_nodes = (
        chooser.randint(0, 3),
        chooser.randint(1, 12),
        chooser.randint(1, 9),
    )
    image, slots = cases.image_inputs(chooser, batch, num_own, num_nodes, seed % 2 == 0)
    got = reference.image_slots_reference(image, slots, num_nodes)
    own = slots.expand(image.shape).tolist()
    wanted = [cases.image_slots(*pair, num_nodes) for pair in zip(image.tolist(), own, strict=True)]
    assert got.tolist() == wanted
    assert (got.dtype, got.shape) == (torch.int32, (batch, num_nodes))


def test_padding_finds_and_writes_nothing():
    history = torch.zeros(1, 4, dtype=torch.int32)
    padding, table = int32([PADDING]), int32([[0]])
    last = torch.tensor([[0]])
    tokens, parents = reference.lookup_reference(history, table, padding, last, 2, 3)
    assert (tokens.tolist(), parents.tolist()) == ([[0] * 4], [[-1] * 4])
    reference.record_tokens_reference(history, table, padding, last + 5, last + 6, int32([0]))
    assert history.sum() == 0
