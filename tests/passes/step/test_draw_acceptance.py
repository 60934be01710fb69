"""Acceptance drawn inside of a step: against a walk in plain Python, its odds, and where it is."""

from __future__ import annotations

import itertools
import json
import math
import random
from typing import Any

import pytest
import torch

from specc.artifact.graph_io import graph_from_json
from specc.bench.dice import SyntheticAcceptance
from specc.cost.acceptance import expected_tokens
from specc.kernels import ops as _ops  # noqa: F401
from specc.passes.step.draw_acceptance import STAGE, DrawnAcceptance, draw_acceptance
from specc.passes.step.fuse_step import fuse_step
from specc.speculation.plans import SpecPlan
from specc.speculation.tree import TokenTree
from tests.specc.bench.greedy_acceptance import accept_greedily
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
    start: int = 0,
    seed: int = 0,
    max_batch: int = 0,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[list[int]], torch.Tensor, torch.Tensor]:
    """Paths that the acceptance operator finds after the stage, and logits before and after."""
    batch = len(cache_len)
    step = draw_acceptance(
        fuse_step(plan, SLABS),
        probabilities,
        max_batch=max_batch or batch,
        period=period,
        dtype=dtype,
        start=start,
        seed=seed,
    )
    data = step.to_json()
    (stored,) = (stage["graph"] for stage in data["stages"] if stage["name"] == STAGE)
    graph = graph_from_json(stored)
    tokens = make_tokens(plan, batch)
    # below zero: a loser that is set to less than all others wins nothing
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
    path, _, _ = accept_greedily(edited, tokens, parents, plan.tree.max_depth)
    return path.tolist(), logits, edited


def enumerate_paths(
    plan: SpecPlan, probabilities: tuple[float, ...]
) -> list[tuple[list[int], float]]:
    """Every path that a step can accept, root included, with its probability; the longest first."""
    tree = plan.tree
    found: list[tuple[list[int], float]] = []

    def visit(path: list[int], reached: float) -> None:
        rest = reached
        for child, probability in zip(tree.children(path[-1]), probabilities, strict=False):
            visit([*path, child], reached * probability)
            rest -= reached * probability
        found.append((path, max(rest, 0.0)))

    visit([0], 1.0)
    return sorted(found, key=lambda item: (-len(item[0]), item[0][-1]))


def pick(paths: list[tuple[list[int], float]], quantile: float) -> list[int]:
    """The path at a quantile: a sum that grows until it is above."""
    total = 0.0
    for path, probability in paths:
        total += probability
        if quantile < total:
            return path
    return paths[-1][0]


def walk(
    plan: SpecPlan,
    probabilities: tuple[float, ...],
    cache_len: list[int],
    *,
    period: int,
    start: int = 0,
    seed: int = 0,
    max_batch: int = 0,
) -> list[list[int]]:
    """The same in plain Python: independent numbers, then those of the steps from `start` on."""
    max_batch = max_batch or len(cache_len)
    shift = DrawnAcceptance(plan.tree, probabilities, max_batch, period, start, seed).shift
    paths = enumerate_paths(plan, probabilities)
    chance = random.Random(seed)
    table: dict[tuple[int, int], list[int]] = {}
    for b in range(max_batch):
        for i in range(period):
            table[b, (start + i) % period] = pick(paths, chance.random())
        length, step = start, 0
        while length < start + period:
            path = pick(paths, (shift + b / max_batch + step * (math.sqrt(5) - 1) / 2) % 1)
            table[b, length % period] = path
            length, step = length + len(path), step + 1
    rows = [table[b, length % period] for b, length in enumerate(cache_len)]
    return [path + [-1] * (plan.tree.max_depth + 1 - len(path)) for path in rows]


PLANS = [(1, 1, 1, 1), (3, 2, 1), (2, 1, 1), (4,)]


@pytest.mark.parametrize("start", [0, 1000])
@pytest.mark.parametrize("widths", PLANS, ids=str)
@pytest.mark.parametrize("probabilities", [(0.6, 0.2), (0.72, 0.1, 0.04), (0.5,)], ids=str)
def test_a_step_accepts_what_a_walk_in_python_does(widths, probabilities, start):
    """Every sequence has draws of its own, by its length; lengths beyond the period come again."""
    plan = SpecPlan.from_widths(widths)
    cache_len = [0, 1, 2, 5, 6, 7, 12, 1000, 3, 3, 3]
    options = {"period": 6, "seed": 5, "max_batch": 13, "start": start}
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
    # far from all others, and finite: probabilities are made of differences
    far = after[mask].float().abs()
    assert bool((far > 100 * before.float().abs().max()).all() and far.isfinite().all())
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
        # the first step of every sequence: rows after it are reached or not by what it accepts
        paths, _, _ = accept(plan, probabilities, [9] * num, period=4, start=9, max_batch=num)
    else:
        tokens = make_tokens(plan, num)
        logits = torch.randn(num * plan.tree.num_nodes, VOCAB)
        SyntheticAcceptance(probabilities, plan, seed=4)({"tokens": tokens, "logits": logits})
        parents = torch.tensor(plan.tree.parents, dtype=torch.int32).expand(num, -1)
        paths = accept_greedily(logits, tokens, parents, plan.tree.max_depth)[0].tolist()
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
    assert abs(mean - expected_tokens(plan.tree, [probabilities])) < 0.08


CASES = [
    ((0.8,), (1, 1, 1, 1, 1)),
    ((0.9,), (1, 1, 1, 1)),
    ((0.72, 0.1, 0.04), (3, 1, 1, 1)),
    ((0.6, 0.2), (2, 1)),
]


def accepted_paths(draws: DrawnAcceptance, place: int) -> list[list[int]]:
    """Nodes that each step accepts, as the table says, until `period` rows are committed."""
    table, row, found = draws.accepted(), 0, []
    while row < draws.period:
        line = table[place * draws.period + (draws.start + row) % draws.period]
        found.append([node for node, wins in enumerate(line, start=1) if wins])
        row += 1 + len(found[-1])
    return found


@pytest.mark.parametrize(("probabilities", "widths"), CASES, ids=str)
@pytest.mark.parametrize("tokens", [96, 128, 512])
@pytest.mark.parametrize("seed", range(4))
def test_the_mean_of_few_steps_is_the_expected_one(probabilities, widths, tokens, seed):
    """Of the steps that queue back to back, and of those that emit all tokens: both within 3%."""
    draws = DrawnAcceptance(TokenTree.from_widths(widths), probabilities, 1, tokens, 1024, seed)
    lengths = [1 + len(path) for path in accepted_paths(draws, 0)]
    few = tokens // (len(widths) + 1)
    # the first token is that of prefill; the step that emits the last one is cut
    steps = next(k for k in range(len(lengths) + 1) if sum(lengths[:k]) >= tokens - 1)
    wanted = expected_tokens(TokenTree.from_widths(widths), [probabilities])
    means = sum(lengths[:few]) / few, (tokens - 1) / steps
    assert means == pytest.approx((wanted, wanted), rel=0.03)
    assert draws.deviation(draws.shift) == pytest.approx(max(abs(m - wanted) for m in means))


@pytest.mark.parametrize(("probabilities", "widths"), CASES, ids=str)
@pytest.mark.parametrize("max_batch", [1, 8])
def test_every_path_has_its_share(probabilities, widths, max_batch):
    """Not only the mean: how often a sequence, and a batch, ends at each node, within 3 steps."""
    plan = SpecPlan.from_widths(widths)
    draws = DrawnAcceptance(plan.tree, probabilities, max_batch, 300, start=77)
    shares = {path[-1]: p for path, p in enumerate_paths(plan, probabilities)}
    every = [accepted_paths(draws, place) for place in range(max_batch)]
    fewest = min(map(len, every))
    assert fewest > 60
    for walks in ([every[0]], [[paths[5]] for paths in every], every):
        ends = [[0, *path][-1] for paths in walks for path in paths[:fewest]]
        for node, share in shares.items():
            limit = 3 if len(walks) == 1 else 3 + len(ends) / 100
            assert abs(ends.count(node) - share * len(ends)) < limit, (node, share)
    for path in itertools.chain(*every):
        assert all(plan.tree.parents[b] == a for a, b in itertools.pairwise([0, *path]))


def test_sequences_of_a_batch_are_even_together():
    """Step k of all sequences: evenly spaced quantiles, so its mean is the expected one."""
    probabilities, widths = CASES[0]
    tree = TokenTree.from_widths(widths)
    draws = DrawnAcceptance(tree, probabilities, 16, 128, 1024)
    every = [accepted_paths(draws, place) for place in range(16)]
    for step in range(20):
        lengths = [1 + len(paths[step]) for paths in every]
        assert abs(sum(lengths) - 16 * expected_tokens(tree, [probabilities])) < len(widths)
        assert len(set(lengths)) > 3


def test_the_evenest_start_is_chosen():
    """Of 64 for a single sequence, in the order of the seed."""
    draws = DrawnAcceptance(TokenTree.from_widths((1,) * 5), (0.8,), 1, 128, 1024, seed=3)
    chance = random.Random(3)
    tried = [chance.random() for _ in range(64)]
    found = [draws.deviation(shift) for shift in tried]
    assert draws.deviation(draws.shift) == min(found)
    assert draws.shift in tried
    assert max(found) > 2 * min(found)


@pytest.mark.parametrize(
    ("probabilities", "length"), [((0.0,), 1), ((1.0,), 4), ((0.0, 1.0), 4), ((0.7, 0.1, 0.2), 4)]
)
def test_certain_acceptance_is_certain(probabilities, length):
    """Also where rounding leaves a sum below 1, and for the shortest of outputs."""
    widths = (len(probabilities),) * 3
    for period in (1, 2, 40):
        draws = DrawnAcceptance(TokenTree.from_widths(widths), probabilities, 3, period)
        assert {1 + sum(row) for row in draws.accepted()} == {length}
        assert draws.ends.mean_length == pytest.approx(length)


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
        str(path.relative_to(ROOT))
        for folder in ("specc", "passes", "runtime", "kernels")
        for path in (ROOT / folder).glob("**/*.py")
        if "draw_acceptance" in path.read_text() and path.stem != "draw_acceptance"
    ]
    assert users == ["specc/compiler/in_memory.py"]
