"""What tokens of a path add to logits of DSpark, where hidden states and states take part."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specc.drafters.block import (
    CONFIDENCE_TENSORS,
    GATED,
    JOINT_TENSORS,
    OF_ROW,
    OF_TOKEN,
    RNN,
    SELECTOR,
    VANILLA,
    BlockDraft,
    bias_tensors,
)
from specc.kernels.reference.accept import draft_children_reference
from specc.passes.drafters.block_config import joint_shapes
from specc.sampling.rows import Rule
from specc.speculation.plans import DynamicTree, SpecPlan
from specc.speculation.tree import TokenTree
from tests.passes.step.reading_models import VOCAB
from tests.passes.step.test_draft_block import BIASED, PARTIAL, WEIGHTS, drawn, plan_of, run

WIDTH, RANK, BATCH = 4, 3, 2
KINDS = [
    replace(block, bias_kind=kind, hidden_columns=WIDTH)
    for block, kind in ((BIASED, GATED), (BIASED, RNN), (PARTIAL, RNN))
]
IN, OUT, COLUMNS = (WEIGHTS[key] for key in WEIGHTS)


def weights_of(block: BlockDraft) -> dict[str, Tensor]:
    shapes = joint_shapes(block.bias_kind, RANK, WIDTH)
    more = {key: drawn(*shape, seed=7 + i) for i, (key, shape) in enumerate(shapes.items())}
    own = bias_tensors(block.bias_kind)
    out = OUT[:-4] if block.is_partial else OUT
    return {**WEIGHTS, own["bias_in"]: IN, own["bias_out"]: out, **more}


def logits_after(block: BlockDraft, rows: Tensor, path: list[int]) -> Tensor:
    """[V] of the children of the last node of a path from the root: token by token, in words.

    Args:
        block: the drafter.
        rows: [D, V + d] of its pass.
        path: tokens, the root's first.
    """
    weight, *rest = (weights_of(block)[key] for key in JOINT_TENSORS[block.bias_kind].values())
    offset = rest[0] if rest else torch.zeros(())
    state, fed = torch.zeros(RANK), torch.zeros(RANK)
    for row, token in zip(rows, path, strict=False):
        hidden, known = row[VOCAB:], IN[token]
        if block.bias_kind == SELECTOR:
            fed = (weight @ hidden) * known
        elif block.bias_kind == GATED:
            fed = torch.sigmoid(weight @ torch.cat([hidden, known]) + offset) * known
        else:
            found = weight @ torch.cat([state, known, hidden]) + offset
            gate = torch.sigmoid(found[:RANK])
            state = gate * state + (1 - gate) * torch.tanh(found[RANK : 2 * RANK])
            fed = torch.tanh(found[2 * RANK :])
    added = OUT @ fed
    if block.is_partial:
        added = torch.cat([(OUT[:-4] @ fed), torch.zeros(1)])[COLUMNS]
    return rows[len(path) - 1, :VOCAB] + added


def path_to(tree: TokenTree, node: int) -> list[int]:
    """Nodes from the root to one of them."""
    return [*path_to(tree, tree.parents[node]), node] if node else [0]


# leaves beside nodes that have children, whose places among those are not their own
UNEVEN = TokenTree((-1, 0, 0, 0, 1, 3, 3, 5, 5, 6, 9))


@pytest.mark.parametrize("block", KINDS, ids=["gated", "rnn", "rnn-some"])
@pytest.mark.parametrize(
    ("tree", "tile"),
    [
        (TokenTree.chain(4), None),
        (TokenTree.from_widths((3, 2, 2)), None),
        (TokenTree.from_widths((3, 2, 2)), 2),
        (UNEVEN, None),
        (UNEVEN, 1),
    ],
    ids=["chain", "tree", "tree-in-tiles", "uneven", "uneven-in-tiles"],
)
def test_static_trees(tree: TokenTree, tile: int | None, block: BlockDraft) -> None:
    """Children of every node are drawn from what its own path adds."""
    rule = Rule.SWOR if tile is None else Rule.COUPLED
    plan = SpecPlan.from_tree(tree).with_drafters({"draft_0": block})
    plan, depth = replace(plan, tile=tile), tree.max_depth
    _, made, environment = run(plan, (9, 2), rule, weights=weights_of(block))
    rows = drawn(depth * BATCH, VOCAB + WIDTH, seed=4).view(depth, BATCH, -1)
    options = environment["sampling_values"], environment["sampling_words"]
    for d, b in itertools.product(range(depth), range(BATCH)):
        tokens = made["tokens"][b].tolist()
        fed = [node for node in tree.levels[d] if node not in tree.leaves]
        for place, node in enumerate(fed):
            own = logits_after(block, rows[:, b], [tokens[i] for i in path_to(tree, node)])
            children = tree.children(node)
            first = torch.tensor([children[0]], dtype=torch.int32)
            one = (environment["cache_len"][b : b + 1], first, d, *(x[b : b + 1] for x in options))
            best, _ = draft_children_reference(own[None], len(children), *one)
            assert [tokens[i] for i in children] == best[0].tolist()
            if tile is None:
                found = made[f"q_{d}"].view(BATCH, len(fed), -1)[b, place]
                torch.testing.assert_close(found, own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tree", [TokenTree.chain(4), UNEVEN], ids=["chain", "uneven"])
@pytest.mark.parametrize("kind", [VANILLA, RNN])
@pytest.mark.parametrize("read", [OF_ROW, OF_TOKEN])
def test_how_likely_nodes_are_accepted(read: str, kind: str, tree: TokenTree) -> None:
    """From the row that proposes their children and, where it is read, their own token."""
    block = replace(BIASED, bias_kind=kind, hidden_columns=WIDTH, confidence=read)
    columns = WIDTH + (RANK if read == OF_TOKEN else 0)
    weight, offset = drawn(1, columns, seed=20), drawn(1, seed=21)
    own = dict(zip(CONFIDENCE_TENSORS.values(), (weight, offset), strict=True))
    plan = SpecPlan.from_tree(tree).with_drafters({"draft_0": block})
    _, made, _ = run(plan, (9, 2), weights={**weights_of(block), **own})
    rows = drawn(tree.max_depth * BATCH, VOCAB + WIDTH, seed=4).view(tree.max_depth, BATCH, -1)
    fed = [node for node in range(tree.num_nodes) if node not in tree.leaves]
    for b in range(BATCH):
        wanted = []
        for node in fed:
            values = rows[tree.depths[node], b, VOCAB:]
            if read == OF_TOKEN:
                values = torch.cat([values, IN[made["tokens"][b, node]]])
            wanted.append(torch.sigmoid(weight[0] @ values + offset[0]))
        torch.testing.assert_close(made["confidence"][b], torch.stack(wanted))


def test_confidence_of_trees_that_are_verified_whole() -> None:
    """Nobody asks for it: those that are data, and those in tiles."""
    block = replace(BIASED, hidden_columns=WIDTH, confidence=OF_ROW)
    own = dict(zip(CONFIDENCE_TENSORS.values(), (drawn(1, WIDTH), drawn(1)), strict=True))
    weights = {**WEIGHTS, **own}
    plans = [plan_of(DynamicTree(8, 3, 3), block), replace(plan_of((3, 2), block), tile=2)]
    for plan in plans:
        _, made, _ = run(plan, (9, 2), weights=weights)
        assert "confidence" not in made
    _, made, _ = run(plan_of((3, 2), block), (9, 2), weights=weights)
    assert made["confidence"].shape == (BATCH, 1 + 3)
