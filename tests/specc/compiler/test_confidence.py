"""Confidence heads of block drafters, by which backends and plans read them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from transformers import LlamaConfig

from specc.artifact.backends import facts_of
from specc.compiler.candidate import Candidate
from specc.compiler.heads import with_confidence
from specc.drafters.block import CONFIDENCE_TENSORS, OF_ROW, OF_TOKEN
from specc.drafters.registry import drafters_of
from specc.passes.drafters.block_head import step_weights
from specc.speculation.dynamic_tree import DynamicTree
from specc.speculation.plan_names import MERGE
from specc.speculation.plans import OFF, SpecPlan
from tests.block_heads import BLOCK_CASES, write_block
from tests.heads import LAYERS, VOCAB, WIDTH

SIZES = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "vocab_size": VOCAB}
CHAIN, GIVEN = SpecPlan.from_widths((1, 1, 1)), "draft_1"
TARGET = Candidate("target", "T/", Path("T"), LlamaConfig(**SIZES), "float32")


def test_backends_that_verify_whole_trees_leave_it_out(tmp_path: Path) -> None:
    for name, left in (("dspark-deepspec", 0), ("dspark-specforge", WIDTH)):
        write_block(tmp_path / name, BLOCK_CASES[name])
        given = [TARGET, Candidate.open_draft("draft_0", tmp_path / name, TARGET)]
        for backend in ("cpu", "cuda", "eager"):
            assert with_confidence(given, facts_of(backend), [CHAIN]) == given
        target, draft = with_confidence(given, facts_of("onnx"), [CHAIN])
        assert target is TARGET
        block, before = draft.head.block, given[1].head.block
        assert (before.confidence, before.hidden_columns) == (
            OF_ROW if left else OF_TOKEN, WIDTH,
        )  # fmt: skip
        # what the gate reads stays
        assert (block.confidence, block.hidden_columns) == ("", left)
        assert "the backend onnx verifies whole trees" in draft.head.warnings[-1]
        read = {key for head in (given[1].head, draft.head) for key in _read(head)}
        assert {*CONFIDENCE_TENSORS.values()} <= read
        assert not {*CONFIDENCE_TENSORS.values()} & {*_read(draft.head)}


def test_plans_that_verify_whole_trees_leave_it_out(tmp_path: Path) -> None:
    """Each drafter's own: what no chain and no static tree reads would cost logits alone."""
    write_block(tmp_path, BLOCK_CASES["dspark-deepspec"])
    given = [TARGET, *(Candidate.open_draft(f"draft_{i}", tmp_path, TARGET) for i in range(2))]
    dynamic, other = (
        SpecPlan.from_dynamic(DynamicTree(6, 3, 3)),
        replace(CHAIN, drafters=drafters_of(GIVEN)),
    )
    merged = SpecPlan.from_widths((2, 2), ("draft_0", GIVEN), MERGE)
    found = with_confidence(given, facts_of("eager"), [dynamic, merged, other, OFF])
    assert [bool(x.head and x.head.block.confidence) for x in found] == [False, False, True]
    assert found[1].head.block.hidden_columns == 0
    assert found[1].head.warnings[-1].startswith("its confidence head is not read: of its plans")
    kept = with_confidence(given, facts_of("eager"), [dynamic, CHAIN])
    assert [x.head.block.confidence for x in kept[1:]] == [OF_TOKEN, ""]


def _read(head: object) -> dict[str, object]:
    weights, _ = step_weights(head, torch.float32)  # type: ignore[arg-type]
    return weights
