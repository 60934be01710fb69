"""A position past a table is an index error in the middle of a pass: the graph says how many."""

import pytest
import torch
from torch import nn

from specc.passes.frontend.position_limit import position_limit
from specc.passes.frontend.trace import trace


class Model(nn.Module):
    """Adds what `place` makes of the positions to each token; no attention is needed here."""

    def __init__(self, place):
        super().__init__()
        self.token = nn.Embedding(11, 8)
        self.table = nn.Embedding(40, 8)
        self.other = nn.Embedding(20, 8)
        self.place = place

    def forward(self, input_ids, position_ids):
        return self.token(input_ids) + self.place(self, position_ids)


@pytest.mark.parametrize(
    ("place", "limit"),
    [
        pytest.param(lambda m, p: m.table(p), 40, id="table"),
        pytest.param(lambda m, p: m.table(p + 2), 38, id="offset"),
        pytest.param(lambda m, p: m.table(p) + m.other(p), 20, id="smallest-of-two"),
        pytest.param(lambda m, p: m.table(p.clamp(max=39)), None, id="clamped"),
        pytest.param(lambda m, p: p[..., None].float(), None, id="no-table"),
    ],
)
def test_position_limit(place, limit):
    assert position_limit(trace(Model(place).eval(), "target")) == limit


def test_limit_is_the_last_position_that_runs():
    model = Model(lambda m, p: m.table(p + 2)).eval()
    limit = position_limit(trace(model, "target"))
    model(torch.zeros(1, 1, dtype=torch.int64), torch.tensor([[limit - 1]]))
    with pytest.raises(IndexError):
        model(torch.zeros(1, 1, dtype=torch.int64), torch.tensor([[limit]]))
