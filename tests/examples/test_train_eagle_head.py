"""The example that trains an EAGLE-3 head: what it trains is what engines run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specc.passes.drafters.head_spec import TargetFacts
from specc.passes.drafters.recognise import recognise
from tests.examples.head_examples import check_walk, imported, tiny_target
from tests.head_reference import Reference, hidden_states
from tests.heads import HEADS, KV_HEADS, LAYERS, VOCAB, WIDTH, Case

BOUNDARIES, DEPTHS = (2, 4, 5), 3
NARROW, SIZE = 24, 8
ROWS = 60
CASE = Case(
    "SafeAILab",
    width=NARROW,
    rows=ROWS,
    config={"target_hidden_size": WIDTH},
    layer={"head_dim": SIZE, "rope_theta": 10000.0},
)


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with imported("train_eagle_head") as module:
        yield module


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_target()


def built(target: Any, rows: int = ROWS) -> Any:
    """A head whose norms and maps let no part go unnoticed."""
    torch.manual_seed(3)
    kept = torch.randperm(VOCAB)[:rows].sort().values
    sizes = {"width": NARROW, "inner": 40, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": SIZE}
    head = sys.modules["eagle_head"].build_head(
        target, len(BOUNDARIES), **sizes, trained_length=64, kept=kept
    )
    with torch.no_grad():
        for value in head.parameters():
            drawn = 1 + 0.4 * torch.randn_like(value) if value.ndim == 1 else value
            # as it is saved
            value.copy_(drawn.bfloat16().float())
    return head


def read(target: Any, tokens: Tensor, context: int) -> Any:
    return sys.modules["head_texts"].read_texts(target, tokens, BOUNDARIES, context)


@torch.no_grad()
def test_every_depth_of_a_checkpoint_is_what_a_step_computes(
    script: ModuleType, target: Any, tmp_path: Path
) -> None:
    head = built(target)
    tokens = torch.randint(VOCAB, (2, 9))
    texts = read(target, tokens, 4)
    for taps, text in zip(texts.taps.float(), tokens.tolist(), strict=True):
        plain = hidden_states(target, text, BOUNDARIES)
        # products in bfloat16
        assert (taps - plain).norm() < 0.03 * plain.norm()
    sys.modules["eagle_head"].save_head(head, BOUNDARIES, tmp_path)
    spec = recognise(tmp_path, TargetFacts("target", WIDTH, LAYERS, VOCAB))
    assert spec is not None
    assert (spec.layout, spec.boundaries, spec.warnings) == ("SafeAILab", BOUNDARIES, ())
    tensors = load_file(tmp_path / "model.safetensors")
    assert {value.dtype for name, value in tensors.items() if "2" not in name} == {torch.bfloat16}
    loaded, boundaries = sys.modules["eagle_head"].load_head(tmp_path, target)
    assert boundaries == BOUNDARIES
    assert loaded.kept.equal(head.kept)
    for own, other in zip(loaded.parameters(), head.parameters(), strict=True):
        assert own.equal(other)
    floats = {name: value.float() for name, value in tensors.items()} | {"d2t": tensors["d2t"]}
    reference = Reference(CASE, floats, target.get_input_embeddings().weight)
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
def test_loss_is_the_divergence_by_its_formula(
    script: ModuleType, target: Any, rows: int, is_greedy: bool
) -> None:
    head, tokens, context = built(target, rows), torch.randint(VOCAB, (3, 12)), 6
    texts = read(target, tokens, context)
    goal = script.Goal(DEPTHS, 0.5, 0.7, 1.0)
    output = target.get_output_embeddings().weight.detach().bfloat16()
    total, parts, hits = script.losses(head, output, texts, goal, is_greedy)
    with torch.no_grad():
        known = head.unroll(texts.taps[:, :-2], tokens[:, 1:-1], DEPTHS, 0)
        taught = texts.last[:, 1:-1].float() @ output.float().T
        odds = taught[..., head.kept].softmax(-1)
        first = taught.argmax(-1)
        goals = odds + 0.7 * (head.kept == first[..., None]) * is_greedy
        expected = 0.0
        for depth in range(DEPTHS):
            scores = head.lm_head(known[depth])
            own = -(goals * scores.log_softmax(-1)).sum(-1)[:, context - 2 :].mean()
            assert parts[depth] == pytest.approx(own.item(), rel=0.02)
            hit = head.kept[scores.argmax(-1)] == first
            # a choice that is a near tie may be another one in bfloat16
            agreed = hit[:, context - 2 :].float().mean().item()
            assert hits[depth] == pytest.approx(agreed, abs=0.09)
            expected += 0.5**depth * own.item()
    assert total.item() == pytest.approx(expected, rel=0.02)


def test_rows_after_a_miss_count_less(script: ModuleType, target: Any) -> None:
    """With weight 0 a depth learns from the rows alone that a greedy chain comes to."""
    head, tokens = built(target, VOCAB), torch.randint(VOCAB, (3, 12))
    texts = read(target, tokens, 6)
    embedding = target.get_output_embeddings().weight.detach()
    output = (embedding / embedding.norm(dim=-1, keepdim=True)).bfloat16()
    with torch.no_grad():
        known = head.unroll(texts.taps[:, :-2], tokens[:, 1:-1], DEPTHS, 0)
        scores = [head.lm_head(rows)[:, 4:] for rows in known]
        # what the head finds likeliest at the first depth is the target's choice here and there
        is_same = torch.rand(3, 10) < 0.6
        chosen = torch.where(is_same, head.lm_head(known[0]).argmax(-1), tokens[:, :10])
        last = torch.cat([texts.last[:, :1], 30 * output[chosen], texts.last[:, -1:]], 1)
        texts = replace(texts, last=last)
        taught = (last[:, 5:-1] @ output.T).float()
        seen, alive = [], torch.ones(3, 6)
        for own in scores:
            loss = -(taught.softmax(-1) * own.log_softmax(-1)).sum(-1)
            seen.append(((loss * alive).sum() / alive.sum()).item())
            hit = own.argmax(-1) == chosen[:, 4:]
            alive[:, 1:] = alive[:, :-1].clone() * hit[:, :-1]
            alive[:, 0] = 1
        assert 3 < alive.sum() < 14

    def losses(weight: float) -> list[float]:
        goal = script.Goal(DEPTHS, 1.0, 0.0, weight)
        return script.losses(head, output, texts, goal, False)[1].tolist()

    assert losses(0.0) == pytest.approx(seen, rel=0.03)
    assert losses(1.0) != pytest.approx(seen, rel=0.03)


@torch.no_grad()
def test_coordinates_of_taps_change_what_is_learned_and_no_result(
    script: ModuleType, target: Any
) -> None:
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
    head.fc.fold()
    assert head.fc.basis is None
    torch.testing.assert_close(head.fc(plain), before, rtol=1e-3, atol=1e-3 * before.std())
    for own, other in zip(head.unroll(again.taps.float(), tokens, DEPTHS, 0), known, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-2, atol=1e-2)


def test_what_is_kept_while_a_head_learns_is_its_checkpoint(
    script: ModuleType, target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = read(target, torch.randint(VOCAB, (8, 20)), 4)
    lessons = SimpleNamespace(
        target=target,
        shelves=[texts],
        output=target.get_output_embeddings().weight.detach().bfloat16(),
        begin=lambda head, start: None,
        sizes=lambda head: {},
        greedy=lambda boundaries: {"held out": [texts.rows(torch.tensor([0]))]},
    )
    monkeypatch.setattr(script.Lessons, "find", lambda args: lessons)
    heads = []

    def train(head: Any, *others: Any) -> tuple[int, dict[str, Any]]:
        heads.append(head)
        assert head.fc.basis is not None
        with torch.no_grad():
            head.fc.weight += 0.1 * torch.randn_like(head.fc.weight)
        kept = head.fc.folded().bfloat16()
        others[-1]()
        saved = load_file(tmp_path / "model.safetensors")
        assert saved["fc.weight"].equal(kept)
        # it goes on to learn where it was
        assert head.fc.basis is not None
        return 1, {}

    monkeypatch.setattr(script, "train", train)
    parser = argparse.ArgumentParser()
    script.add_own_options(parser)
    sizes = f"--width {NARROW} --inner 40 --heads {HEADS} --kv-heads {KV_HEADS} --head-dim {SIZE}"
    taps = "--boundaries " + " ".join(map(str, BOUNDARIES))
    args = parser.parse_args([*sizes.split(), *taps.split(), "--out", str(tmp_path)])
    script.make_head(args)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved["fc.weight"].float().equal(heads[0].fc.weight)


@pytest.mark.slow
def test_a_trained_head_drafts_in_an_engine_as_its_walk_says(
    script: ModuleType, target: Any, tmp_path: Path
) -> None:
    torch.manual_seed(11)
    head, prompts = built(target, VOCAB), torch.randint(VOCAB, (8, 4))
    tokens = sys.modules["head_texts"].continue_texts(target, prompts, 20, 0.0)
    texts = read(target, tokens, 4)
    goal = script.Goal(DEPTHS, 1.0, 1.0, 1.0)
    output = target.get_output_embeddings().weight.detach().bfloat16()
    schedule = sys.modules["pair_parts"].Schedule(40, 1e6, warmup=1)
    course = script.Course(schedule, (0.02, 4e-3), [1.0], 0)
    before = script.losses(head, output, texts, goal, True)[0].item()
    steps, _ = script.train(head, output, [texts], goal, course, 200)
    assert steps == 40
    assert script.losses(head, output, texts, goal, True)[0].item() < 0.7 * before

    script.save_head(head, BOUNDARIES, tmp_path / "head")
    sys.modules["head_files"].round_weights(head)
    exact = sys.modules["head_texts"].read_texts(target, tokens, BOUNDARIES, 4, torch.float32)
    walked = script.walk(head, [exact.rows(torch.tensor([row])) for row in range(8)], DEPTHS)
    assert walked["acceptance_length"] > 1.2
    check_walk(target, tmp_path / "head", prompts, tokens[:, 4:], walked, tmp_path)
