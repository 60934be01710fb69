"""A draft of other tokens reads its own ids, and its logits stand at the target's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from specc.passes.proof.verify_graph import verify_graph
from specc.passes.rewrite.fit_vocabulary import FitVocabulary
from specc.passes.rewrite.map_vocabulary import MapVocabulary, fits_target
from specc.speculation.vocabulary_map import VocabularyMap
from tests.passes.modules import TOLERANCE, VOCAB, Tiny, compiled, dense_logits, program_logits

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

    def __init__(self):
        super().__init__()
        self.token, self.place = torch.nn.Embedding(13, 32), torch.nn.Embedding(64, 32)
        self.q, self.out = torch.nn.Linear(32, 32), torch.nn.Linear(32, 13)

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
