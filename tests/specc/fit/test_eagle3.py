"""EAGLE-3 heads that are fitted: what is trained is what engines run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specc.fit.chains import Chains
from specc.fit.drafters.eagle3 import EagleFitter, Goal, hits, losses, some_taps
from specc.fit.drafters.eagle_head import EagleHead, build_head, save_head
from specc.fit.drafters.fitter import LayerShape
from specc.fit.optimizer import Schedule
from specc.fit.target import Target
from specc.fit.texts import Texts, TextStore
from specc.fit.trainer import TrainerConfig, train
from specc.passes.drafters.head_spec import EMBEDDING, TargetFacts
from specc.passes.drafters.recognise import recognise
from tests.fitting import BOUNDARIES, check_walk, read, tiny_target, written
from tests.head_reference import Reference, hidden_states
from tests.heads import HEADS, KV_HEADS, LAYERS, VOCAB, WIDTH, Case

DEPTHS, NARROW, SIZE, ROWS = 3, 24, 8, 60


def case(width: int, rows: int = ROWS) -> Case:
    config = {"target_hidden_size": WIDTH} if width != WIDTH else {}
    layer = {"head_dim": SIZE, "rope_theta": 10000.0}
    return Case("SafeAILab", width=width, rows=rows, config=config, layer=layer)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def built(target: Target, rows: int = ROWS, width: int = NARROW) -> EagleHead:
    """A head whose norms and maps let no part go unnoticed."""
    torch.manual_seed(3)
    kept = torch.randperm(VOCAB)[:rows].sort().values
    shape = LayerShape(width, 40, HEADS, KV_HEADS, SIZE)
    head = build_head(target.sizes, len(BOUNDARIES), shape, 64, kept)
    with torch.no_grad():
        for value in head.parameters():
            drawn = 1 + 0.4 * torch.randn_like(value) if value.ndim == 1 else value
            # as it is saved
            value.copy_(drawn.bfloat16().float())
    return head


@torch.no_grad()
@pytest.mark.parametrize("width", [NARROW, WIDTH])
def test_every_depth_of_a_checkpoint_is_what_a_step_computes(
    target: Target, width: int, tmp_path: Path
) -> None:
    head = built(target, width=width)
    tokens = torch.randint(VOCAB, (2, 9))
    texts = read(target, tokens, 4)
    for taps, text in zip(texts.taps.float(), tokens.tolist(), strict=True):
        plain = hidden_states(target.module, text, BOUNDARIES)
        # products in bfloat16
        assert (taps - plain).norm() < 0.03 * plain.norm()
    save_head(head, BOUNDARIES, tmp_path)
    spec = recognise(tmp_path, TargetFacts("target", WIDTH, LAYERS, VOCAB))
    assert spec is not None
    assert (spec.layout, spec.boundaries, spec.warnings) == ("SafeAILab", BOUNDARIES, ())
    assert spec.shared == (() if width == NARROW else (EMBEDDING,))
    tensors = load_file(tmp_path / "model.safetensors")
    assert {value.dtype for name, value in tensors.items() if "2" not in name} == {torch.bfloat16}
    floats = {name: value.float() for name, value in tensors.items()} | {"d2t": tensors["d2t"]}
    reference = Reference(case(width), floats, target.sizes.embedding)
    taps = texts.taps.float()
    known = head.unroll(taps[:, :-2], tokens[:, 1:-1], DEPTHS, 0)
    compared = 0
    for row, text in enumerate(tokens.tolist()):
        for depth in range(DEPTHS):
            for i in range(depth, len(text) - 2):
                seen = i - depth + 1
                expected = reference.logits(
                    taps[row, :seen], text[: seen + 1], text[seen + 1 : i + 2]
                )
                found = torch.full((VOCAB,), float("-inf"))
                found[head.kept] = head.lm_head(known[depth][row, i])
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
                compared += 1
    assert compared == 2 * (7 + 6 + 5)


@pytest.mark.parametrize("rows", [ROWS, VOCAB])
@pytest.mark.parametrize("is_greedy", [True, False])
def test_loss_is_the_divergence_by_its_formula(target: Target, rows: int, is_greedy: bool) -> None:
    head, tokens, context = built(target, rows), torch.randint(VOCAB, (3, 12)), 6
    texts = read(target, tokens, context, is_greedy)
    with torch.no_grad():
        # ids whose losses differ
        head.lm_head.weight.mul_(8)
    total, parts, agreed = losses(head, texts, Goal(DEPTHS, 0.5, 0.7, 1.0))
    with torch.no_grad():
        known = head.unroll(texts.taps[:, :-2], tokens[:, 1:-1], DEPTHS, 0)
        # of the likeliest ids, those that the head proposes
        ids, odds = texts.ids[:, 1:-1].long(), texts.odds[:, 1:-1].float()
        goals = torch.zeros(*ids.shape[:2], VOCAB).scatter_(-1, ids, odds)
        first = ids[..., 0]
        goals += 0.7 * is_greedy * torch.nn.functional.one_hot(first, VOCAB)
        goals, expected = goals[..., head.kept], 0.0
        for depth in range(DEPTHS):
            scores = head.lm_head(known[depth])
            own = -(goals * scores.log_softmax(-1)).sum(-1)[:, context - 2 :].mean()
            assert parts[depth] == pytest.approx(own.item(), rel=0.02)
            hit = head.kept[scores.argmax(-1)] == first
            # a choice that is a near tie may be another one in bfloat16
            share = hit[:, context - 2 :].float().mean().item()
            assert agreed[depth] == pytest.approx(share, abs=0.09)
            expected += 0.5**depth * own.item()
    assert total.item() == pytest.approx(expected, rel=0.02)


def test_what_fills_rows_up_and_prompts_teach_nothing(target: Target) -> None:
    head, tokens = built(target, VOCAB), torch.randint(VOCAB, (2, 14))
    begins, ends = torch.tensor([3, 6]), torch.tensor([14, 10])
    both = target.read(tokens, BOUNDARIES, begins, ends, False)
    goal = Goal(DEPTHS, missed_weight=0.0)
    alone = [losses(head, both.row(number), goal) for number in range(2)]
    parts = losses(head, both, goal)[1]
    others = tokens.clone()
    others[1, 10:] = 7
    again = target.read(others, BOUNDARIES, begins, ends, False)
    torch.testing.assert_close(losses(head, again, goal)[1], parts)
    # at the first depth rows weigh alike
    counts = torch.tensor([14 - max(3, DEPTHS + 1), 10 - 6])
    mean = sum(count * own[1][0] for count, own in zip(counts, alone, strict=True))
    assert parts[0] == pytest.approx((mean / counts.sum()).item(), rel=1e-3)


def test_rows_after_a_miss_count_less(target: Target) -> None:
    """With weight 0 a depth learns from the rows alone that a greedy chain comes to."""
    head, tokens = built(target, VOCAB), torch.randint(VOCAB, (3, 12))
    texts = read(target, tokens, 6)
    with torch.no_grad():
        # rows whose losses differ
        head.lm_head.weight.mul_(16)
        known = head.unroll(texts.taps[:, :-2], tokens[:, 1:-1], DEPTHS, 0)
        scores = [head.lm_head(rows)[:, 4:] for rows in known]
        # what the head finds likeliest is the target's choice here and there
        is_same = torch.rand(3, 6) < 0.6
        chosen = torch.where(is_same, scores[0].argmax(-1), scores[1].argmax(-1))
        ids, odds = texts.ids.clone(), texts.odds.clone()
        ids[:, 5:-1, 0] = chosen.int()
        odds[..., 0] += 1
        texts = replace(texts, ids=ids, odds=odds)
        goals = torch.zeros(3, 6, VOCAB)
        goals.scatter_add_(-1, ids[:, 5:-1].long(), odds[:, 5:-1].float())
        seen, counts, alive = [], [], torch.ones(3, 6)
        for own in scores:
            counts.append(int(alive.sum()))
            loss = -(goals * own.log_softmax(-1)).sum(-1)
            seen.append(((loss * alive).sum() / alive.sum()).item())
            hit = own.argmax(-1) == chosen
            alive[:, 1:] = alive[:, :-1].clone() * hit[:, :-1]
            alive[:, 0] = 1
        assert 18 == counts[0] > counts[1] > counts[2] > 3

    def parts(weight: float) -> list[float]:
        return losses(head, texts, Goal(DEPTHS, 1.0, 0.0, weight))[1].tolist()

    assert parts(0.0) == pytest.approx(seen, rel=0.03)
    assert parts(1.0) != pytest.approx(seen, rel=0.03)


@torch.no_grad()
def test_coordinates_of_taps_change_what_is_learned_and_no_result(target: Target) -> None:
    head, tokens = built(target), torch.randint(VOCAB, (40, 24))
    # as in residual streams, some directions are far larger than the rest
    sizes = torch.logspace(-1, 2, len(BOUNDARIES) * WIDTH)
    mixed = sizes[:, None] * torch.linalg.qr(torch.randn(len(sizes), len(sizes)))[0]
    plain = torch.randn(4000, len(sizes)) @ mixed
    before = head.fc(plain)
    head.fc.change_basis(plain, floor=0.0)
    again = read(target, tokens, 4)
    known = head.unroll(again.taps.float(), tokens, DEPTHS, 0)
    assert head.fc.weight.shape == (NARROW, len(sizes))
    torch.testing.assert_close(head.fc(plain), before, rtol=1e-3, atol=1e-3 * before.std())
    seen = plain @ head.fc.basis.T
    torch.testing.assert_close(
        seen.T @ seen / len(seen), torch.eye(len(sizes)), rtol=0.0, atol=1e-2
    )
    # from coordinates into others: those of a floor have small directions that stay small
    head.fc.change_basis(plain, floor=0.5)
    seen = (plain @ head.fc.basis.T).square().mean(0)
    assert seen.max() < 1.02
    assert seen.min() < 0.5
    EagleFitter(DEPTHS).end(head)
    assert head.fc.basis is None
    torch.testing.assert_close(head.fc(plain), before, rtol=1e-2, atol=1e-2 * before.std())
    for own, other in zip(head.unroll(again.taps.float(), tokens, DEPTHS, 0), known, strict=True):
        torch.testing.assert_close(own, other, rtol=3e-2, atol=3e-2)


def stored(directory: Path, texts: Texts, kind: str) -> TextStore:
    store = TextStore(directory)
    store.add(kind, texts)
    return store


@pytest.mark.slow
def test_a_trained_head_drafts_in_an_engine_as_its_walk_says(
    target: Target, tmp_path: Path
) -> None:
    torch.manual_seed(11)
    head, prompts = built(target, VOCAB), torch.randint(VOCAB, (8, 4))
    tokens = written(target, prompts, 20)
    texts = read(target, tokens, 4, is_greedy=True)
    store, fitter, goal = stored(tmp_path / "texts", texts, "greedy"), EagleFitter(DEPTHS), Goal(3)
    fitter.begin(head, store)
    assert some_taps(store).shape == (8 * 24, 3 * WIDTH)
    schedule = Schedule(40, 1e6, warmup=1)
    config = TrainerConfig(schedule, (0.02, 4e-3), 200, 0, target.device)
    before = losses(head, texts, goal)[0].item()
    result = train(head, lambda *x: fitter.losses(head, *x), store, config)
    assert result.steps == 40
    assert losses(head, texts, goal)[0].item() < 0.7 * before
    assert result.loss is not None
    assert result.loss[1] < result.loss[0]

    fitter.end(head)
    fitter.save(head, target.sizes, BOUNDARIES, tmp_path / "head")
    exact = read(target, tokens, 4, is_greedy=True, is_exact=True)
    chains = Chains(DEPTHS)
    for number in range(8):
        row = exact.row(number)
        chains.follow(row, hits(head, row, DEPTHS))
    walked = chains.figures()
    assert walked.acceptance_length > 1.2
    check_walk(target, tmp_path / "head", prompts, tokens[:, 4:], walked, tmp_path)
