"""What a pass starts and ends with becomes one operator each, or stays where something is read."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from specc.kernels import ops
from tests.models import VOCAB, build_model
from tests.passes.modules import assert_runs_alike, reasons
from tests.passes.modules import lower_for_cuda as lower

ENDS = (ops.embed_norm_rope_write, ops.add_norm_head)


def counts(program):
    return tuple(len(program.calls(target)) for target in ENDS)


class Doubled(nn.Module):
    """A last norm whose result is read twice."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        y = self.norm(x)
        return y + 0.5 * y.flip(-1)


class WithBias(nn.Linear):
    """A projection to the vocabulary with a bias."""

    def __init__(self, head):
        super().__init__(head.in_features, head.out_features)
        self.weight = head.weight
        nn.init.normal_(self.bias)


class Scaled(nn.Embedding):
    """An embedding times a number."""

    def forward(self, tokens):
        return super().forward(tokens) * 2.0


@pytest.mark.slow
def test_a_norm_that_the_head_does_not_read_alone_stays():
    model = build_model("llama", num_hidden_layers=1)
    model.model.norm = Doubled(model.model.norm)
    before, after, program, pipeline = lower(model)
    assert counts(program) == (1, 0)
    assert "no rows are chosen of the norm" in reasons(pipeline, "FuseNormHead")
    assert_runs_alike(before, after, VOCAB)


def test_the_bias_of_a_head_is_kept():
    model = build_model("llama", num_hidden_layers=1)
    model.lm_head = WithBias(model.lm_head)
    before, after, program, _ = lower(model)
    assert counts(program) == (1, 1)
    (call,) = program.calls(ops.add_norm_head)
    assert call.args[6].target in program.weights
    assert_runs_alike(before, after, VOCAB)


@pytest.mark.slow
def test_an_embedding_that_is_scaled_stays():
    model = build_model("llama", num_hidden_layers=1)
    scaled = Scaled(VOCAB, 64)
    scaled.weight = model.model.embed_tokens.weight
    model.model.embed_tokens = scaled
    before, after, program, _ = lower(model)
    assert counts(program) == (0, 1)
    assert_runs_alike(before, after, VOCAB)


def test_a_tied_table_is_read_by_both():
    model = build_model("llama", num_hidden_layers=1, tie_word_embeddings=True)
    before, after, program, _ = lower(model)
    assert counts(program) == (1, 1)
    tables = program.calls(ops.embed_norm_rope_write)[0].args[1], program.calls(*ENDS)[1].args[5]
    assert program.weights[tables[0].target].key == program.weights[tables[1].target].key
    assert_runs_alike(before, after, VOCAB)


@pytest.mark.default("qwen2")
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_dtypes_and_biases_are_kept(name):
    model = build_model(name)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    _, _, program, _ = lower(model)
    (first,), (head,) = (program.calls(target) for target in ENDS)
    assert (first.args[6] is not None) == (name == "qwen2")
    assert [value.dtype for value in first.meta["val"]] == [torch.bfloat16] * 2
    assert head.meta["val"].dtype == torch.bfloat16
