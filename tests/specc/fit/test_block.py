"""Block drafters that are fitted: what is trained is what engines run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specc.fit.chains import Chains
from specc.fit.drafters.block import BlockFitter, Goal, draw_anchors, hits, losses
from specc.fit.drafters.block_drafter import BlockDrafter, build_drafter, save_drafter
from specc.fit.drafters.fitter import LayerShape
from specc.fit.optimizer import Schedule
from specc.fit.target import Target
from specc.fit.texts import TextStore
from specc.fit.trainer import TrainerConfig, train
from specc.passes.drafters.head_spec import EMBEDDING, HEAD, TargetFacts
from specc.passes.drafters.recognise import recognise
from tests.block_heads import MASK, BlockCase
from tests.block_reference import BlockReference
from tests.fitting import BOUNDARIES, check_walk, read, tiny_target, written
from tests.heads import HEADS, KV_HEADS, LAYERS, VOCAB, WIDTH

SIZE, RANK, HEAD_DIM = 4, 5, 8
CASE = BlockCase(
    "DeepSpec",
    size=SIZE,
    boundaries=BOUNDARIES,
    layer={"head_dim": HEAD_DIM, "rope_parameters": {"rope_theta": 10000.0}},
    from_anchor=True,
    kind="dspark",
    rank=RANK,
)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def built(target: Target) -> BlockDrafter:
    """A drafter of which no part goes unnoticed."""
    torch.manual_seed(3)
    shape = LayerShape(WIDTH, 40, HEADS, KV_HEADS, HEAD_DIM)
    drafter = build_drafter(target.sizes, len(BOUNDARIES), 2, shape, 64, SIZE, MASK, RANK)
    with torch.no_grad():
        for name, value in drafter.named_parameters():
            drawn = 1 + 0.4 * torch.randn_like(value) if value.ndim == 1 else value
            drawn = torch.randn_like(value) if "markov" in name else drawn
            # as it is saved
            value.copy_(drawn.bfloat16().float())
    return drafter


@torch.no_grad()
def test_rows_of_a_checkpoint_are_what_a_step_computes(target: Target, tmp_path: Path) -> None:
    drafter, tokens = built(target), torch.randint(VOCAB, (2, 11))
    texts = read(target, tokens, 4, is_exact=True)
    anchors = torch.tensor([[1, 5, 7], [2, 3, 6]])
    save_drafter(drafter, BOUNDARIES, LAYERS, tmp_path)
    spec: Any = recognise(tmp_path, TargetFacts("target", WIDTH, LAYERS, VOCAB))
    assert (spec.kind, spec.layout, spec.boundaries) == ("dspark", "DeepSpec", BOUNDARIES)
    assert (spec.shared, spec.warnings) == ((EMBEDDING, HEAD), ())
    assert (spec.block.size, spec.block.from_anchor, spec.rank) == (SIZE, True, RANK)
    tensors = {key: x.float() for key, x in load_file(tmp_path / "model.safetensors").items()}
    ends = [target.sizes.embedding] * 2
    reference = BlockReference(CASE, tensors, *ends)
    known, matrix = drafter(texts.taps, tokens, anchors), drafter.head()
    for row, taps in enumerate(texts.taps):
        for place, anchor in enumerate(anchors[row].tolist()):
            own = tokens[row, anchor : anchor + SIZE]
            found = drafter.join(known[row, place], own) @ matrix.T
            for k in range(SIZE):
                path = own[1 : k + 1].tolist()
                wanted = reference.after(taps[:anchor], int(own[0]), path)
                torch.testing.assert_close(found[k], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_greedy", [True, False])
def test_loss_is_the_divergence_by_its_formula(target: Target, is_greedy: bool) -> None:
    drafter, tokens = built(target), torch.randint(VOCAB, (3, 14))
    texts = read(target, tokens, 6, is_greedy)
    anchors = draw_anchors(texts, SIZE, 40, torch.Generator().manual_seed(1))
    assert sorted(set(anchors.flatten().tolist())) == [6, 7, 8, 9, 10]
    anchors = anchors[:, :5]

    def compared(missed_weight: float) -> Any:
        return losses(drafter, texts, anchors, Goal(5, 0.5, 0.7, missed_weight))

    total, parts, agreed = compared(1.0)
    rare = compared(0.0)[1]
    with torch.no_grad():
        known, matrix, expected = drafter(texts.taps, tokens, anchors), drafter.head(), 0.0
        alive = torch.ones(3, 5)
        for k in range(SIZE):
            place = anchors + k
            scores = drafter.join(known[:, :, k], tokens.gather(1, place)) @ matrix.T
            among = place[..., None].expand(-1, -1, texts.ids.shape[-1])
            ids, odds = texts.ids.gather(1, among).long(), texts.odds.gather(1, among).float()
            first = ids[..., :1]
            goals = torch.zeros(3, 5, VOCAB).scatter_(-1, ids, odds)
            goals = goals.scatter_add(-1, first, torch.full((3, 5, 1), 0.7 * is_greedy))
            own = -(goals * scores.log_softmax(-1)).sum(-1)
            assert parts[k] == pytest.approx(own.mean().item(), rel=0.02)
            # with weight 0 a row counts where a greedy chain comes to it
            reached = (own * alive).sum() / alive.sum().clamp_min(1e-6)
            assert rare[k] == pytest.approx(reached.item(), rel=0.03)
            hit = scores.argmax(-1) == first[..., 0]
            assert agreed[k] == pytest.approx(hit.float().mean().item(), abs=0.07)
            alive = alive * hit
            expected += 0.5**k * own.mean().item()
    assert total.item() == pytest.approx(expected, rel=0.02)


def test_blocks_of_short_rows_end_where_the_row_does(target: Target) -> None:
    """Rows that are shorter than a block teach what they have."""
    drafter, tokens = built(target), torch.randint(VOCAB, (2, 12))
    begins, ends = torch.tensor([4, 5]), torch.tensor([12, 7])
    texts = target.read(tokens, BOUNDARIES, begins, ends, False)
    anchors = draw_anchors(texts, SIZE, 6, torch.Generator().manual_seed(2))
    assert anchors[1].tolist() == [5] * 6
    parts = losses(drafter, texts, anchors, Goal())[1]
    others = tokens.clone()
    others[1, 7:] = 9
    again = losses(drafter, target.read(others, BOUNDARIES, begins, ends, False), anchors, Goal())
    torch.testing.assert_close(again[1], parts)


@pytest.mark.slow
def test_a_trained_drafter_drafts_in_an_engine_as_its_walk_says(
    target: Target, tmp_path: Path
) -> None:
    torch.manual_seed(11)
    drafter, prompts = built(target), torch.randint(VOCAB, (8, 4))
    tokens = written(target, prompts, 20)
    texts, goal = read(target, tokens, 4, is_greedy=True), Goal(8, 1.0, 1.0, 1.0)
    store, fitter = TextStore(tmp_path / "texts"), BlockFitter(SIZE)
    store.add("greedy", texts)
    config = TrainerConfig(Schedule(60, 1e6, warmup=1), (0.02, 4e-3), 200, 0, target.device)
    anchors = draw_anchors(texts, SIZE, 8, torch.Generator().manual_seed(1))
    before = losses(drafter, texts, anchors, goal)[0].item()
    assert train(drafter, lambda *x: fitter.losses(drafter, *x), store, config).steps == 60
    assert losses(drafter, texts, anchors, goal)[0].item() < 0.7 * before

    fitter.end(drafter)
    fitter.save(drafter, target.sizes, BOUNDARIES, tmp_path / "drafter")
    exact, chains = read(target, tokens, 4, is_greedy=True, is_exact=True), Chains(3)
    for number in range(8):
        row = exact.row(number)
        chains.follow(row, hits(drafter, row, 3))
    walked = chains.figures()
    assert walked.acceptance_length > 1.2
    check_walk(target, tmp_path / "drafter", prompts, tokens[:, 4:], walked, tmp_path)
