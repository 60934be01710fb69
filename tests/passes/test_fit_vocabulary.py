"""A draft proposes ids that the target has, and reads ids that it lacks without failing."""

from __future__ import annotations

import pytest
import torch

from specc.passes.fit_vocabulary import FitVocabulary
from tests.passes.modules import (
    TOLERANCE,
    Tiny,
    aten,
    compiled,
    dense_logits,
    program_logits,
    random_tokens,
)


@pytest.fixture
def pair():
    torch.manual_seed(0)
    model = Tiny().eval()
    return model, compiled(model)[0]


def test_larger_draft_is_cut(pair):
    model, program = pair
    result = FitVocabulary(10).run(program)
    assert (result.rewrites, result.declined) == (1, [])
    (output,) = program.graph.find_nodes(op="output")
    assert output.args[0].meta["val"].shape[1] == 10
    tokens = random_tokens()
    got = program_logits(program, model, tokens)
    torch.testing.assert_close(got, dense_logits(model, tokens)[:, :10], **TOLERANCE)


def test_smaller_draft_reads_unknown_ids_as_its_last(pair):
    model, program = pair
    result = FitVocabulary(20).run(program)
    assert (result.rewrites, result.declined) == (1, [])
    program.graph.lint()
    assert len(program.calls(aten.clamp.default)) == 1
    tokens = torch.tensor([3, 19, 12, 13, 0])
    got = program_logits(program, model, tokens)
    torch.testing.assert_close(got, dense_logits(model, tokens.clamp(max=12)), **TOLERANCE)
    assert got.shape[1] == 13


def test_equal_sizes_are_declined(pair):
    model, program = pair
    result = FitVocabulary(13).run(program)
    assert result.rewrites == 0
    assert result.declined[0].reason == "both models have the same number of ids"
    tokens = random_tokens()
    got = program_logits(program, model, tokens)
    torch.testing.assert_close(got, dense_logits(model, tokens), **TOLERANCE)
