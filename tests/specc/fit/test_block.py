"""Block drafters that are fitted: what is trained is what engines run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specc.fit.chains import Chains
from specc.fit.drafters.block import (
    BlockFitter,
    Goal,
    candidate_losses,
    draw_anchors,
    hits,
    losses,
)
from specc.fit.drafters.block_drafter import BlockDrafter, build_drafter, save_drafter
from specc.fit.drafters.block_scores import LILICORR, MARGINAL, MARKOV, SELECTOR
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
from tests.lilicorr_reference import LiLiCorrCase

SIZE, RANK, HEAD_DIM, CANDIDATES = 4, 5, 8, 6
CASE = BlockCase(
    "DeepSpec",
    size=SIZE,
    boundaries=BOUNDARIES,
    layer={"head_dim": HEAD_DIM, "rope_parameters": {"rope_theta": 10000.0}},
    from_anchor=True,
    kind="dspark",
    rank=RANK,
)
# drafters whose masks propose a token each
_MASKED = replace(CASE, layout="z-lab", from_anchor=False, kind="dflash", rank=0)
CASES = {
    MARKOV: CASE,
    "markov, of masks": replace(CASE, from_anchor=False),
    MARGINAL: _MASKED,
    "marginal, causal": replace(_MASKED, is_causal=True),
    SELECTOR: replace(
        _MASKED,
        kind="dflash2",
        rank=RANK,
        bias_kind="selector",
        candidates=CANDIDATES,
        conv=(2, 16),
    ),
    LILICORR: replace(
        _MASKED, kind="lilicorr", lilicorr=LiLiCorrCase(64, 2, 4, 2.0, RANK, CANDIDATES, 10.0)
    ),
}


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def built(
    target: Target, score: str = MARKOV, from_anchor: bool = True, is_causal: bool = False
) -> BlockDrafter:
    """A drafter of which no part goes unnoticed."""
    others: dict[str, Any] = {"score": score, "from_anchor": from_anchor}
    others |= {"candidates": CANDIDATES, "is_causal": is_causal}
    torch.manual_seed(3)
    shape = LayerShape(WIDTH, 40, HEADS, KV_HEADS, HEAD_DIM)
    drafter = build_drafter(target.sizes, len(BOUNDARIES), 2, shape, 64, SIZE, MASK, RANK, **others)
    with torch.no_grad():
        for name, value in drafter.named_parameters():
            drawn = 1 + 0.4 * torch.randn_like(value) if value.ndim == 1 else value
            is_zero = any(part in name for part in ("markov", "codebook", "kernel", "slot"))
            drawn = torch.randn_like(value) if is_zero else drawn
            # as it is saved
            value.copy_(drawn.bfloat16().float())
    return drafter


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_rows_of_a_checkpoint_are_what_a_step_computes(
    target: Target, tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    drafter = built(target, name.partition(",")[0], case.from_anchor, case.is_causal)
    tokens = torch.randint(VOCAB, (2, 11))
    texts = read(target, tokens, 4, is_exact=True)
    anchors = torch.tensor([[1, 5, 7], [2, 3, 6]])
    save_drafter(drafter, BOUNDARIES, LAYERS, tmp_path)
    spec: Any = recognise(tmp_path, TargetFacts("target", WIDTH, LAYERS, VOCAB))
    layout = "z-lab" if case.layout == "z-lab" else "DeepSpec"
    assert (spec.kind, spec.layout, spec.boundaries) == (case.kind, layout, BOUNDARIES)
    assert (spec.shared, spec.warnings) == ((EMBEDDING, HEAD), ())
    assert (spec.block.size, spec.block.from_anchor) == (SIZE, case.from_anchor)
    assert (spec.rank, spec.block.is_causal) == (case.rank, case.is_causal)
    tensors = {key: x.float() for key, x in load_file(tmp_path / "model.safetensors").items()}
    ends = [target.sizes.embedding] * 2
    reference = BlockReference(case, tensors, *ends)
    known = drafter(texts.taps, tokens, anchors)
    compared = 0
    for row, taps in enumerate(texts.taps):
        for place, anchor in enumerate(anchors[row].tolist()):
            own = tokens[row, anchor : anchor + drafter.num_proposed]
            rows = known[row, place]
            if drafter.candidates:
                # what LiLiCorr says comes after candidates alone
                chosen, _ = drafter.best(rows, is_exact=True)
                own = torch.cat([own[:1], chosen[:-1, 2]]) if name == LILICORR else own
            found = logits_of(drafter, rows, own, taps[anchor - 1])
            for k in range(drafter.num_proposed):
                path = own[1 : k + 1].tolist()
                wanted = reference.after(taps[:anchor], int(own[0]), path)
                torch.testing.assert_close(found[k], wanted, rtol=1e-4, atol=1e-4)
                compared += 1
    assert compared == 6 * drafter.num_proposed


def logits_of(drafter: BlockDrafter, known: Tensor, previous: Tensor, tap: Tensor) -> Tensor:
    """[P, V] of the rows of a block."""
    if not drafter.candidates:
        return drafter.join(known, previous) @ drafter.head().T
    chosen, sums = drafter.best(known[None], is_exact=True)
    context = drafter.context(tap[None])
    logits, there = drafter.among(known[None], previous[None], chosen, sums, context)
    assert there.all()
    found = torch.full((len(known), drafter.config.vocab_size), -torch.inf)
    return found.scatter(1, chosen[0], logits[0])


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


@pytest.mark.parametrize("score", [SELECTOR, LILICORR])
def test_scores_of_candidates_learn_what_is_likely_among_them(target: Target, score: str) -> None:
    drafter, tokens = built(target, score, from_anchor=False), torch.randint(VOCAB, (2, 14))
    texts, goal = read(target, tokens, 6, is_greedy=True), Goal(3, 0.5, 0.7, 0.25)
    anchors = torch.tensor([[6, 8, 11], [7, 9, 10]])
    with torch.no_grad():
        known = drafter(texts.taps, tokens, anchors)
        total, agreed = candidate_losses(drafter, known, texts, anchors, goal)
        expected, missing = 0.0, 0
        weights, there = torch.ones(2, 3), torch.ones(2, 3)
        for k in range(SIZE - 1):
            nats, hits = torch.zeros(2, 3), torch.zeros(2, 3)
            for row, place in ((r, p) for r in range(2) for p in range(3)):
                rows, anchor = known[row, place], int(anchors[row, place])
                chosen, sums = drafter.best(rows[None])
                first = texts.ids[row, anchor : anchor + SIZE - 1, 0].long()
                for depth in range(SIZE - 1):
                    if first[depth] not in chosen[0, depth]:
                        chosen[0, depth, -1] = first[depth]
                        missing += 1
                own = tokens[row, anchor : anchor + SIZE - 1]
                context = drafter.context(texts.taps[row, anchor - 1][None])
                scores = drafter.among(rows[None], own[None], chosen, sums, context)[0][0, k]
                goals = torch.zeros(VOCAB)
                goals[texts.ids[row, anchor + k].long()] = texts.odds[row, anchor + k].float()
                goals[first[k]] += 0.7
                goals = goals[chosen[0, k]] / goals[chosen[0, k]].sum()
                nats[row, place] = -(goals * scores.log_softmax(0)).sum()
                hits[row, place] = float(chosen[0, k, scores.argmax()] == first[k])
                if k and score == LILICORR:
                    there[row, place] *= float(own[k] in chosen[0, k - 1])
            shares = weights * there
            expected += 0.5**k * float((shares * nats).sum() / shares.sum().clamp_min(1e-6))
            # of products in bfloat16, one of them may go the other way
            assert agreed[k] == pytest.approx(
                float((hits * there).sum() / there.sum().clamp_min(1)), abs=0.2
            )
            weights = torch.where(hits.bool(), weights, 0.25 * torch.ones(()))
        # no step knows the hidden states of an anchor
        taps = texts.taps.clone()
        taps[0, [6, 8, 11]], taps[1, [7, 10]] = 9.0, 9.0
        again, _ = candidate_losses(drafter, known, replace(texts, taps=taps), anchors, goal)
    assert missing
    assert total.item() == pytest.approx(expected, rel=0.03)
    assert again.item() == total.item()


@pytest.mark.parametrize("score", [MARKOV, SELECTOR])
def test_blocks_of_short_rows_end_where_the_row_does(target: Target, score: str) -> None:
    """Rows that are shorter than a block teach what they have."""
    tokens = torch.randint(VOCAB, (2, 12))
    drafter = built(target, score, from_anchor=score == MARKOV)
    begins, ends = torch.tensor([4, 5]), torch.tensor([12, 7])
    texts = target.read(tokens, BOUNDARIES, begins, ends, False)
    anchors = draw_anchors(texts, SIZE, 6, torch.Generator().manual_seed(2))
    assert anchors[1].tolist() == [5] * 6
    found = losses(drafter, texts, anchors, Goal())
    others = tokens.clone()
    others[1, 7:] = 9
    again = losses(drafter, target.read(others, BOUNDARIES, begins, ends, False), anchors, Goal())
    torch.testing.assert_close(again, found)


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
