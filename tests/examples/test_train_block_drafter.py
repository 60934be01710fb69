"""The example that trains a block drafter: what it trains is what engines run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specc.passes.drafters.head_spec import EMBEDDING, HEAD, TargetFacts
from specc.passes.drafters.recognise import recognise
from tests.block_heads import MASK, BlockCase
from tests.block_reference import BlockReference
from tests.examples.head_examples import check_walk, imported, tiny_target
from tests.heads import HEADS, KV_HEADS, LAYERS, VOCAB, WIDTH

BOUNDARIES, SIZE, RANK, HEAD_DIM = (2, 4, 5), 4, 5, 8
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
def script() -> Iterator[ModuleType]:
    with imported("train_block_drafter") as module:
        yield module


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_target()


def built(script: ModuleType, target: Any) -> Any:
    """A drafter of which no part goes unnoticed."""
    torch.manual_seed(3)
    sizes = {"inner": 40, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    drafter = script.build_drafter(
        target,
        len(BOUNDARIES),
        num_layers=2,
        **sizes,
        trained_length=64,
        block_size=SIZE,
        mask_token_id=MASK,
        rank=RANK,
    )
    with torch.no_grad():
        for name, value in drafter.named_parameters():
            drawn = 1 + 0.4 * torch.randn_like(value) if value.ndim == 1 else value
            drawn = 0.5 * torch.randn_like(value) if "markov" in name else drawn
            # as it is saved
            value.copy_(drawn.bfloat16().float())
    return drafter


def read(tokens: Tensor, target: Any, context: int, dtype: torch.dtype = torch.float32) -> Any:
    return sys.modules["head_texts"].read_texts(target, tokens, BOUNDARIES, context, dtype)


@torch.no_grad()
def test_rows_of_a_checkpoint_are_what_a_step_computes(
    script: ModuleType, target: Any, tmp_path: Path
) -> None:
    drafter, tokens = built(script, target), torch.randint(VOCAB, (2, 11))
    texts, anchors = read(tokens, target, 4), torch.tensor([[1, 5, 7], [2, 3, 6]])
    script.save_drafter(drafter, BOUNDARIES, LAYERS, tmp_path)
    spec: Any = recognise(tmp_path, TargetFacts("target", WIDTH, LAYERS, VOCAB))
    assert (spec.kind, spec.layout, spec.boundaries) == ("dspark", "DeepSpec", BOUNDARIES)
    assert (spec.shared, spec.warnings) == ((EMBEDDING, HEAD), ())
    assert (spec.block.size, spec.block.from_anchor, spec.rank) == (SIZE, True, RANK)
    tensors = {key: x.float() for key, x in load_file(tmp_path / "model.safetensors").items()}
    ends = [target.get_input_embeddings().weight] * 2
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
def test_loss_is_the_divergence_by_its_formula(
    script: ModuleType, target: Any, is_greedy: bool
) -> None:
    drafter, tokens = built(script, target), torch.randint(VOCAB, (3, 14))
    texts = read(tokens, target, 6, torch.bfloat16)
    anchors = script.draw_anchors(texts, SIZE, 5, torch.Generator().manual_seed(1))
    assert (anchors.min(), anchors.max()) == (6, 10)
    output = target.get_output_embeddings().weight.detach().bfloat16()

    def losses(missed_weight: float) -> Any:
        goal = script.Goal(5, 0.5, 0.7, missed_weight)
        return script.losses(drafter, output, texts, anchors, goal, is_greedy)

    total, parts, hits = losses(1.0)
    rare = losses(0.0)[1]
    with torch.no_grad():
        known, matrix, expected = drafter(texts.taps, tokens, anchors), drafter.head(), 0.0
        alive = torch.ones(3, 5)
        for k in range(SIZE):
            place = anchors + k
            scores = drafter.join(known[:, :, k], tokens.gather(1, place)) @ matrix.T
            last = texts.last.float().gather(1, place[..., None].expand(-1, -1, WIDTH))
            taught = last @ output.float().T
            first = taught.argmax(-1, keepdim=True)
            goals = taught.softmax(-1)
            goals = goals.scatter_add(-1, first, torch.full((3, 5, 1), 0.7 * is_greedy))
            own = -(goals * scores.log_softmax(-1)).sum(-1)
            assert parts[k] == pytest.approx(own.mean().item(), rel=0.02)
            # with weight 0 a row counts where a greedy chain comes to it
            reached = (own * alive).sum() / alive.sum().clamp_min(1e-6)
            assert rare[k] == pytest.approx(reached.item(), rel=0.03)
            hit = scores.argmax(-1) == first[..., 0]
            assert hits[k] == pytest.approx(hit.float().mean().item(), abs=0.07)
            alive = alive * hit
            expected += 0.5**k * own.mean().item()
    assert total.item() == pytest.approx(expected, rel=0.02)


@pytest.mark.slow
def test_a_trained_drafter_drafts_in_an_engine_as_its_walk_says(
    script: ModuleType, target: Any, tmp_path: Path
) -> None:
    torch.manual_seed(11)
    drafter, prompts = built(script, target), torch.randint(VOCAB, (8, 4))
    tokens = sys.modules["head_texts"].continue_texts(target, prompts, 20, 0.0)
    texts, goal = read(tokens, target, 4, torch.bfloat16), script.Goal(8, 1.0, 1.0, 1.0)
    output = target.get_output_embeddings().weight.detach().bfloat16()
    schedule, kept = sys.modules["pair_parts"].Schedule(60, 1e6, warmup=1), []
    course = script.Course(schedule, (0.02, 4e-3), [1.0], 0)
    anchors = script.draw_anchors(texts, SIZE, 8, torch.Generator().manual_seed(1))
    before = script.losses(drafter, output, texts, anchors, goal, True)[0].item()
    steps, _ = script.train(drafter, output, [texts], goal, course, 8, lambda: kept.append(1), 0.0)
    assert (steps, len(kept)) == (60, 60)
    assert script.losses(drafter, output, texts, anchors, goal, True)[0].item() < 0.7 * before

    script.save_drafter(drafter, BOUNDARIES, LAYERS, tmp_path / "drafter")
    sys.modules["head_files"].round_weights(drafter)
    exact = read(tokens, target, 4)
    walked = script.walk(drafter, [exact.rows(torch.tensor([row])) for row in range(8)], 3)
    assert walked["acceptance_length"] > 1.2
    check_walk(target, tmp_path / "drafter", prompts, tokens[:, 4:], walked, tmp_path)
