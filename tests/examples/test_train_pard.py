"""The example that trains PARD models: what it trains is what engines run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from specc.fit.target import Target
from tests import models
from tests.examples.imported import imported
from tests.fitting import read, tiny_target
from tests.heads import VOCAB

DEPTH = 4


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with imported("train_pard") as module:
        yield module


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def built(script: ModuleType) -> tuple[Any, int]:
    model = models.build_model(
        "qwen3", 21, hidden_size=24, intermediate_size=40, head_dim=8, vocab_size=VOCAB,
        tie_word_embeddings=True,
    )  # fmt: skip
    return model.eval(), script.with_mask(model, VOCAB)


def alone(model: Any, mask: int, text: Tensor, anchor: int) -> Tensor:
    """[DEPTH, V] logits after a text that ends with an anchor, and masks."""
    ids = torch.cat([text[: anchor + 1], torch.full((DEPTH - 1,), mask)])
    return model(ids[None], use_cache=False).logits[0, -DEPTH:, :VOCAB]


@torch.no_grad()
def test_masks_see_their_own_text_alone(script: ModuleType) -> None:
    model, mask = built(script)
    assert (mask, model.config.pard_token) == (VOCAB, VOCAB)
    tokens, anchors = torch.randint(VOCAB, (2, 11)), torch.tensor([[1, 5, 5], [6, 2, 0]])
    counts = [3, 2, 2]
    found = script.rows_of_masks(model, mask, tokens, anchors, counts)
    assert [x.shape[1] for x in found] == [11, *counts]
    matrix = model.get_output_embeddings().weight[:VOCAB]
    plain = model(tokens, use_cache=False).logits[..., :VOCAB]
    torch.testing.assert_close(found[0] @ matrix.T, plain, rtol=1e-4, atol=1e-4)
    for row, places in enumerate(anchors.tolist()):
        wanted = [alone(model, mask, tokens[row], anchor) for anchor in places]
        for depth, own in enumerate(found[1:], 1):
            for place in range(own.shape[1]):
                logits = own[row, place] @ matrix.T
                torch.testing.assert_close(logits, wanted[place][depth], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_greedy", [True, False])
def test_loss_is_the_divergence_by_its_formula(
    script: ModuleType, target: Target, is_greedy: bool
) -> None:
    model, mask = built(script)
    texts = read(target, torch.randint(VOCAB, (3, 14)), 6, is_greedy, is_exact=True)
    goal = script.Goal(DEPTH, 5, 0.7, 0.5, 0.5, 0.7, 1.0)
    assert goal.counts() == [4, 2, 2]
    anchors = script.draw_anchors(texts, goal, torch.Generator().manual_seed(1))
    assert anchors.min() >= 5
    assert anchors.max() <= 9
    total, parts, hits = script.losses(model, mask, texts, anchors, goal)
    expected = 0.0
    with torch.no_grad():
        for depth, count in enumerate([None, *goal.counts()]):
            own, agreed = [], []
            for row in range(3):
                places = range(5, 14) if count is None else anchors[row, :count].tolist()
                for place in places:
                    scores = alone(model, mask, texts.tokens[row], place)[depth]
                    ids = texts.ids[row, place + depth].long()
                    odds = texts.odds[row, place + depth].float().clone()
                    odds[0] += 0.7 * is_greedy
                    own.append(-(odds * scores.log_softmax(-1)[ids]).sum())
                    agreed.append(bool(scores.argmax() == ids[0]))
            part = torch.stack(own).mean().item()
            assert parts[depth] == pytest.approx(part, rel=0.03)
            assert hits[depth] == pytest.approx(sum(agreed) / len(agreed), abs=0.15)
            expected += 0.5**depth * part
    assert total.item() == pytest.approx(expected, rel=0.03)


@pytest.mark.slow
def test_a_model_is_made(script: ModuleType, tmp_path: Path) -> None:
    """Of the demo pair, by its command line; what comes out is read as a PARD model."""
    from specc.passes.drafters.registry import drafter_of_config
    from specc.passes.frontend.hf_model import load_config

    text = tmp_path / "text.txt"
    text.write_text("def f(x):\n    return x + 1\n\n" * 200, encoding="utf-8")
    args = ["--texts", str(text), "--out", str(tmp_path / "pard"), "--write", "400"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["train_pard.py", *args, "--read", "400", "--steps", "2"])
        script.main()
    found = drafter_of_config(load_config(tmp_path / "pard"), "pard")
    assert found is not None
    assert found.describe().endswith("mask token 2048")
