"""Acceptance drawn inside of a step: against a walk in plain Python, its odds, and where it is."""

from __future__ import annotations

import itertools
import json
import math
import random
from typing import Any

import pytest
import torch

from specc.bench_synthetic import SyntheticAcceptance, expected_length
from specc.config import SpecPlan
from specc.graph_io import graph_from_json
from specc.kernels import ops as _ops  # noqa: F401
from specc.kernels.reference import accept_greedy_reference
from specc.passes.draw_acceptance import STAGE, draw_acceptance
from specc.passes.fuse_step import fuse_step
from tests.test_layering import ROOT

VOCAB = 61
SLABS = {"target": 1, "draft_0": 1}
PADDING = -(1 << 30)


def make_tokens(plan: SpecPlan, batch: int) -> torch.Tensor:
    """[B, N] with distinct siblings, as a draft proposes them, and other tokens in each row."""
    nodes = torch.arange(plan.tree.num_nodes)
    return (7 * nodes + 3 * torch.arange(batch)[:, None]) % VOCAB


def accept(
    plan: SpecPlan,
    probabilities: tuple[float, ...],
    cache_len: list[int],
    *,
    period: int,
    seed: int = 0,
    max_batch: int = 0,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[list[int]], torch.Tensor, torch.Tensor]:
    """Paths that the acceptance operator finds behind the stage, and logits before and after."""
    batch = len(cache_len)
    step = draw_acceptance(
        fuse_step(plan, SLABS),
        probabilities,
        max_batch=max_batch or batch,
        period=period,
        dtype=dtype,
        seed=seed,
    )
    data = step.to_json()
    (stored,) = (stage["graph"] for stage in data["stages"] if stage["name"] == STAGE)
    graph = graph_from_json(stored)
    tokens = make_tokens(plan, batch)
    # below zero: a loser that is set to anything but minus infinity wins
    logits = (torch.randn(batch * plan.tree.num_nodes, VOCAB) - 20).to(dtype)
    # a draft that is always right, unless the dice say otherwise
    for child, parent in enumerate(plan.tree.parents):
        if parent >= 0:
            rows = torch.arange(batch) * plan.tree.num_nodes + parent
            logits[rows, tokens[:, child]] += 9
    edited = logits.clone()
    values: dict[str, Any] = {
        name: torch.tensor(entry["values"], dtype=getattr(torch, entry["dtype"]))
        for name, entry in data["constants"].items()
    }
    values |= {
        "cache_len": torch.tensor(cache_len, dtype=torch.int32),
        "tokens": tokens,
        "logits": edited,
    }
    names = [node.target for node in graph.graph.find_nodes(op="placeholder")]
    assert graph(*(values[name] for name in names)) == {}
    parents = torch.tensor(plan.tree.parents, dtype=torch.int32).expand(batch, -1)
    path, _, _ = accept_greedy_reference(edited, tokens, parents, plan.tree.max_depth)
    return path.tolist(), logits, edited


def walk(
    plan: SpecPlan,
    probabilities: tuple[float, ...],
    cache_len: list[int],
    *,
    period: int,
    seed: int = 0,
    max_batch: int = 0,
) -> list[list[int]]:
    """The same in plain Python: one number for every family of siblings of every row, in order."""
    chance = random.Random(seed)
    tree = plan.tree
    children = [
        [c for c, p in enumerate(tree.parents) if p == node] for node in range(tree.num_nodes)
    ]
    winners = []
    for _ in range((max_batch or len(cache_len)) * period):
        row: dict[int, int | None] = {}
        for node, family in enumerate(children):
            if family:
                number, row[node], bound = chance.random(), None, 0.0
                for child, probability in zip(family, probabilities, strict=False):
                    if bound <= number < bound + probability:
                        row[node] = child
                    bound += probability
        winners.append(row)
    paths = []
    for b, length in enumerate(cache_len):
        path = [0]
        while (child := winners[b * period + length % period].get(path[-1])) is not None:
            path.append(child)
        paths.append(path + [-1] * (tree.max_depth + 1 - len(path)))
    return paths


PLANS = [(1, 1, 1, 1), (3, 2, 1), (2, 1, 1), (4,)]


@pytest.mark.parametrize("widths", PLANS, ids=str)
@pytest.mark.parametrize("probabilities", [(0.6, 0.2), (0.72, 0.1, 0.04), (0.5,)], ids=str)
def test_a_step_accepts_what_a_walk_in_python_does(widths, probabilities):
    """Every sequence has draws of its own, by its length; lengths beyond the period come again."""
    plan = SpecPlan.from_widths(widths)
    cache_len = [0, 1, 2, 5, 6, 7, 12, 1000, 3, 3, 3]
    options = {"period": 6, "seed": 5, "max_batch": 13}
    paths, _, _ = accept(plan, probabilities, cache_len, **options)
    wanted = walk(plan, probabilities, cache_len, **options)
    assert paths == wanted
    assert len({tuple(path) for path in wanted}) > 1, "a case that decides something"


def test_padding_looks_up_rows_that_exist():
    """Lengths far below zero, as those of padding: no index leaves the table."""
    plan = SpecPlan.from_widths((2, 1))
    cache_len = [PADDING, 4, PADDING + 3, -1]
    options = {"period": 5, "seed": 2}
    assert accept(plan, (0.5, 0.2), cache_len, **options)[0] == walk(
        plan, (0.5, 0.2), cache_len, **options
    )


def test_the_seed_decides():
    plan = SpecPlan.from_widths((1,) * 6)
    a, b, c = (accept(plan, (0.5,), list(range(20)), period=20, seed=seed)[0] for seed in (1, 1, 2))
    assert a == b
    assert a != c


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_other_logits_stay(dtype):
    """Leaves keep all logits; of a node with children those of the children alone are changed."""
    plan = SpecPlan.from_widths((3, 2))
    _, before, after = accept(plan, (0.4, 0.3), [0, 9], period=50, dtype=dtype)
    tokens = make_tokens(plan, 2)
    nodes = plan.tree.num_nodes
    mask = torch.zeros(2 * nodes, VOCAB, dtype=torch.bool)
    for b, (child, parent) in itertools.product((0, 1), enumerate(plan.tree.parents)):
        if parent >= 0:
            mask[b * nodes + parent, tokens[b, child]] = True
    assert torch.equal(before[~mask], after[~mask])
    assert bool(after[mask].isinf().all())
    assert after.dtype == dtype


def counts(paths: list[list[int]], families: dict[int, list[int]]) -> dict[int, list[int]]:
    """How often the child of each rank was taken, and none, by depth of the parent."""
    found: dict[int, list[int]] = {}
    for path in paths:
        for depth, (node, child) in enumerate(itertools.pairwise([*path, -1])):
            if node in families:
                ranks = found.setdefault(depth, [0] * (max(map(len, families.values())) + 1))
                taken = families[node].index(child) if child >= 0 else -1
                ranks[taken] += 1
            if child < 0:
                break
    return found


@pytest.mark.parametrize("kind", ["stage", "hook"])
@pytest.mark.parametrize("widths", [(3, 2, 1), (1, 1, 1)], ids=str)
def test_both_kinds_of_dice_have_the_same_odds(kind, widths):
    """Counts of each rank at each depth, and of rejections, within 5 standard deviations."""
    plan, probabilities, num = SpecPlan.from_widths(widths), (0.5, 0.2, 0.1), 4000
    if kind == "stage":
        paths, _, _ = accept(plan, probabilities, list(range(num)), period=1 << 2, max_batch=num)
    else:
        tokens = make_tokens(plan, num)
        logits = torch.randn(num * plan.tree.num_nodes, VOCAB)
        SyntheticAcceptance(probabilities, plan, seed=4)({"tokens": tokens, "logits": logits})
        parents = torch.tensor(plan.tree.parents, dtype=torch.int32).expand(num, -1)
        paths = accept_greedy_reference(logits, tokens, parents, plan.tree.max_depth)[0].tolist()
    families: dict[int, list[int]] = {}
    for node, parent in enumerate(plan.tree.parents[1:], start=1):
        families.setdefault(parent, []).append(node)
    found = counts(paths, families)
    assert set(found) == set(range(len(widths)))
    for depth, width in enumerate(widths):
        total = sum(found[depth])
        assert total > 300
        odds = [*probabilities[:width], 1 - sum(probabilities[:width])]
        seen = [*found[depth][:width], found[depth][-1]]
        for rank, (count, p) in enumerate(zip(seen, odds, strict=True)):
            bound = 5 * math.sqrt(total * p * (1 - p))
            assert abs(count - total * p) < bound, (depth, rank, count / total, p)
    mean = sum(sum(node >= 0 for node in path) for path in paths) / num
    assert abs(mean - expected_length(probabilities, widths)) < 0.08


def test_the_other_stages_stay():
    plan = SpecPlan.from_widths((2, 1))
    step = fuse_step(plan, SLABS)
    drawn = draw_acceptance(step, (0.5,), max_batch=2, period=4, dtype=torch.float32)
    assert list(drawn.stages) == ["draft", "verify", STAGE, "accept_commit"]
    for name, graph in step.stages.items():
        assert drawn.stages[name] is graph
    assert {name for name in drawn.constants if name not in step.constants} == {
        "draw_values",
        "draw_parents",
    }
    assert STAGE not in step.stages
    # what launches: a remainder, a sum, a look-up, an edit; the rest follows from the batch size
    calls = [str(n.target) for n in drawn.stages[STAGE].nodes if n.op == "call_function"]
    assert "aten.index_put_.default" in calls
    assert len(calls) < 14


def test_no_shipped_engine_has_it(tiny_engine):
    """Neither in the steps of an engine, nor anywhere that specc compile reaches."""
    files = sorted((tiny_engine / "steps").glob("*.json"))
    assert len(files) == 3
    for file in files:
        stages = [stage["name"] for stage in json.loads(file.read_text())["stages"]]
        assert STAGE not in stages, file
    users = [
        path.name
        for folder in ("specc", "passes", "runtime", "kernels")
        for path in (ROOT / folder).glob("**/*.py")
        if "draw_acceptance" in path.read_text() and path.stem != "draw_acceptance"
    ]
    assert users == ["bench_compile.py"]
