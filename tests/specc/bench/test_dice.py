"""Acceptance drawn by sibling rank: the walk, its statistics, and what it does to an engine."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from specc.bench.dice import SyntheticAcceptance
from specc.bench.engine import EngineContender
from specc.cost.acceptance import expected_tokens
from specc.kernels.reference.core import accept_winners_reference
from specc.runtime.engine import Engine
from specc.speculation.plans import SpecPlan
from specc.speculation.tree import TokenTree
from tests.specc.bench.greedy_acceptance import accept_greedily

VOCAB = 17


def walk(probabilities, widths, batch, seed=0):
    """Nodes that the real acceptance operator accepts after the hook: [B][depth]."""
    plan = SpecPlan.from_widths(widths)
    tree = plan.tree
    # siblings carry distinct tokens, as a draft proposes them
    tokens = torch.tensor([(5 * node) % VOCAB for node in range(tree.num_nodes)]).repeat(batch, 1)
    logits = torch.randn(batch * tree.num_nodes, VOCAB)
    hook = SyntheticAcceptance(probabilities, plan, seed)
    hook({"tokens": tokens, "logits": logits})
    parents = torch.tensor(tree.parents, dtype=torch.int32).expand(batch, -1)
    path, num_accepted, output = accept_greedily(logits, tokens, parents, tree.max_depth)
    assert hook.seconds > 0
    assert torch.equal((output >= 0).sum(dim=1).int(), num_accepted + 1)
    return path.tolist(), num_accepted


def test_plans_in_tiles_draw_alike():
    """Their winners say what the logits of others would, and where none is drawn, no child's."""
    plan, batch = SpecPlan.from_widths((3, 2, 1)), 200
    tree = plan.tree
    parents = torch.tensor(tree.parents, dtype=torch.int32).expand(batch, -1)
    tokens = torch.tensor([(5 * node) % VOCAB for node in range(tree.num_nodes)]).repeat(batch, 1)
    logits = torch.randn(batch * tree.num_nodes, VOCAB)
    best = logits.argmax(dim=1).view(batch, -1)
    values = {"tokens": tokens, "winners": best.clone()}
    tiled = SyntheticAcceptance((0.5, 0.2), replace(plan, tile=4), seed=3)
    tiled(values)
    SyntheticAcceptance((0.5, 0.2), plan, seed=3)({"tokens": tokens, "logits": logits})
    path, accepted, output = accept_winners_reference(values["winners"], tokens, parents, 3)
    wanted = accept_greedily(logits, tokens, parents, 3)
    assert torch.equal(path, wanted[0])
    assert len(accepted.unique()) == 4
    # the bonus token is the target's own where that is no child's
    last = accepted.long()[:, None]
    bonus, own = output.gather(1, last), best.gather(1, path.gather(1, last).long())
    assert (bonus == own).float().mean() > 0.7
    assert (bonus >= 0).all()


@pytest.mark.parametrize("widths", [(1, 1, 1, 1), (3, 2, 1)], ids=str)
def test_certain_acceptance_takes_the_first_child_down_to_the_leaf(widths):
    paths, num_accepted = walk((1.0,), widths, 3)
    assert num_accepted.tolist() == [len(widths)] * 3
    tree = SpecPlan.from_widths(widths).tree
    want = [0]
    for _ in widths:
        want.append(tree.parents.index(want[-1]))
    assert paths == [want] * 3


@pytest.mark.parametrize("probabilities", [(0.0,), (0.0, 0.0)], ids=str)
def test_no_acceptance_at_probability_zero(probabilities):
    _, num_accepted = walk(probabilities, (2, 1), 5)
    assert num_accepted.tolist() == [0] * 5


def test_the_second_sibling():
    tree = SpecPlan.from_widths((3, 2)).tree
    paths, _ = walk((0.0, 1.0), (3, 2), 2)
    first = tree.levels[1][1]
    second = [node for node, parent in enumerate(tree.parents) if parent == first][1]
    assert paths == [[0, first, second]] * 2


def test_a_rank_that_the_plan_lacks_is_rejected():
    paths, _ = walk((0.0, 0.0, 1.0), (3, 2), 2)
    third = SpecPlan.from_widths((3, 2)).tree.levels[1][2]
    assert paths == [[0, third, -1]] * 2


def test_frequencies():
    """5 standard deviations around the expected counts of 4000 draws."""
    batch = 4000
    paths, num_accepted = walk((0.5, 0.2), (2, 1), batch, seed=3)
    first = sum(path[1] == 1 for path in paths)
    second = sum(path[1] == 2 for path in paths)
    assert abs(first - 0.5 * batch) < 5 * (0.25 * batch) ** 0.5
    assert abs(second - 0.2 * batch) < 5 * (0.16 * batch) ** 0.5
    mean = 1 + num_accepted.float().mean().item()
    assert abs(mean - expected_tokens(TokenTree.from_widths((2, 1)), [(0.5, 0.2)])) < 0.06


def test_the_seed_decides():
    a, b, c = (walk((0.5,), (1,) * 6, 20, seed)[0] for seed in (1, 1, 2))
    assert a == b
    assert a != c


@pytest.fixture(scope="module")
def engine(tiny_engine) -> Engine:
    return Engine.load(tiny_engine, verify=False)


@pytest.mark.parametrize(
    ("probabilities", "length"), [((1.0,), 4.0), ((0.0,), 1.0)], ids=["all", "none"]
)
def test_an_engine_accepts_what_the_dice_say(engine, probabilities, length):
    """16 tokens after the first are 4 steps of 4, or 16 of 1; two requests together."""
    batches = [[[1, 2, 3], [4, 5]]]
    contender = EngineContender(engine, "speculative", "chain-3", batches, 17, probabilities)
    found = contender.run()
    assert found.mean_acceptance_length == length
    assert found.num_steps == 16 / length
    assert found.requests_per_step == 2
    assert found.excluded_s > 0
    assert [len(tokens) for tokens in found.outputs] == [17, 17]
    assert engine.steps["chain-3"].before_accept is None


def test_the_time_of_the_dice_is_not_counted(engine, monkeypatch):
    """Slow dice: what is counted and what is excluded fit into the time that passed."""
    draw = SyntheticAcceptance._draw

    def slow(self, place, num_places):
        time.sleep(0.015)
        return draw(self, place, num_places)

    monkeypatch.setattr(SyntheticAcceptance, "_draw", slow)
    contender = EngineContender(engine, "speculative", "chain-3", [[[1, 2]]], 9, (1.0,))
    begin = time.perf_counter()
    found = contender.run()
    passed = time.perf_counter() - begin
    assert found.excluded_s >= 2 * 0.015
    assert found.elapsed_s + found.excluded_s <= passed
    assert found.decode_s < found.elapsed_s


def test_runs_repeat(engine):
    """Rounds differ in time only: every run draws the same acceptance."""
    contender = EngineContender(engine, "speculative", "tree-2-1", [[[1, 2, 3]]], 40, (0.5, 0.3))
    first, second = contender.run(), contender.run()
    assert first.accepted_per_depth == second.accepted_per_depth
    assert 1 < first.mean_acceptance_length < 3
    assert first.outputs == second.outputs


def test_off_is_not_touched(engine):
    """Plain decoding has nothing to accept; its output stays the target's."""
    real = EngineContender(engine, "off", "off", [[[1, 2, 3]]], 12).run()
    diced = EngineContender(engine, "off", "off", [[[1, 2, 3]]], 12, (0.5,)).run()
    assert diced.outputs == real.outputs
    assert diced.excluded_s == 0
