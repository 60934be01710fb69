"""`specc::tree_conv` and `specc::fold_conv` in Triton, as all implementations of them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from specc.kernels.cuda import tree_conv as kernels
from tests.kernels import test_tree_conv as of_all
from tests.kernels.cuda.on_device import operators
from tests.kernels.state_passes import Pass, chain, random_batch, random_tree
from tests.kernels.test_tree_conv import KINDS, PLAIN, Inputs, check

pytestmark = pytest.mark.usefixtures("poisoned_memory")

run = of_all.run
NAMES = (
    "x", "weight", "bias", "state", "rows",
    "q_start", "slot", "cache_len", "ancestors", "states",
)  # fmt: skip


@pytest.fixture(scope="module")
def implementation(device: torch.device) -> Any:
    return operators(device)


@pytest.mark.default(
    "0-delta-net", "1-lfm2", "0-two-inputs", "1-two-pieces", "0-itself-alone", "1-nine-inputs"
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_batches(run, kind, seed) -> None:
    check(run, Pass(random_batch(random.Random(seed))), kind, seed)


def test_many_tokens_of_a_sequence(run) -> None:
    """More than a program takes at a time."""
    trees = [chain(3, 35, 35), chain(1, 1, 1), random_tree(random.Random(3), 20, 2)]
    check(run, Pass(trees), PLAIN)


def test_chains_without_words(run) -> None:
    of_all.test_chains_without_words(run)


def test_chains_without_words_in_any_order(run) -> None:
    batch = [
        replace(chain(4, 6, 1), fed=(0, 3, 2, 5)),
        replace(chain(2, 5, 1), fed=(4, 2)),
    ]
    check(run, Pass(batch, causal=True), PLAIN)


def test_trees_of_several_words(run) -> None:
    check(run, Pass([random_tree(random.Random(1), 140, 3)]), PLAIN)


def test_nodes_of_earlier_passes(run) -> None:
    of_all.test_nodes_of_earlier_passes(run)


def test_nothing_to_do(run) -> None:
    of_all.test_nothing_to_do(run)


@pytest.mark.default("delta-net", "lfm2")
@pytest.mark.parametrize("kind", KINDS)
def test_nodes_and_folds_have_the_bits_of_plain_decoding(run, kind) -> None:
    of_all.test_nodes_and_folds_have_the_bits_of_plain_decoding(run, kind)


def test_folds_of_a_batch(run) -> None:
    of_all.test_folds_of_a_batch(run)


def test_refuses_another_activation(run) -> None:
    of_all.test_refuses_another_activation(run)


def test_what_lies_outside_is_not_touched(run) -> None:
    """A place that is none, and nodes beyond the rows: their tokens are dead."""
    trees = [chain(2, 3, 3), random_tree(random.Random(2), 4, 3), chain(5, 2, 1)]
    of_pass = Pass(trees, places=[3, 1, 0])
    inputs = Inputs(PLAIN, trees)
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
        ("x", lambda x: x[:, :3], r"x \[\d+, 3\]"),
        ("weight", lambda x: x.double(), "weight .* of torch.float64"),
        ("bias", lambda x: x[:3], r"bias \[3\]"),
        ("state", lambda x: x[:, :2], r"state \[3, 2, 20\]"),
        ("rows", lambda x: x.transpose(0, 1), "rows .* strides"),
        ("states", lambda x: x[:, :1], r"states \[1, 1\]"),
        ("q_start", lambda x: x.long(), "q_start .* of torch.int64"),
    ],
)
def test_refuses(name, change, found) -> None:
    of_pass = Pass([chain(1, 2, 1)])
    inputs = Inputs(PLAIN, of_pass.trees)
    x = of_pass.of_tokens(inputs.x)
    values = [x, inputs.weight, inputs.bias, *inputs.slabs(of_pass), *of_pass.where]
    given = dict(zip(NAMES, values, strict=True))
    given[name] = change(given[name])
    with pytest.raises(ValueError, match=f"tree_conv: found .*{found}.*; needed"):
        kernels.tree_conv(**given)


def test_a_fold_refuses_other_slabs() -> None:
    state, rows = torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8)
    source, length = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    given = source, length, torch.zeros(1, 2, dtype=torch.int32)
    kernels.fold_conv(state, rows, *given)
    for other in (rows.half(), rows[..., :7].contiguous(), rows[:, :1]):
        with pytest.raises(ValueError, match="fold_conv: found"):
            kernels.fold_conv(state, other, *given)
    with pytest.raises(ValueError, match="fold_conv: found source"):
        kernels.fold_conv(state, rows, source.long(), *given[1:])
