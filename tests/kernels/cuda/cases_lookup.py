"""Checks of `lookup` on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from specc.kernels.cuda import lookup
from specc.kernels.reference import trees as reference
from tests.kernels.cuda.cases_merge import same
from tests.kernels.tree_cases import PADDING, Lookup, int32


def check_lookup(case: Lookup, device: torch.device) -> None:
    arguments, _ = case.make()
    wanted = reference.lookup_reference(*arguments)
    inputs = [x.to(device) if isinstance(x, Tensor) else x for x in arguments]
    # a view: the table's rows need not lie side by side
    table = inputs[1]
    wide = torch.zeros(len(table), table.shape[1] + 3, dtype=torch.int32, device=device)
    wide[:, 1:-2] = table
    inputs[1] = wide[:, 1:-2]
    same(lookup.lookup(*inputs), wanted)


def check_blocks_beyond_the_history(device: torch.device) -> None:
    """A block that is not there holds no token, and a length beyond the table ends at it."""
    memory = torch.full((4, 2), 5, dtype=torch.int32, device=device)
    table = int32([[0, 9], [-1, 1], [0, 1], [1, 0]]).to(device)
    lengths = int32([4, 2, 9, PADDING]).to(device)
    last = torch.full((4, 1), 5, device=device)
    tokens, parents = lookup.lookup(memory[1:-1], table, lengths, last, 1, 3)
    assert tokens.tolist() == [[5, 0, 0, 5], [5, 0, 0, 0], [5, 0, 0, 0], [5, 0, 0, 0]]
    assert parents.tolist() == [[-1, 0, 1, 2], [-1] * 4, [-1, 0, 1, 2], [-1] * 4]


def check_roots_that_fit_no_history(device: torch.device) -> None:
    history = torch.zeros(1, 16, dtype=torch.int32, device=device)
    for root in (2**32, -(2**32), -(2**63)):
        inputs = (int32([[0]]), int32([9]), torch.tensor([[root]]))
        tokens, parents = lookup.lookup(history, *(x.to(device) for x in inputs), 2, 2)
        assert (tokens.tolist(), parents.tolist()) == ([[root, 0, 0]], [[-1, -1, -1]])
