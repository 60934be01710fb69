"""`image_slots`, `vote_chain` and `record_tokens` in Triton against their oracles."""

from __future__ import annotations

import pytest
import torch

from specc.kernels.cuda import trees
from tests.kernels.cuda import cases_trees as cases
from tests.kernels.tree_cases import Record, int32

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("shared", [True, False], ids=["slots-of-all", "slots-of-each"])
@pytest.mark.parametrize(
    ("batch", "num_own", "num_nodes"),
    [(1, 1, 1), (3, 7, 5), (2, 64, 40), (1, 150, 70), (2, 65, 33), (0, 3, 3)],
    ids=str,
)
def test_image_slots(batch, num_own, num_nodes, shared, device):
    cases.check_image_slots(batch, num_own, num_nodes, device, shared)


@pytest.mark.parametrize(
    ("batch", "num_drafts", "length"),
    [(6, 1, 3), (20, 2, 4), (20, 3, 5), (20, 5, 6), (4, 9, 1), (3, 64, 2), (0, 3, 3), (2, 3, 0)],
    ids=str,
)
def test_vote_chain(batch, num_drafts, length, device):
    cases.check_vote_chain(batch, num_drafts, length, device)


@pytest.mark.parametrize("num_drafts", [3, 8, 21], ids="drafts{}".format)
def test_votes_are_added_in_the_order_of_the_drafts(num_drafts, device):
    cases.check_order_of_votes(num_drafts, device)


def test_votes_are_rounded(device):
    cases.check_rounded_vote(device)


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
    cases.check_record_tokens(case, device)


def test_what_has_no_row_is_not_written(device):
    cases.check_what_has_no_row_is_not_written(device)


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
        (2, int32([1, 1, 1]), "3 lengths"),
        (3, last[:, :0], "needed 1 column or more"),
        (4, last.int(), r"output_tokens \[2, 2\] of torch.int32"),
        (5, int32([1]), r"num_accepted \[1\]"),
    ):
        with pytest.raises(ValueError, match=message):
            trees.record_tokens(*inputs[:place], value, *inputs[place + 1 :])
