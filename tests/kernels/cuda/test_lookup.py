"""`lookup` in Triton against its oracle."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specc.kernels.cuda import lookup
from specc.kernels.reference import trees as reference
from tests.kernels.cuda.cases_merge import same
from tests.kernels.tree_cases import CONTEXTS, PADDING, Lookup, int32

pytestmark = pytest.mark.usefixtures("poisoned_memory")


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


@pytest.mark.default(
    "random-page0-seed0",
    "random-page1-seed1",
    "random-page16-seed0",
    "periodic-page0-seed1",
    "periodic-page3-seed0",
    "periodic-page16-seed1",
    "one-token-page1-seed0",
    "one-token-page3-seed1",
    "broken-page0-seed0",
    "broken-page1-seed1",
    "broken-page16-seed0",
    "late-page0-seed1",
    "late-page3-seed0",
    "late-page16-seed1",
    "distinct-page1-seed0",
    "distinct-page3-seed1",
)
@pytest.mark.parametrize(
    "seed",
    [0, 1, *(pytest.param(x, marks=pytest.mark.slow) for x in (2, 3))],
    ids="seed{}".format,
)
@pytest.mark.parametrize("block_size", [0, 1, 3, 16], ids="page{}".format)
@pytest.mark.parametrize("kind", CONTEXTS)
def test_lookup(kind, block_size, seed, device):
    lengths = ((0, 1, 9, -1), (40, 2, 17), (5,), (60, -1, 33))[seed]
    check_lookup(Lookup(kind, lengths, block_size, 1 + seed, 5, 1 + seed % 2, seed), device)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Lookup("late", (1023, 1024, 1025), 16, 3, 7, 1, 11), id="parts-late"),
        pytest.param(Lookup("late", (3000, 2048), 0, 2, 3, 1, 12), id="parts-late-one-block"),
        pytest.param(Lookup("broken", (2500,), 16, 4, 4, 2, 13), id="parts-broken"),
        pytest.param(Lookup("one-token", (2050,), 16, 8, 4, 2, 14), id="parts-one-token"),
        pytest.param(Lookup("periodic", (1500, 20), 37, 100, 63, 1, 15), id="ngram100-tokens63"),
        pytest.param(Lookup("random", (900,), 16, 5, 200, 1, 16), id="tokens200"),
        pytest.param(Lookup("random", (-1, -1), 4, 2, 3, 1, 17), id="padding"),
        pytest.param(Lookup("random", (), 4, 2, 3, 1, 18), id="no-sequence"),
    ],
)
def test_lookup_of_many_tokens(case, device):
    check_lookup(case, device)


def test_the_latest_of_many_parts_wins(device, monkeypatch):
    """More parts than are compared at once."""
    monkeypatch.setattr(lookup, "PART", 32)
    monkeypatch.setattr(lookup, "PARTS", 4)
    for seed in range(4):
        for kind in ("late", "random"):
            check_lookup(Lookup(kind, (310, 30), 64, 1 + seed, 4, 1, seed), device)


def test_blocks_beyond_the_history_hold_nothing(device):
    """A block that is not there holds no token, and a length beyond the table ends at it."""
    memory = torch.full((4, 2), 5, dtype=torch.int32, device=device)
    table = int32([[0, 9], [-1, 1], [0, 1], [1, 0]]).to(device)
    lengths = int32([4, 2, 9, PADDING]).to(device)
    last = torch.full((4, 1), 5, device=device)
    tokens, parents = lookup.lookup(memory[1:-1], table, lengths, last, 1, 3)
    assert tokens.tolist() == [[5, 0, 0, 5], [5, 0, 0, 0], [5, 0, 0, 0], [5, 0, 0, 0]]
    assert parents.tolist() == [[-1, 0, 1, 2], [-1] * 4, [-1, 0, 1, 2], [-1] * 4]


def test_a_root_that_fits_no_history_is_not_found(device):
    history = torch.zeros(1, 16, dtype=torch.int32, device=device)
    for root in (2**32, -(2**32), -(2**63)):
        inputs = (int32([[0]]), int32([9]), torch.tensor([[root]]))
        tokens, parents = lookup.lookup(history, *(x.to(device) for x in inputs), 2, 2)
        assert (tokens.tolist(), parents.tolist()) == ([[root, 0, 0]], [[-1, -1, -1]])


def test_a_table_without_columns(device):
    history = torch.zeros(1, 4, dtype=torch.int32, device=device)
    table = torch.zeros(2, 0, dtype=torch.int32, device=device)
    last = torch.tensor([[0], [3]], device=device)
    tokens, parents = lookup.lookup(history, table, int32([0, 0]).to(device), last, 2, 2)
    assert (tokens.tolist(), parents.tolist()) == ([[0, 0, 0], [3, 0, 0]], [[-1] * 3] * 2)


def test_bad_inputs_are_refused_with_their_values():
    history, lengths, last = torch.zeros(2, 3).int(), int32([1, 1]), torch.zeros(2, 2).long()
    with pytest.raises(ValueError, match=r"lookup: found history \[2, 3\] of torch.float32"):
        lookup.lookup(history.float(), history, lengths, last, 2, 2)
    with pytest.raises(ValueError, match=r"last_tokens \[2, 2\] of torch.int32"):
        lookup.lookup(history, history, lengths, last.int(), 2, 2)
    with pytest.raises(ValueError, match="ngram of 0"):
        lookup.lookup(history, history, lengths, last, 0, 2)
    for num_tokens in (0, 1024):
        with pytest.raises(ValueError, match=f"{num_tokens} tokens; needed"):
            lookup.lookup(history, history, lengths, last, 2, num_tokens)
