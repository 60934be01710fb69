"""A draft proposes ids that the target has, and reads ids that it lacks without failing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from specc.passes.frontend.trace import trace
from specc.passes.pipeline import PHASES, Pipeline
from specc.passes.rewrite.fit_vocabulary import FitVocabulary
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


class Flattened(torch.nn.Module):
    """Reads the number of tokens off an input before it embeds them."""

    def __init__(self, num_ids=40):
        super().__init__()
        self.token, self.place = torch.nn.Embedding(num_ids, 32), torch.nn.Embedding(64, 32)
        self.q, self.out = torch.nn.Linear(32, 32), torch.nn.Linear(32, num_ids)

    def forward(self, input_ids, position_ids):
        x = self.token(input_ids) + self.place(position_ids)
        heads = self.q(x).view(1, -1, 2, 16).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return self.out(x + mixed.transpose(1, 2).reshape(1, -1, 32))


def test_ids_are_clamped_before_their_first_use():
    program = trace(Flattened().eval(), "draft_0")
    layout = (*PHASES, ("vocabulary", (lambda: FitVocabulary(50),)))
    Pipeline(layout).run(program)
    program.graph.lint()
    (clamp,) = program.calls(torch.ops.aten.clamp.default)
    assert list(program.placeholder("tokens").users) == [clamp]
