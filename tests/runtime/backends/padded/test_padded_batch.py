"""Passes as padded batches: what each token attends to and where it is written.

What a token may attend to is read out of the oracle of flat attention: with equal scores and rows
of a unit matrix as values, the result says which rows were seen.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from specc.artifact.cache_rows import CacheRows, Reach
from specc.kernels.reference.core import attend_reference
from specc.runtime.backends.padded.padded_batch import PaddedBatch, padded_batch
from specc.speculation.tree import TokenTree
from tests.flat_passes import PADDING, Inputs, causal_pass, first_level, random_tree, tree_pass

ROWS = CacheRows(front=3, slots=120, scratch=85)
REACHES = (Reach(), Reach(window=3), Reach(window=16), Reach(chunk=5), Reach(4, 8))
CHAIN = TokenTree.chain(5)
LEVELS = TokenTree((-1, 0, 0, 0, 1, 1, 3, 3, 4, 6))


def make(inputs: Inputs, reaches: Sequence[Reach] = REACHES, rows: CacheRows = ROWS) -> PaddedBatch:
    """The padded batch of a flat pass of as many tokens for each sequence."""
    batch = len(inputs["cache_len"])
    shape = (batch, len(inputs["tokens"]) // batch)
    tokens, positions, slot = (inputs[key].view(shape) for key in ("tokens", "positions", "slot"))
    ancestors = inputs["ancestors"]
    if ancestors is not None:
        ancestors = ancestors.view(*shape, -1)
    return padded_batch(
        rows,
        reaches,
        tokens,
        positions,
        slot,
        inputs["cache_len"],
        ancestors,
        inputs["logit_rows"],
    )


def seen_slots(inputs: Inputs, reach: Reach) -> Tensor:
    """[Nt, slots] bool: what flat attention lets every token see; dead ones see nothing."""
    batch, slots = len(inputs["cache_len"]), ROWS.slots
    count = len(inputs["tokens"])
    found = attend_reference(
        torch.zeros(1, count, 1),
        torch.zeros(batch, slots, 1, 1),
        torch.eye(slots).expand(batch, slots, slots)[:, :, None].contiguous(),
        inputs["q_start"],
        inputs["positions"],
        inputs["slot"],
        inputs["cache_len"],
        inputs["ancestors"],
        torch.arange(batch, dtype=torch.int32)[:, None],
        scale=1.0,
        window=reach.window,
        chunk=reach.chunk,
    )
    return found[0] > 0


def check(inputs: Inputs) -> PaddedBatch:
    """Compare a pass with the oracle, and look at everything that it writes."""
    made = make(inputs)
    batch, num_tokens = made.tokens.shape
    slot = inputs["slot"].view(batch, num_tokens).long()
    written = made.write_index[:, None] + torch.arange(num_tokens)
    live = slot >= 0
    assert torch.equal(written[live], slot[live] + ROWS.front)
    assert int(written.min()) >= 0
    assert int(written.max()) < ROWS.total
    rim = (written < ROWS.front) | (written >= ROWS.front + ROWS.slots)
    assert bool(rim[~live].all()), "what has no slot is written to the rim"
    assert bool((made.positions >= 0).all())
    assert made.masks.keys() == set(REACHES)
    for reach, mask in made.masks.items():
        assert mask.shape == (batch, 1, num_tokens, ROWS.total)
        assert mask.dtype is torch.bool
        wanted = torch.zeros(batch, num_tokens, ROWS.total, dtype=torch.bool)
        seen = seen_slots(inputs, reach).view(batch, num_tokens, -1)
        wanted[..., ROWS.front : ROWS.front + ROWS.slots] = seen
        # a dead token attends to what it writes itself
        dead = torch.zeros_like(wanted).scatter_(2, written[..., None], 1)
        wanted = torch.where(live[..., None], wanted, dead)
        assert torch.equal(mask[:, 0], wanted), reach
        assert bool(mask.any(dim=-1).all()), "no token attends to nothing"
    return made


@pytest.mark.parametrize("start", [0, 1, 7, 40])
@pytest.mark.parametrize("count", [1, 2, 17, 60])
def test_causal_chunks(start: int, count: int) -> None:
    check(causal_pass([start, 0, 3], [count] * 3, [0, 1, 2]))


@pytest.mark.parametrize("lengths", [(0, 0, 0), (0, 1, 40), (5, 16, 17), (100, 2, 63)])
def test_chains(lengths: tuple[int, ...]) -> None:
    check(tree_pass(lengths, [CHAIN] * 3, [0, 1, 2]))


@pytest.mark.parametrize("num_nodes", [1, 2, 9, 63, 64, 65, 70])
def test_random_trees(num_nodes: int) -> None:
    """More than one word of ancestors, too; every sequence has a tree of its own."""
    chooser = random.Random(num_nodes)
    for _ in range(4):
        lengths = [chooser.randint(0, ROWS.slots - num_nodes) for _ in range(3)]
        trees = [random_tree(chooser, num_nodes) for _ in lengths]
        check(tree_pass(lengths, trees, [0, 1, 2]))


@pytest.mark.parametrize("num", [1, 2, 4])
def test_tokens_before_a_sequence(num: int) -> None:
    """Sequences that are shorter than what a draft is fed first; the first token may be dead."""
    made = check(first_level([0, 1, 2, 3, 50], num, [0, 1, 2, 3, 4]))
    # a sequence without a committed row has its root in slot 0, after the rim
    assert int(made.write_index[0]) + num - 1 == ROWS.front


@pytest.mark.parametrize("num_nodes", [1, 6, 70])
def test_sequences_that_take_no_part(num_nodes: int) -> None:
    tree = random_tree(random.Random(num_nodes), num_nodes)
    made = check(tree_pass([7, PADDING, 0, PADDING + 40], [tree] * 4, [0, 1, 2, 3]))
    assert made.write_index[[1, 3]].tolist() == [ROWS.front + ROWS.slots] * 2
    made = check(first_level([PADDING, 0, 1], 2, [0, 1, 2]))
    assert made.write_index.tolist() == [ROWS.front + ROWS.slots, ROWS.front - 1, ROWS.front]


def test_levels_of_a_tree() -> None:
    """As a draft is fed them: nodes of one depth, which do not attend to each other."""
    for level in (range(1, 4), range(4, 8), range(8, 9), [9]):
        check(tree_pass([0, 9, PADDING], [LEVELS] * 3, [0, 1, 2], list(level)))


def test_no_word_of_another_dtype_or_place() -> None:
    """Bit 63 is the sign bit: shifts of negative words bring ones from the left."""
    chain = TokenTree.chain(69)
    made = check(tree_pass([2], [chain], [0]))
    assert made.masks[Reach()][0, 0].sum(dim=-1).tolist() == [3 + node for node in range(70)]


@pytest.mark.parametrize("max_seq_len", [1, 64, 127])
@pytest.mark.parametrize("max_nodes", [1, 16, 70])
@pytest.mark.parametrize("catch_up", [1, 2, 5])
def test_cache_rows(max_seq_len: int, max_nodes: int, catch_up: int) -> None:
    rows = CacheRows.of(max_seq_len, max_nodes, catch_up)
    assert (rows.front, rows.slots) == (catch_up - 1, max_seq_len + max_nodes)
    assert rows.scratch >= max(max_nodes, catch_up)
    assert rows.total == rows.front + rows.slots + rows.scratch
    assert rows.total % 16 == 0
    assert rows.scratch - max(max_nodes, catch_up) < 16
    # the first level of an empty sequence, and the widest pass of one that takes no part, fit
    made = make(first_level([0], catch_up, [0]), (Reach(),), rows)
    assert made.write_index.tolist() == [0]
    tree = TokenTree.chain(max_nodes - 1)
    made = make(tree_pass([PADDING], [tree], [0]), (Reach(),), rows)
    assert int(made.write_index[0]) + max_nodes <= rows.total


def test_what_the_runtime_gives_is_left_as_it_is() -> None:
    inputs = tree_pass([7, PADDING], [CHAIN] * 2, [0, 1])
    before = {key: None if value is None else value.clone() for key, value in inputs.items()}
    made = make(inputs)
    assert all(value is None or torch.equal(value, inputs[key]) for key, value in before.items())
    assert torch.equal(made.tokens.flatten(), inputs["tokens"])
    assert torch.equal(made.logit_rows, inputs["logit_rows"])
    assert torch.equal(made.positions[0], inputs["positions"][:6])
