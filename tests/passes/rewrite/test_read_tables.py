"""Rows of tables are read by `aten.embedding`, however a model writes it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specc.passes.frontend.position_limit import position_limit
from specc.passes.rewrite.normalize import Normalize
from specc.passes.rewrite.read_tables import ReadTables
from tests.passes.modules import Tiny, aten, compiled, dense_logits, program_logits, traced
from tests.passes.modules import random_tokens as draw

POSITIONS = 50


class Indexed(Tiny):
    """As CodeGen has sines and cosines of all positions."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(POSITIONS, self.width), persistent=False)

    def rows(self, positions: Tensor) -> Tensor:
        return self.table[positions]

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.embedding(ids) * self.rows(positions)


class Gathered(Indexed):
    """As GPT-J does: the table once for each sequence, a token's position once for each column."""

    def rows(self, positions):
        wide = positions.unsqueeze(-1).repeat(1, 1, self.width)
        return torch.gather(self.table.repeat(positions.shape[0], 1, 1), 1, wide)


class GatheredByExpand(Indexed):
    def rows(self, positions):
        wide = positions[..., None].expand(-1, -1, self.width)
        return self.table[None].expand(positions.shape[0], -1, -1).gather(1, wide)


@pytest.mark.default("GatheredByExpand")
@pytest.mark.parametrize("kind", [Indexed, Gathered, GatheredByExpand])
def test_rows_are_looked_up_and_the_same(kind):
    torch.manual_seed(0)
    model, tokens = kind(), draw()
    program, _ = traced(model, Normalize(), ReadTables())
    tables = [node.args[0].target for node in program.calls(aten.embedding.default)]
    assert sum(name in program.constants for name in tables) == 1
    assert not program.calls(aten.index.Tensor, aten.gather.default)
    assert position_limit(program) == POSITIONS
    found = program_logits(compiled(model)[0], model, tokens)
    torch.testing.assert_close(found, dense_logits(model, tokens))


class SomeColumns(Indexed):
    """What is read is narrower than the table."""

    def rows(self, positions):
        wide = positions.unsqueeze(-1).repeat(1, 1, self.width // 2)
        half = torch.gather(self.table[None], 1, wide)
        return torch.cat([half, half], -1)


class EachColumn(Indexed):
    def rows(self, positions):
        wide = positions.unsqueeze(-1) + torch.arange(self.width)
        return torch.gather(self.table[None], 1, wide)


class OtherDimension(Indexed):
    """Entries of a row, by token; and the rows of tokens are no table."""

    def rows(self, positions):
        ids = positions.unsqueeze(-1).repeat(1, 1, self.width)
        return torch.gather(self.place(positions), 2, ids % self.width)


class Computed(Indexed):
    def rows(self, positions):
        return (self.table * 2)[positions]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (SomeColumns, "some of the columns"),
        (EachColumn, "differ between columns"),
        (OtherDimension, "another dimension"),
        (Computed, "no table"),
    ],
)
def test_what_is_left_as_it_is(kind, reason):
    program, results = traced(kind(), Normalize(), ReadTables())
    (declined,) = results[1].declined
    assert reason in declined.reason
    assert len(program.calls(aten.index.Tensor, aten.gather.default)) == 1
