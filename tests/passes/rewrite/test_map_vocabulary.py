"""A draft of other tokens reads its own ids, and its logits stand at the target's.

One of the same tokens, and of another size, proposes ids that the target has, and reads ids that it
lacks without failing.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from specc.passes.frontend.trace import trace
from specc.passes.pipeline import PHASES, Pipeline
from specc.passes.proof.verify_graph import verify_graph
from specc.passes.rewrite.map_vocabulary import FitVocabulary, MapVocabulary, fits_target
from specc.speculation.vocabulary_map import VocabularyMap
from tests.passes.modules import (
    TOLERANCE,
    VOCAB,
    Tiny,
    aten,
    compiled,
    dense_logits,
    program_logits,
    random_tokens,
)

# ids 2 and 5 of six mean nothing to the draft, 0 and 4 have two and three of its ids
MAP = VocabularyMap(
    {0: 7, 1: 3, 2: 1, 3: 9, 4: 12, 5: 1},
    {0: (7, 2), 1: (3,), 3: (9,), 4: (12, 5, 11)},
    num_target=6,
    num_unread=2,
    unknown=4,
)
NUM_IDS = 8  # of which two are padding


def test_logits_stand_at_the_ids_of_the_target():
    torch.manual_seed(0)
    model = Tiny().eval()
    program = compiled(model)[0]
    result = MapVocabulary(MAP, NUM_IDS).run(program)
    assert (result.rewrites, result.declined) == (2, [])
    verify_graph(program, "vocabulary", is_final=True)
    assert program.vocab_size == NUM_IDS
    tokens = torch.tensor([0, 1, 2, 3, 4, 5, 7, 6])
    found = program_logits(program, model, tokens)
    own = dense_logits(model, torch.tensor([7, 3, 1, 9, 12, 1, 4, 4]))
    assert own.shape == (8, VOCAB)
    wanted = torch.full((8, NUM_IDS), -torch.inf)
    for index, ids in MAP.from_draft.items():
        wanted[:, index] = own[:, list(ids)].amax(dim=1)
    torch.testing.assert_close(found, wanted, **TOLERANCE)
    # of several ids of one token, not always the same one is the largest
    for ids in ((7, 2), (12, 5, 11)):
        assert len(set(own[:, list(ids)].argmax(dim=1).tolist())) == len(ids)


class Flattened(torch.nn.Module):
    """Reads the number of tokens off an input before it embeds them."""

    def __init__(self, num_ids=13):
        super().__init__()
        self.token, self.place = torch.nn.Embedding(num_ids, 32), torch.nn.Embedding(64, 32)
        self.q, self.out = torch.nn.Linear(32, 32), torch.nn.Linear(32, num_ids)

    def forward(self, input_ids, position_ids):
        x = self.token(input_ids) + self.place(position_ids)
        heads = self.q(x).view(1, -1, 2, 16).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return self.out(x + mixed.transpose(1, 2).reshape(1, -1, 32))


def test_ids_are_looked_up_before_their_first_use():
    program = compiled(Flattened().eval())[0]
    MapVocabulary(MAP, NUM_IDS).run(program)
    program.graph.lint()
    (looked_up,) = program.calls(torch.ops.aten.index.Tensor)
    assert list(program.placeholder("tokens").users) == [looked_up]


@pytest.mark.parametrize(("vocabulary", "kind"), [(None, FitVocabulary), (MAP, MapVocabulary)])
def test_drafts_of_the_same_tokens_go_the_way_of_before(vocabulary, kind):
    assert type(fits_target(vocabulary, NUM_IDS)) is kind


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


def test_ids_are_clamped_before_their_first_use():
    program = trace(Flattened(40).eval(), "draft_0")
    layout = (*PHASES, ("vocabulary", (lambda: FitVocabulary(50),)))
    Pipeline(layout).run(program)
    program.graph.lint()
    (clamp,) = program.calls(torch.ops.aten.clamp.default)
    assert list(program.placeholder("tokens").users) == [clamp]
