"""Models that take rows beside tokens and positions, and hand one on beside their logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from specc.errors import UnsupportedGraphError
from specc.passes.frontend.trace import trace
from specc.passes.pipeline import Pipeline
from specc.passes.program import RUNTIME_INPUTS, RowInput
from specc.passes.program_json import program_to_json
from specc.passes.rewrite.map_vocabulary import FitVocabulary
from tests.passes.modules import TOLERANCE, Tiny, aten, flat_logits, random_tokens

ROWS = (RowInput("memo", 6, torch.float32), RowInput("is_new", 1, torch.bool))
WIDE = 17


class Recurrent(Tiny):
    """Reads what a row was given, and hands its own sum on; logits are those of other ids."""

    def __init__(self):
        super().__init__()
        self.take = nn.Linear(6, self.width)
        self.register_buffer("places", torch.tensor([13] * 4 + list(range(13))), persistent=False)

    def hand_on(self, x):
        return x

    def forward(self, input_ids, position_ids, memo, is_new):
        x = self.embed(input_ids, position_ids)
        x = torch.where(is_new, self.take(memo), x)
        attended = self.attend(*self.operands(x), position_ids)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        logits = F.pad(self.head(x), (0, 1), value=float("-inf"))
        return self.hand_on(x), logits.index_select(-1, self.places)


class Mixing(Recurrent):
    def hand_on(self, x):
        return x.cumsum(1)


class Constant(Recurrent):
    def hand_on(self, x):
        return self.take.weight.unsqueeze(0)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    return Recurrent().eval()


@pytest.fixture(scope="module")
def program(model):
    program = trace(model, "draft_0", rows=ROWS, hands_on=True)
    Pipeline().run(program)
    return program


def test_rows_are_inputs_of_the_runtime(program):
    assert program.runtime_inputs == (*RUNTIME_INPUTS, "memo", "is_new")
    entries = {entry["name"]: entry for entry in program_to_json(program)["inputs"]}
    assert entries["memo"] == {
        "name": "memo", "kind": "input", "dtype": "float32", "shape": [None, 6],
    }  # fmt: skip
    assert (entries["is_new"]["dtype"], entries["is_new"]["shape"]) == ("bool", [None, 1])


def test_logits_and_what_is_handed_on(program, model):
    tokens, generator = random_tokens(), torch.Generator().manual_seed(4)
    memo = torch.randn(9, 6, generator=generator)
    is_new = torch.randint(0, 2, (9, 1), generator=generator).bool()
    positions, rows = torch.arange(9), [8, 0, 5]
    with torch.no_grad():
        handed_on, logits = model(tokens[None], positions[None], memo[None], is_new[None])
    inputs = {
        "tokens": tokens,
        "positions": positions,
        "q_start": torch.tensor([0, 9], dtype=torch.int32),
        "slot": positions.int(),
        "cache_len": torch.zeros(1, dtype=torch.int32),
        "ancestors": None,
        "block_table": positions.int()[None],
        "logit_rows": torch.tensor(rows),
        "memo": memo,
        "is_new": is_new,
    }
    found = flat_logits(program, model, inputs, 9)
    torch.testing.assert_close(found[0], logits[0, rows], **TOLERANCE)
    torch.testing.assert_close(found[1], handed_on, **TOLERANCE)
    assert program.vocab_size == WIDE
    assert torch.isinf(found[0][:, :4]).all()
    assert torch.isfinite(found[0][:, 4:]).all()


def test_only_rows_that_are_asked_for_are_projected(program):
    head = next(n for n in program.calls(aten.linear.default) if n.meta["val"].shape[-1] == 13)
    rows = program.placeholder("logit_rows").meta["val"].shape[0]
    assert str(head.meta["val"].shape[-2]) == str(rows)
    assert tuple(map(str, program.logits.meta["val"].shape)) == (str(rows), str(WIDE))


def test_copies_and_other_vocabularies_keep_what_is_handed_on(program):
    copied = program.copy("draft_1")
    FitVocabulary(15).run(copied)
    assert copied.row_inputs == program.row_inputs
    assert (copied.vocab_size, program.vocab_size) == (15, WIDE)
    assert copied.handed_on.name == program.handed_on.name
    assert copied.handed_on.graph is copied.graph


@pytest.mark.parametrize(
    ("kind", "reason"), [(Mixing, "cumsum"), (Constant, "no row for each token")]
)
def test_what_is_handed_on_keeps_tokens_apart(kind, reason):
    program = trace(kind().eval(), "draft_0", rows=ROWS, hands_on=True)
    with pytest.raises(UnsupportedGraphError, match=reason):
        Pipeline().run(program)
