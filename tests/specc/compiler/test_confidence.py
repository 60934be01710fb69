"""Confidence heads of block drafters, by which backends read them."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig

from specc.artifact.backends import facts_of
from specc.compiler.candidate import Candidate
from specc.compiler.heads import with_confidence
from specc.passes.frontend.heads.block_head import step_weights
from specc.speculation.block_drafts import CONFIDENCE_TENSORS, OF_ROW, OF_TOKEN
from tests.block_heads import BLOCK_CASES, write_block
from tests.heads import LAYERS, VOCAB, WIDTH

SIZES = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "vocab_size": VOCAB}
TARGET = Candidate("target", "T/", Path("T"), LlamaConfig(**SIZES), "float32")


def test_backends_that_verify_whole_trees_leave_it_out(tmp_path: Path) -> None:
    for name, left in (("dspark-deepspec", 0), ("dspark-specforge", WIDTH)):
        write_block(tmp_path / name, BLOCK_CASES[name])
        given = [TARGET, Candidate.open_draft("draft_0", tmp_path / name, TARGET)]
        for backend in ("cpu", "eager"):
            assert with_confidence(given, facts_of(backend)) == given
        target, draft = with_confidence(given, facts_of("cuda"))
        assert target is TARGET
        block, before = draft.head.block, given[1].head.block
        assert (before.confidence, before.hidden_columns) == (
            OF_ROW if left else OF_TOKEN, WIDTH,
        )  # fmt: skip
        # what the gate reads stays
        assert (block.confidence, block.hidden_columns) == ("", left)
        assert "the backend cuda verifies whole trees" in draft.head.warnings[-1]
        read = {key for head in (given[1].head, draft.head) for key in _read(head)}
        assert {*CONFIDENCE_TENSORS.values()} <= read
        assert not {*CONFIDENCE_TENSORS.values()} & {*_read(draft.head)}


def _read(head: object) -> dict[str, object]:
    weights, _ = step_weights(head, torch.float32)  # type: ignore[arg-type]
    return weights
