"""Checks of `image_slots`, `vote_chain` and `record_tokens` on any device."""

from __future__ import annotations

import random

import torch

from specc.kernels.cuda import trees
from specc.kernels.reference import trees as reference
from tests.kernels import tree_cases
from tests.kernels.cuda.cases_merge import inside, same
from tests.kernels.tree_cases import int32


def check_image_slots(
    batch: int, num_own: int, num_nodes: int, device: torch.device, shared: bool
) -> None:
    chooser = random.Random(num_own)
    image, slots = tree_cases.image_inputs(chooser, batch, num_own, num_nodes, shared)
    wanted = reference.image_slots_reference(image, slots, num_nodes)
    rows = slots.to(device) if shared else inside(slots, 3, device)
    same((trees.image_slots(inside(image, 0, device), rows, num_nodes),), (wanted,))


def check_vote_chain(batch: int, num_drafts: int, length: int, device: torch.device) -> None:
    arguments = tree_cases.vote_inputs(random.Random(length), batch, num_drafts, length)
    wanted = reference.vote_chain_reference(*arguments)
    same((trees.vote_chain(*(tensor.to(device) for tensor in arguments)),), (wanted,))


def check_order_of_votes(num_drafts: int, device: torch.device) -> None:
    """Weights whose sum depends on the order, and many ties of it."""
    tokens = torch.randint(0, 2, (40, num_drafts, 2))
    weights = 2.0 ** torch.randint(0, 26, (40, num_drafts))
    wanted = reference.vote_chain_reference(tokens, weights)
    same((trees.vote_chain(tokens.to(device), weights.to(device)),), (wanted,))


def check_rounded_vote(device: torch.device) -> None:
    chains, weights, wanted = tree_cases.ROUNDED_VOTE
    arguments = torch.tensor([chains]), torch.tensor([weights])
    assert trees.vote_chain(*(x.to(device) for x in arguments)).tolist() == [wanted]


def check_record_tokens(case: tree_cases.Record, device: torch.device) -> None:
    pages, arguments, written = case.make()
    wanted = pages.memory.clone()
    for (block, row), token in written.items():
        wanted[1 + block, row] = token
    memory = pages.memory.to(device)
    inputs = (pages.block_table, pages.cache_len, *arguments)
    assert trees.record_tokens(memory[1:-1], *(x.to(device) for x in inputs)) is None
    assert memory.tolist() == wanted.tolist()


def check_what_has_no_row_is_not_written(device: torch.device) -> None:
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
