"""Best-first trees of drafts that leave a row of logits for each depth, by any score of paths."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specc.drafters.block import BIAS_TENSORS, GATED, RNN, SELECTOR, BlockDraft
from specc.drafters.lilicorr import EMBEDDING, RANKS, LiLiCorrDraft
from specc.drafters.medusa import MedusaHeads
from specc.errors import TreeError
from specc.kernels.reference.accept import draft_children_reference
from specc.passes.step.tiles import logit_rows
from specc.sampling.rows import Rule
from specc.speculation.dynamic_tree import BudgetTree, DynamicTree
from specc.speculation.plans import SpecPlan
from specc.speculation.tree import TokenTree
from tests.lilicorr_reference import LiLiCorrCase, LiLiCorrReference
from tests.passes.step import test_block_bias as with_hidden
from tests.passes.step.grown_trees import Request, grow_budget
from tests.passes.step.reading_models import VOCAB
from tests.passes.step.test_draft_block import (
    ABSENT,
    BIASED,
    BLOCK,
    FLAT,
    MASK,
    PARTIAL,
    SIZE,
    WEIGHTS,
    bias_after,
    drawn,
    plan_of,
    run,
)

BATCH, WIDTH = 2, with_hidden.WIDTH
PAIRS = LiLiCorrCase(width=6, layers=2, heads=3, factors=4, count=5)
Path = tuple[int, ...]
# log probabilities [V] of what follows a path from the root
Odds = Callable[[Path], Tensor]
KINDS = {
    "product": BLOCK,
    "heads": FLAT,
    "vanilla": BIASED,
    "vanilla-some": PARTIAL,
    "gated": replace(BIASED, bias_kind=GATED, hidden_columns=WIDTH),
    "rnn": replace(BIASED, bias_kind=RNN, hidden_columns=WIDTH),
    "rnn-some": replace(PARTIAL, bias_kind=RNN, hidden_columns=WIDTH),
    "vanilla-of-5": replace(BIASED, candidates=5),
    # one of them has a logit of -inf
    "vanilla-some-of-6": replace(PARTIAL, candidates=6),
    "selector-of-5": replace(BIASED, bias_kind=SELECTOR, hidden_columns=WIDTH, candidates=5),
    "pairs-of-5": LiLiCorrDraft(
        SIZE,
        MASK,
        is_biased=True,
        kind="lilicorr",
        candidates=5,
        hidden_columns=WIDTH,
        num_layers=PAIRS.layers,
        num_heads=PAIRS.heads,
        inner_width=PAIRS.width,
        scale=PAIRS.scale,
        norm_eps=1e-5,
        vector_eps=1e-6,
    ),
    "rnn-of-5": replace(BIASED, bias_kind=RNN, hidden_columns=WIDTH, candidates=5),
}


def weights_of(block: Any) -> dict[str, Tensor]:
    if isinstance(block, LiLiCorrDraft):
        shapes = {EMBEDDING: (VOCAB, WIDTH), **PAIRS.shapes(WIDTH, block.size)}
        rank = torch.arange(5.0)
        drawn_ = {key: drawn(*shape, seed=30 + i) for i, (key, shape) in enumerate(shapes.items())}
        return {**drawn_, RANKS: torch.stack([rank / 4, (rank == 0).float()])}
    if block.hidden_columns:
        return with_hidden.weights_of(block)
    out = BIAS_TENSORS["bias_out"]
    return {**WEIGHTS, out: WEIGHTS[out][: -len(ABSENT)]} if block.is_partial else WEIGHTS


def rows_of(block: Any, depth: int, ties: bool) -> Tensor:
    """[B, D, V + d] that the pass of `run` makes."""
    columns = VOCAB + block.hidden_columns
    count = block.num_logits(depth)
    if block.is_flat:
        rows = drawn(BATCH * block.size, columns, seed=4).view(BATCH, block.size, -1)[:, :depth]
    else:
        rows = drawn(count * BATCH, columns, seed=4).view(count, BATCH, -1).transpose(0, 1)
    rows = rows.round() if ties else rows.clone()
    if lacks(block):
        rows[..., list(ABSENT)] = -torch.inf
    return rows


def lacks(block: Any) -> bool:
    """Whether its pass has to say which tokens it has no logits of, as that of a drafter does."""
    return block.is_partial and block.candidates > 0


def logits_after(block: Any, rows: Tensor, path: Path) -> Tensor:
    """[V] of one sequence after tokens from its root on: in words, a node at a time."""
    own = rows[len(path) - 1, :VOCAB]
    if isinstance(block, LiLiCorrDraft):
        known, context = rows[:-1], rows[-1, VOCAB:]
        reference = LiLiCorrReference(PAIRS, weights_of(block))
        return reference.logits(known[:, :VOCAB], known[:, VOCAB:], context, path[1:])
    if block.hidden_columns:
        logits = with_hidden.logits_after(block, rows, list(path))
    elif block.is_biased:
        logits = own + bias_after(torch.tensor([path[-1]]), block)[0]
    else:
        logits = own
    if not block.candidates:
        return logits
    best = own.sort(descending=True, stable=True).indices[: block.candidates]
    return torch.full_like(logits, -torch.inf).index_copy(0, best, logits[best])


def followed(odds: Odds, path: Path, score: float, k: int) -> list[tuple[float, Path]]:
    found = odds(path)
    best = found.sort(descending=True, stable=True).indices[:k].tolist()
    return [(score + float(found[token]), (*path, token)) for token in best]


def best_first(odds: Odds, root: int, k: int, depth: int, count: int) -> list[float]:
    """Scores of the best paths, taken one by one: what is taken brings its children."""
    heap, taken = [(0.0, (root,))], list[float]()
    while len(taken) <= count:
        score, path = heapq.heappop(heap)
        taken.append(-score)
        if len(path) <= depth:
            for own, longer in followed(odds, path, -score, k):
                heapq.heappush(heap, (-own, longer))
    return taken[1:]


def of_all(odds: Odds, root: int, k: int, depth: int, count: int) -> list[float]:
    """The same of all paths that there are."""
    level, found = [(0.0, (root,))], list[float]()
    for _ in range(depth):
        level = [one for score, path in level for one in followed(odds, path, score, k)]
        found += [score for score, _ in level]
    return sorted(found, reverse=True)[:count]


def check_best(
    plan: SpecPlan, ties: bool = False, oracle: Callable[..., list[float]] = best_first
) -> None:
    """The tree is as good as the oracle's, and its nodes hang where their tokens were drawn."""
    assert plan.dynamic is not None
    (block,), dynamic = plan.drafters, plan.dynamic
    _, made, environment = run(
        plan, (9, 2), ties=ties, weights=weights_of(block), lacks=lacks(block)
    )
    rows = rows_of(block, dynamic.depth, ties)
    for b in range(BATCH):
        root = int(environment["last_tokens"][b, -1])
        known: dict[Path, Tensor] = {}

        def odds(path: Path, b: int = b, known: dict[Path, Tensor] = known) -> Tensor:
            if path not in known:
                known[path] = logits_after(block, rows[b], path).log_softmax(-1)
            return known[path]

        tokens, parents = made["tokens"][b].tolist(), made["parents"][b].tolist()
        paths, scores = [(root,)], [0.0]
        assert tokens[0] == root
        for node in range(1, dynamic.num_nodes):
            above = parents[node]
            assert 0 <= above < node
            paths.append((*paths[above], tokens[node]))
            scores.append(scores[above] + float(odds(paths[above])[tokens[node]]))
        assert len(set(paths)) == dynamic.num_nodes
        assert max(map(len, paths)) <= dynamic.depth + 1
        wanted = oracle(odds, root, dynamic.top_k, dynamic.depth, dynamic.num_nodes - 1)
        found = torch.tensor(sorted(scores[1:], reverse=True))
        torch.testing.assert_close(found, torch.tensor(wanted), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(6, 3, 3), (30, 3, 4), (3, 2, 1), (13, 4, 4)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_best_of_all_paths(kind: str, shape: tuple[int, int, int]) -> None:
    """Whatever a path adds: every path that there is, sorted."""
    check_best(plan_of(DynamicTree(*shape), KINDS[kind]), oracle=of_all)


@pytest.mark.parametrize("tile", [1, 2, 4])
@pytest.mark.parametrize("kind", ["vanilla-of-5", "rnn"])
def test_tiles(kind: str, tile: int) -> None:
    """Nodes of a level are asked about in parts, and go on from what their own parents left."""
    check_best(replace(plan_of(DynamicTree(20, 3, 4), KINDS[kind]), tile=tile))


@pytest.mark.parametrize("kind", ["product", "vanilla-of-5", "rnn-some"])
def test_equal_scores(kind: str) -> None:
    """Which of equal paths are taken differs; how good they are does not."""
    check_best(plan_of(DynamicTree(25, 4, 3), KINDS[kind]), ties=True)


@pytest.mark.parametrize("kind", ["product", "vanilla", "rnn-of-5", "selector-of-5"])
def test_large_trees(kind: str) -> None:
    """128 nodes, 7 children, 15 levels: more than 10,000 candidates, of which few are held."""
    block = replace(KINDS[kind], size=16)
    check_best(plan_of(DynamicTree(128, min(7, block.candidates or 7), 15), block))


def test_more_than_the_best_of_a_level() -> None:
    """K nodes of each level would not do, as with draft models: the case that tells them apart."""
    plan, block = plan_of(DynamicTree(30, 3, 4), KINDS["rnn"]), KINDS["rnn"]
    _, made, environment = run(plan, (9, 2), weights=weights_of(block))
    rows = rows_of(block, 4, ties=False)
    differ = 0
    for b in range(BATCH):
        level, found = [(0.0, (int(environment["last_tokens"][b, -1]),))], list[Path]()
        for _ in range(4):

            def odds(path: Path, b: int = b) -> Tensor:
                return logits_after(block, rows[b], path).log_softmax(-1)

            level = [one for score, path in level for one in followed(odds, path, score, 3)]
            level = sorted(level, reverse=True)[:3]
            found += [path for _, path in level]
        fed = made["parents"][b].unique().tolist()
        paths = [level[0][1][:1]]
        for token, parent in zip(
            made["tokens"][b, 1:].tolist(), made["parents"][b, 1:].tolist(), strict=True
        ):
            paths.append((*paths[parent], token))
        differ += len({paths[node] for node in fed if node > 0} - set(found))
    assert differ > 0


@pytest.mark.parametrize("kind", [name for name in KINDS if "-of-" in name])
@pytest.mark.parametrize("rule", [None, *Rule])
@pytest.mark.parametrize("ties", [False, True])
def test_candidates_of_static_trees(kind: str, rule: Rule | None, ties: bool) -> None:
    """Children are drawn from the best tokens of a row, of equal ones the first, and rules know."""
    block, tree = KINDS[kind], TokenTree.from_widths((3, 2, 1))
    plan = SpecPlan.from_tree(tree).with_drafters({"draft_0": block})
    _, made, environment = run(plan, (9, 2), rule, ties, weights_of(block), lacks(block))
    rows, tokens = rows_of(block, 3, ties), made["tokens"]
    options = environment["sampling_values"], environment["sampling_words"]
    paths: dict[tuple[int, int], Path] = {(b, 0): (int(tokens[b, 0]),) for b in range(BATCH)}
    for d, b in itertools.product(range(3), range(BATCH)):
        for place, node in enumerate(tree.levels[d]):
            own = logits_after(block, rows[b], paths[b, node])
            found = made[f"q_{d}"].view(BATCH, -1, VOCAB)[b, place]
            assert int(found.isfinite().sum()) == 5
            torch.testing.assert_close(found, own, rtol=1e-5, atol=1e-5)
            below = tree.children(node)
            first = torch.tensor([below[0]], dtype=torch.int32)
            one = (environment["cache_len"][b : b + 1], first, d, *(x[b : b + 1] for x in options))
            best, _ = draft_children_reference(found[None], len(below), *one)
            assert tokens[b, list(below)].tolist() == best[0].tolist()
            paths |= {(b, child): (*paths[b, node], int(tokens[b, child])) for child in below}


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("kind", KINDS)
def test_budgets(kind: str, rule: Rule) -> None:
    """Levels are shared out by what paths have come to, and rules know what nodes are draws of."""
    block, levels = KINDS[kind], (3, 5, 4)
    plan = SpecPlan.from_dynamic(BudgetTree.of(levels)).with_drafters({"draft_0": block})
    _, made, env = run(plan, (9, 2), rule, weights=weights_of(block), lacks=lacks(block))
    rows, tokens = rows_of(block, 3, ties=False), made["tokens"]
    q_rows, is_product = env["q_rows"].tolist(), plan.drafters[0].is_product
    for b in range(BATCH):
        length = int(env["cache_len"][b])
        text = (0,) * length + (int(tokens[b, 0]),)
        values, words = env["sampling_values"][b].tolist(), env["sampling_words"][b].tolist()

        def logits(_: Any, request: Request, __: str, found: Path, b: int = b) -> Tensor:
            return logits_after(block, rows[b], found[len(request.text) - 1 :])

        request = Request(text, tuple(values), tuple(words))
        wanted, image = grow_budget(plan, "draft_0", request, logits, is_product)
        assert tokens[b, 1:].tolist() == wanted.tokens[1:]
        assert made["parents"][b].tolist() == wanted.parents
        assert made["image"][b].tolist() == image
        found = torch.cat([made[f"q_{d}"].view(BATCH, -1, VOCAB)[b] for d in range(3)])
        for row, source in zip(q_rows, wanted.q, strict=True):
            assert (row < 0) == (source is None)
            if source is not None:
                own = logits(plan, request, "draft_0", source)
                torch.testing.assert_close(found[row], own, rtol=1e-5, atol=1e-5)


def test_room_for_candidates() -> None:
    """Of a level: the best nodes of those above, and the children of as many."""
    wide = BlockDraft(17, MASK)
    for block in (wide, replace(wide, is_biased=True)):
        plan_of(DynamicTree(256, 7, 15), block)
        plan_of(DynamicTree(500, 7, 15), block)
        found = r"a block drafter offers 169\d{2} candidates at a time"
        with pytest.raises(TreeError, match=found):
            plan_of(DynamicTree(1000, 16, 15), block)
    with pytest.raises(TreeError, match="a set of Medusa heads offers"):
        plan_of(DynamicTree(1000, 16, 15), MedusaHeads(16))


def test_rows_of_logits() -> None:
    """What a step holds of a level: rows of its nodes, what is added to them, and the pass's."""
    plan = plan_of(DynamicTree(20, 3, 4), BIASED)
    assert plan.dynamic is not None
    assert plan.dynamic.path_widths == (1, 3, 9, 19)
    assert logit_rows(plan, "draft_0") == 4 + 19 + 19
    assert logit_rows(plan_of(DynamicTree(20, 3, 4)), "draft_0") == 4
    assert logit_rows(replace(plan, tile=5), "draft_0") == 4 + 5 + 5
