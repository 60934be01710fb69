"""`specc::node_winners` of all tiles, walked by `accept_winners`, decides as `specc::accept`."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specc.kernels.reference.accept import accept_reference, node_winners_reference
from specc.kernels.reference.core import accept_winners_reference
from specc.kernels.reference.processing import penalize_reference
from specc.kernels.reference.sampling import gumbel_reference
from specc.sampling.rows import Rule, Word
from tests.kernels import sampling_cases as cases
from tests.kernels.sampling_cases import int32, options

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# of trees that fit: one node, some, all of them
TILES = st.sampled_from([1, 2, 3, 5, 8, 100])


def tiled(node_winners: Any, args: tuple, tile: int) -> Tensor:
    """Winners [B, N] of an `accept` call's trees, tile by tile; logits lie in wider rows."""
    logits, tokens, parents = args[:3]
    batch, num_nodes = tokens.shape
    by_node = logits.view(batch, num_nodes, -1)
    found = []
    for first in range(0, num_nodes, tile):
        rows = by_node[:, first : first + tile].flatten(0, 1)
        wide = torch.full((len(rows), rows.shape[1] + 3), cases.NAN, dtype=rows.dtype)
        wide[:, 1:-2] = rows
        found.append(node_winners(wide[:, 1:-2], tokens, parents, first, *args[7:]).view(batch, -1))
    return torch.cat(found, dim=1)


def without_tries(args: tuple) -> tuple:
    """The same trees under rules that follow the target's own token."""
    words = args[8].clone()
    words[:, Word.RULE] %= 2
    assert {int(Rule.COUPLED), int(Rule.DELTA)} == {0, 1}
    return (*args[:8], words, *args[9:])


small = cases.verified.map(lambda case: replace(case, vocab=min(case.vocab, 64)))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(small, TILES)
def test_tiles_decide_what_accept_does(case, tile):
    args = without_tries(case.make())
    winners = tiled(node_winners_reference, args, tile)
    found = accept_winners_reference(winners, *args[1:4])
    for one, other in zip(found, accept_reference(*args), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.slow
def test_cases_accept_paths_of_all_lengths():
    """Greedy, coupled and delta rows of the test above accept none, some and all levels."""
    seen = set()
    for seed in range(60):
        case = cases.Verified(
            seed, 4, 33, ((1, 2), (1, 2), (1, 1)), 0.1, (torch.float32,) * 2, 0, 0.0, 0.0, 0.0,
            True, False, 0,
        )  # fmt: skip
        args = without_tries(case.make())
        _, accepted, _ = accept_reference(*args)
        for b in range(4):
            kind = int(args[8][b, Word.RULE]) if args[7][b, 0] >= 1e-5 else "greedy"
            penalized = args[7][b, 3:].tolist() != [1.0, 0.0, 0.0]
            if args[9][b] >= 0:
                seen.add((kind, penalized, int(accepted[b])))
    assert seen >= {(k, p, n) for k in ("greedy", 0, 1) for p in (0, 1) for n in (0, 1, 3)}


@settings(max_examples=250, deadline=None, derandomize=True)
@given(small, TILES)
def test_native(operators, case, tile):
    """All rules: what no walk asks for is defined, too."""
    args = case.make()
    before = [x.clone() for x in args if isinstance(x, Tensor)]
    found = tiled(operators.node_winners, args, tile)
    assert torch.equal(found, tiled(node_winners_reference, args, tile))
    assert all(map(torch.equal, [x for x in args if isinstance(x, Tensor)], before))


def given_tree(values: Tensor, words: Tensor, length: int = 2) -> tuple[Any, ...]:
    """Two chains below the root, a dead node, and one below it; one sequence and one of padding."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(2 * 7, 9, generator=generator)
    tokens = torch.tensor([[3, 3, 4, 3, 5, 3, 3]] * 2)
    parents = int32([-1, 0, 0, 1, 2, -1, 5], [1 << 20] * 7)
    rows = (values.repeat(2, 1), words.repeat(2, 1), int32(length, -3))
    history = int32([7, 7, 3, 8], [7, 7, 3, 8])
    return logits, tokens, parents, rows, (history, int32([1], [1 << 20]))


@pytest.mark.parametrize("name", ["reference", "native"])
def test_a_node_knows_its_ancestors_alone(operators, name):
    """Position, noise and penalties of each node, by hand; -1 where there is no way to a root."""
    node_winners = operators.node_winners if name == "native" else node_winners_reference
    paths = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4]]
    for temperature in (0.0, 1.0):
        values, words = options(
            Rule.DELTA, temperature=temperature, repetition=2.0, presence=0.7, num_prompt=3
        )
        logits, tokens, parents, rows, paged = given_tree(values, words)
        wanted = []
        for node, path in enumerate(paths):
            context = torch.tensor([7, 7, *tokens[0, path].tolist()])
            scores = penalize_reference(logits[node], context, 3, values[0])
            if temperature:
                place = torch.tensor(2 + len(path))
                scores = scores + gumbel_reference(words[0, Word.SEED], place, torch.arange(9))
            wanted.append(int(scores.argmax()))
        for first, count in ((0, 7), (0, 1), (1, 3), (4, 3)):
            tile = logits.view(2, 7, 9)[:, first : first + count].flatten(0, 1)
            found = node_winners(tile, tokens, parents, first, *rows, *paged).view(2, count)
            assert found[0].tolist() == [*wanted, -1, -1][first : first + count]
            assert found[1].tolist() == [-1] * count


@pytest.mark.parametrize("name", ["reference", "native"])
def test_parents_in_a_cycle_and_out_of_the_tree_are_dead(operators, name):
    node_winners = operators.node_winners if name == "native" else node_winners_reference
    values, words = options(temperature=0.0)
    parents, tokens = int32([-1, 2, 1, 3, 9, -7, 0]), torch.zeros(1, 7).long()
    rows = values, words, int32(0), int32([0]), int32([0])
    found = node_winners(torch.eye(7), tokens, parents, 0, *rows)
    assert found.tolist() == [0, -1, -1, -1, -1, -1, 6]


@pytest.mark.slow
def test_a_wide_tree(operators):
    """600 nodes, penalties: what is counted for one node is forgotten for the next."""
    dice = random.Random(3)
    parents = [-1, *(dice.randrange(max(0, node - 30), node) for node in range(1, 600))]
    values, words = map(
        torch.cat,
        zip(
            options(Rule.COUPLED, repetition=1.5, presence=0.4, frequency=0.3, num_prompt=4),
            options(Rule.DELTA, temperature=0.0, frequency=0.5, num_prompt=2),
            options(Rule.DELTA, temperature=0.7, top_p=0.9, top_k=12),
            strict=True,
        ),
    )
    tokens = torch.randint(20, (3, 600))
    # near to each other, so that counts decide
    logits = 0.5 * torch.randn(3 * 600, 20)
    history = torch.randint(20, (3, 16), dtype=torch.int32)
    args = (logits, tokens, int32(parents).expand(3, -1), 599, None, None, [], values, words)
    args += (int32(9, 16, 1), history, int32([2], [0], [1]))
    found = tiled(operators.node_winners, args, 128)
    assert torch.equal(found, tiled(node_winners_reference, args, 600))
    for one, other in zip(
        operators.accept_winners(found, *args[1:4]), operators.accept(*args), strict=True
    ):
        assert torch.equal(one, other)


def plain(batch: int, count: int = 2) -> dict[str, Any]:
    values, words = options(batch=batch)
    return {
        "logits": torch.zeros(count * batch, 9),
        "tokens": torch.zeros(batch, 3, dtype=torch.int64),
        "parents": int32([-1, 0, 0]).expand(batch, -1),
        "first_node": 1,
        "values": values,
        "words": words,
        "cache_len": torch.zeros(batch, dtype=torch.int32),
        "history": torch.zeros(1, 4, dtype=torch.int32),
        "block_table": torch.zeros(batch, 1, dtype=torch.int32),
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": torch.zeros(5, 9)}, "logits is"),
        ({"logits": torch.zeros(9, 4).T}, "logits is .* rows contiguous"),
        ({"logits": torch.zeros(4, 9).half()}, "float32 and bfloat16"),
        ({"logits": torch.zeros(4, 0)}, "1 token"),
        ({"first_node": 2}, "first_node is 0 … N - T"),
        ({"first_node": -1}, "first_node is 0 … N - T"),
        ({"tokens": torch.zeros(2, 3).int()}, "tokens is"),
        ({"parents": torch.zeros(2, 3).long()}, "parents is"),
        ({"parents": torch.zeros(1, 3).int()}, "parents is"),
        ({"values": torch.zeros(2, 5)}, r"values is \[B, 6\]"),
        ({"words": torch.zeros(1, 4).long()}, r"words is \[B, 4\]"),
        ({"words": torch.full((2, 4), 9)}, "rule 9 of sequence 0"),
        ({"cache_len": torch.zeros(3).int()}, "agree"),
        ({"cache_len": int32(0, 5), "values": torch.full((2, 6), 2.0)}, "cache_len.1. = 5"),
        (
            {"cache_len": int32(0, 3), "block_table": int32([0], [7])}
            | {"values": torch.full((2, 6), 2.0)},
            "block_table",
        ),
    ],
    ids=[
        "rows", "by-column", "fp16", "no-vocabulary", "behind", "before", "tokens-i32",
        "parents-i64", "parents-of-one", "values", "words", "rule", "lengths", "too-long",
        "no-block",
    ],
)  # fmt: skip
def test_refuses(operators, changes, message):
    with pytest.raises(RuntimeError, match=f"specc: .*{message}"):
        operators.node_winners(**(plain(2) | changes))
