"""`specc::tree_recurrence` and `specc::fold_recurrence` in Triton, as all implementations of them.

Results are compared with a float64 recursion along paths; nodes, folds, prompts and tiles have the
bits of plain decoding.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from specc.kernels.cuda import tree_recurrence as kernels
from tests.kernels import test_tree_recurrence as of_all
from tests.kernels.cuda.on_device import operators
from tests.kernels.state_passes import Pass, chain, random_batch, random_tree
from tests.kernels.test_tree_recurrence import KINDS, Heads, check, inputs_of
from tests.tiers import every

pytestmark = pytest.mark.usefixtures("poisoned_memory")

run = of_all.run
# programs cost in the interpreter: two columns of blocks, of rows that fill no block
TWO_BLOCKS = Heads(1, 2, 60, 20)
SMALL = Heads(1, 2, 8, 12)
NAMES = (
    "q", "k", "v", "g", "beta", "state", "rows",
    "q_start", "slot", "cache_len", "ancestors", "states",
)  # fmt: skip


@pytest.fixture(scope="module")
def implementation(device: torch.device) -> Any:
    return operators(device)


@pytest.mark.default("0-delta", "1-kda", "1-mamba2", "0-bfloat16")
@pytest.mark.parametrize("heads", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_batches(run, heads, seed) -> None:
    check(run, Pass(random_batch(random.Random(seed))), heads, seed)


def test_columns_of_several_programs(run) -> None:
    """Each stores its own of a replay row, and one of them what all share."""
    assert kernels.config(60, 20)["BV"] == 16
    check(run, Pass([chain(0, 3, 3), random_tree(random.Random(4), 6, 5)]), TWO_BLOCKS)


def test_chains_without_words(run) -> None:
    batch = [chain(5, 1, 1), chain(0, 9, 9), chain(7, 5, 1), chain(3, 4, 0), chain(0, 6, 2)]
    check(run, Pass(batch, causal=True), SMALL)


def test_chains_without_words_in_any_order(run) -> None:
    """Nodes that the pass has in another order, or an earlier one has had."""
    batch = [
        replace(chain(4, 6, 1), fed=(0, 3, 2, 5)),
        replace(chain(2, 5, 1), fed=(4, 2)),
    ]
    check(run, Pass(batch, causal=True), SMALL)


def test_trees_of_several_words(run) -> None:
    of_all.test_trees_of_several_words(run)


def test_nodes_of_earlier_passes(run) -> None:
    of_all.test_nodes_of_earlier_passes(run)


def test_tokens_of_a_tree_in_any_order(run) -> None:
    of_all.test_tokens_of_a_tree_in_any_order(run)


def test_nothing_to_do(run) -> None:
    of_all.test_nothing_to_do(run)


@pytest.mark.default("small")
@pytest.mark.parametrize("heads", [pytest.param(SMALL, id="small"), *KINDS])
def test_nodes_and_folds_have_the_bits_of_plain_decoding(run, heads) -> None:
    of_all.test_nodes_and_folds_have_the_bits_of_plain_decoding(run, heads)


def test_prompts_have_the_bits_of_plain_decoding(run) -> None:
    of_all.test_prompts_have_the_bits_of_plain_decoding(run)


def test_tiles_have_the_bits_of_the_whole_tree(run) -> None:
    of_all.test_tiles_have_the_bits_of_the_whole_tree(run)


def test_folds_of_a_batch(run) -> None:
    of_all.test_folds_of_a_batch(run)


def test_paths_that_are_no_tree(run) -> None:
    """A node's path is what its words say, whatever the node before it has seen."""
    tree = chain(3, 5, 1)
    of_pass = Pass([tree])
    assert of_pass.ancestors is not None
    # node 2 has not seen 1, node 3 both, and node 4 has seen 3 and 1 without 2
    of_pass.ancestors[2] = 0b101
    of_pass.ancestors[3] = 0b1111
    of_pass.ancestors[4] = 0b11011
    inputs = inputs_of(SMALL, [tree])
    state, rows = inputs.slabs(of_pass)
    out = run(of_pass, inputs, state, rows)
    for node, path in ((2, [0, 2]), (3, [0, 1, 2, 3]), (4, [0, 1, 3, 4])):
        _, wanted = inputs.after(0, path, begun=False)
        torch.testing.assert_close(out[node].double(), wanted, rtol=2e-5, atol=2e-6)


def test_a_row_does_not_depend_on_the_batch(run) -> None:
    """Whatever sequences are beside it: the same bits."""
    tree = random_tree(random.Random(8), 7, 4)
    alone, beside = Pass([tree], places=[1]), Pass([chain(0, 5, 5), tree], places=[0, 1])
    own = inputs_of(SMALL, [tree])
    both = inputs_of(SMALL, [beside.trees[0], tree], seed=5)
    for name in ("q", "k", "v", "g", "beta"):
        getattr(both, name)[1] = getattr(own, name)[0]
    both.state[1] = own.state[0]
    results = []
    for of_pass, inputs, b in ((alone, own, 0), (beside, both, 1)):
        state, rows = inputs.slabs(of_pass)
        out = run(of_pass, inputs, state, rows)
        tokens = [i for i, token in enumerate(of_pass.tokens) if token and token[0] == b]
        results.append((out[tokens], state[1], rows[1, 1:7]))
    for found, wanted in zip(*results, strict=True):
        assert torch.equal(found, wanted)


def test_what_lies_outside_is_not_touched(run) -> None:
    """A place that is none, and nodes beyond the rows: their tokens are dead."""
    trees = [chain(2, 3, 3), random_tree(random.Random(2), 4, 3), chain(5, 2, 1)]
    of_pass = Pass(trees, places=[3, 1, 0])
    inputs = inputs_of(SMALL, trees)
    state, rows = inputs.slabs(of_pass)
    of_pass.states[0, 0] = len(state)
    before = state.clone()
    out = run(of_pass, inputs, state, rows[:, :3].contiguous())
    for i, token in enumerate(of_pass.tokens):
        is_dead = token is None or token[0] == 0 or token == (1, 3)
        assert bool(out[i].any()) != is_dead, token
    assert torch.equal(state[3], before[3])


@pytest.mark.parametrize(
    ("name", "change", "found"),
    [
        ("q", lambda x: x[:1], r"q \[1, 1, 8\]"),
        ("v", lambda x: x.double(), "v .* of torch.float64"),
        ("g", lambda x: x[:, :1], r"g \[\d+, 1\]"),
        ("state", lambda x: x[..., :3], r"state .* strides"),
        ("state", lambda x: x[..., :3].contiguous(), r"state \[3, 2, 8, 3\]"),
        ("rows", lambda x: x[..., :3].contiguous(), r"rows \[3, \d+, 3\]"),
        ("states", lambda x: x.long(), "states .* of torch.int64"),
        ("slot", lambda x: x[:1], r"slot \[1\]"),
        ("ancestors", lambda x: x.int(), "ancestors .* of torch.int32"),
    ],
)
def test_refuses(name, change, found) -> None:
    tree = chain(1, 2, 1)
    of_pass = Pass([tree])
    inputs = inputs_of(SMALL, [tree])
    values = [*inputs.tokens(of_pass), *inputs.slabs(of_pass), *of_pass.where]
    given = dict(zip(NAMES, values, strict=True))
    given[name] = change(given[name])
    with pytest.raises(ValueError, match=f"tree_recurrence: found .*{found}.*; needed"):
        kernels.tree_recurrence(**given)


def test_a_fold_refuses_other_slabs() -> None:
    state, rows = torch.zeros(1, 2, 2, 8, 12), torch.zeros(1, 2, 3, 36)
    source, length = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    given = source, length, torch.zeros(1, 2, dtype=torch.int32)
    kernels.fold_recurrence(state, rows, *given, key_heads=1, has_beta=True)
    for key_heads, has_beta, kept in ((2, True, 36), (3, True, 36), (1, False, 36), (1, True, 35)):
        with pytest.raises(ValueError, match="fold_recurrence: found"):
            kernels.fold_recurrence(
                state, rows[..., :kept].contiguous(), *given,
                key_heads=key_heads, has_beta=has_beta,
            )  # fmt: skip


@pytest.mark.parametrize("key_dim", every(3, [1, 7, 16, 96, 128, 256], 1))
def test_blocks_hold_a_state(key_dim) -> None:
    """All rows are in a program, whose threads have as many numbers whatever the head's size is."""
    for value_dim in (1, 33, 64, 128, 192):
        sizes = kernels.config(key_dim, value_dim)
        assert key_dim <= sizes["BK"] < 2 * key_dim
        assert sizes["BK"] * sizes["BV"] <= 1024
        assert sizes["BV"] < 2 * value_dim
