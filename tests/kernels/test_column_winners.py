"""`specc::column_winners` of all parts of a vocabulary decides as `node_winners` of the whole."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specc.kernels.reference.accept import column_winners_reference, node_winners_reference
from specc.kernels.reference.ranks import LockstepGroup
from tests.kernels.sampling_cases import int32

pytestmark = pytest.mark.usefixtures("poisoned_memory")

NAN = float("nan")


@dataclass(frozen=True)
class Rows:
    """Rows of logits, each of a request of its own, whose vocabulary is cut.

    Few different values make ties, within a part and between parts.
    """

    seed: int
    num_rows: int
    num_columns: int  # of a part
    num_parts: int
    num_padding: int  # columns of the last part that no token has
    dtype: torch.dtype
    ties: bool

    @property
    def vocab(self) -> int:
        return self.num_columns * self.num_parts - self.num_padding

    def make(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Logits [R, V], temperature, seeds and positions [R]."""
        random = torch.Generator().manual_seed(self.seed)
        logits = torch.randn(self.num_rows, self.vocab, generator=random)
        if self.ties:
            logits = logits.round()
            logits[:, torch.randint(0, self.vocab, (2,), generator=random)] = -torch.inf
        choices = torch.tensor([0.0, 0.9e-5, 0.3, 1.0, 2.5])
        temperature = choices[torch.randint(0, 5, (self.num_rows,), generator=random)]
        seeds = torch.randint(-(1 << 62), 1 << 62, (self.num_rows,), generator=random)
        positions = torch.randint(1, 1 << 20, (self.num_rows,), generator=random)
        return logits.to(self.dtype), temperature, seeds, positions

    def parts(self, logits: Tensor) -> list[Tensor]:
        """[R, C] of each part, in wider rows; padding would win."""
        padded = torch.nn.functional.pad(logits, (0, self.num_padding), value=1e9)
        parts = []
        for part in padded.split(self.num_columns, dim=1):
            wide = torch.full((len(part), part.shape[1] + 3), NAN, dtype=part.dtype)
            wide[:, 1:-2] = part
            parts.append(wide[:, 1:-2])
        return parts


@st.composite
def rows(draw) -> Rows:
    # 512 tokens share counters of noise
    columns = draw(st.sampled_from([1, 2, 5, 31, 64, 130, 512, 700]))
    return Rows(
        draw(st.integers(0, 1 << 20)),
        draw(st.integers(0, 4)),
        columns,
        draw(st.integers(1, 5)),
        draw(st.integers(0, columns - 1)),
        draw(st.sampled_from([torch.float32, torch.bfloat16])),
        draw(st.booleans()),
    )


def winners_of_parts(column_winners, case: Rows, given_: tuple[Tensor, ...]) -> Tensor:
    logits, *draws = given_
    found = [
        column_winners(part, *draws, i * case.num_columns, case.vocab)
        for i, part in enumerate(case.parts(logits))
    ]
    scores, tokens = [list(values) for values in zip(*found, strict=True)]
    return LockstepGroup(case.num_parts).best_of_ranks(scores, tokens)[0]


def winners_of_whole(given_: tuple[Tensor, ...]) -> Tensor:
    logits, temperature, seeds, positions = given_
    count = len(logits)
    values = torch.tensor([[0.0, 1, 0, 1, 0, 0]]).repeat(count, 1)
    values[:, 0] = temperature
    words = torch.zeros(count, 4, dtype=torch.int64)
    words[:, 0] = seeds
    roots = torch.zeros(count, 1, dtype=torch.int64)
    parents = torch.full((count, 1), -1, dtype=torch.int32)
    return node_winners_reference(
        logits, roots, parents, 0, values, words, (positions - 1).int(),
        int32([0]), torch.zeros(count, 1, dtype=torch.int32),
    )  # fmt: skip


@settings(max_examples=150, deadline=None, derandomize=True)
@given(rows())
def test_parts_decide_what_the_whole_does(case):
    given_ = case.make()
    found = winners_of_parts(column_winners_reference, case, given_)
    assert torch.equal(found, winners_of_whole(given_))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(rows(), st.integers(0, 2000))
def test_native(operators, case, first):
    """Tokens exactly, and scores to the last bit, wherever the first column lies."""
    logits, *draws = case.make()
    for part in case.parts(logits):
        for vocab_size in (1 << 20, first + 1, max(first, 1)):
            wanted = column_winners_reference(part, *draws, first, vocab_size)
            found = operators.column_winners(part, *draws, first, vocab_size)
            assert torch.equal(found[1], wanted[1])
            assert torch.equal(found[0].view(torch.int32), wanted[0].view(torch.int32))


def test_nan_wins(operators):
    logits = torch.tensor([[0.0, NAN, 7.0, NAN]])
    draws = torch.zeros(1), torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    for column_winners in (column_winners_reference, operators.column_winners):
        score, token = column_winners(logits, *draws, 8, 100)
        assert score.isnan().all()
        assert token.tolist() == [9]


def test_parts_of_noise_differ():
    """Each part has the noise of its own tokens: the same logits win elsewhere."""
    logits = torch.zeros(1, 512)
    draws = torch.ones(1), torch.tensor([3]), torch.tensor([5])
    found = {
        int(column_winners_reference(logits, *draws, 512 * i, 1 << 20)[1]) % 512 for i in range(6)
    }
    assert len(found) > 3
