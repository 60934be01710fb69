"""`image_slots`, `vote_chain` and `record_tokens` in Triton against their oracles."""

from __future__ import annotations

import random

import pytest
import torch

from specc.kernels.cuda import trees
from specc.kernels.reference import trees as reference
from tests.kernels import tree_cases
from tests.kernels.cuda.cases_merge import inside, same
from tests.kernels.tree_cases import Record, int32

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("shared", [True, False], ids=["slots-of-all", "slots-of-each"])
@pytest.mark.parametrize(
    ("batch", "num_own", "num_nodes"),
    [(1, 1, 1), (3, 7, 5), (2, 64, 40), (1, 150, 70), (2, 65, 33), (0, 3, 3)],
    ids=str,
)
def test_image_slots(batch, num_own, num_nodes, shared, device):
    chooser = random.Random(num_own)
    image, slots = tree_cases.image_inputs(chooser, batch, num_own, num_nodes, shared)
    wanted = reference.image_slots_reference(image, slots, num_nodes)
    rows = slots.to(device) if shared else inside(slots, 3, device)
    same((trees.image_slots(inside(image, 0, device), rows, num_nodes),), (wanted,))


@pytest.mark.parametrize(
    ("batch", "num_drafts", "length"),
    [(6, 1, 3), (20, 2, 4), (20, 3, 5), (20, 5, 6), (4, 9, 1), (3, 64, 2), (0, 3, 3), (2, 3, 0)],
    ids=str,
)
def test_vote_chain(batch, num_drafts, length, device):
    arguments = tree_cases.vote_inputs(random.Random(length), batch, num_drafts, length)
    wanted = reference.vote_chain_reference(*arguments)
    same((trees.vote_chain(*(tensor.to(device) for tensor in arguments)),), (wanted,))


@pytest.mark.parametrize("num_drafts", [3, 8, 21], ids="drafts{}".format)
def test_votes_are_added_in_the_order_of_the_drafts(num_drafts, device):
    """Weights whose sum depends on the order, and many ties of it."""
    tokens = torch.randint(0, 2, (40, num_drafts, 2))
    weights = 2.0 ** torch.randint(0, 26, (40, num_drafts))
    wanted = reference.vote_chain_reference(tokens, weights)
    same((trees.vote_chain(tokens.to(device), weights.to(device)),), (wanted,))


def test_votes_are_rounded(device):
    chains, weights, wanted = tree_cases.ROUNDED_VOTE
    arguments = torch.tensor([chains]), torch.tensor([weights])
    assert trees.vote_chain(*(x.to(device) for x in arguments)).tolist() == [wanted]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Record((4,), 3, 16, 0, 1, 1), id="one"),
        pytest.param(Record((0, 7, -1, 3), 5, 3, 0, 2, 2), id="pages-of-3"),
        pytest.param(Record((5, -1, 6, 7), 4, 1, 1, 3, 3), id="pages-of-1"),
        pytest.param(Record((13, 14, 15, 16), 4, 16, 1, 2, 4), id="pages-of-16"),
        pytest.param(Record((30, 31, 0, 12), 9, 40, 0, 2, 5), id="one-block"),
        pytest.param(Record(tuple(range(150)), 9, 16, 1, 2, 6), id="150-sequences"),
        pytest.param(Record((-1, -1), 2, 4, 0, 2, 7), id="padding"),
        pytest.param(Record((), 2, 4, 0, 2, 7), id="no-sequence"),
    ],
)
def test_record_tokens(case, device):
    pages, arguments, written = case.make()
    wanted = pages.memory.clone()
    for (block, row), token in written.items():
        wanted[1 + block, row] = token
    memory = pages.memory.to(device)
    inputs = (pages.block_table, pages.cache_len, *arguments)
    assert trees.record_tokens(memory[1:-1], *(x.to(device) for x in inputs)) is None
    assert memory.tolist() == wanted.tolist()


def test_what_has_no_row_is_not_written(device):
    """Places beyond the table, blocks that the history lacks, counts beyond the output."""
    memory = torch.zeros(5, 2, dtype=torch.int32, device=device)
    # each row of the table is followed by a block that exists
    table = int32([[0, 2, 2], [-1, 1, 2], [3, 0, 2], [1, 1, 2]])
    lengths = int32([2, 1, 0, 2**31 - 2])
    last = torch.tensor([[7]] * 4)
    output = torch.arange(10, 22).view(4, 3)
    accepted = int32([2, 1, 10**9, 2])
    inputs = (lengths, last, output, accepted)
    trees.record_tokens(memory[1:-1], table.to(device)[:, :2], *(x.to(device) for x in inputs))
    # each table is 2 blocks of 2 rows; block 0 lies in memory[1]
    assert memory.tolist() == [[0, 0], [17, 18], [13, 14], [7, 10], [0, 0]]


def test_bad_inputs_are_refused_with_their_values():
    image, chains, weights = int32([[0, 1, 2]] * 2), torch.zeros(2, 3, 4).long(), torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"image \[2, 3\] of torch.int64"):
        trees.image_slots(image.long(), image[0], 3)
    with pytest.raises(ValueError, match=r"slots \[2\] of torch.int32.*needed \[3\] or \[2, 3\]"):
        trees.image_slots(image, image[0, :2], 3)
    with pytest.raises(ValueError, match=r"slots .* strides \(2,\)"):
        trees.image_slots(image, torch.zeros(6).int()[::2], 3)
    with pytest.raises(ValueError, match="found 1025 nodes"):
        trees.image_slots(image, image, 1025)
    with pytest.raises(ValueError, match=r"weights \[2, 4\]"):
        trees.vote_chain(chains, torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"tokens .* of torch.int32"):
        trees.vote_chain(chains.int(), weights)
    with pytest.raises(ValueError, match="found 65 drafts"):
        trees.vote_chain(torch.zeros(1, 65, 2).long(), torch.zeros(1, 65))
    history, table, lengths, last = image, image, int32([1, 1]), torch.zeros(2, 2).long()
    inputs = (history, table, lengths, last, last, lengths)
    for place, value, message in (
        (0, image.long(), r"history \[2, 3\] of torch.int64"),
        (0, image[:, :2], r"history .* strides \(3, 1\)"),
        (1, image.T, "3 dimension|block_table"),
        (2, lengths.long(), r"cache_len \[2\] of torch.int64"),
        (2, int32([1, 1, 1]), r"needed \[3, n\]"),
        (3, last[:, :0], "needed 1 column or more"),
        (4, last.int(), r"output_tokens \[2, 2\] of torch.int32"),
        (5, int32([1]), r"num_accepted \[1\]"),
    ):
        with pytest.raises(ValueError, match=message):
            trees.record_tokens(*inputs[:place], value, *inputs[place + 1 :])
