"""Places in a padded pass read the positions of each sequence, or the model is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from specc.errors import UnsupportedGraphError
from specc.passes.frontend.trace_padded import trace_padded
from specc.passes.program import Program
from specc.passes.rewrite.normalize import Normalize
from specc.passes.rewrite.read_padded_places import ReadPaddedPlaces

VOCAB, WIDTH = 13, 6
TOKENS = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]])
# a beginning, and a later part of another sequence
POSITIONS = torch.tensor([[0, 1, 2, 3], [40, 41, 41, 42]])


class Scaled(nn.Module):
    """Rows that are scaled by how far the sequence has come, as queries of Llama 4 are."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def factors(self, places: Tensor) -> Tensor:
        return torch.log1p(torch.floor((places + 1.0) / 3)) * 0.5 + 1.0

    def scale(self, x: Tensor, factors: Tensor) -> Tensor:
        """Factors [N], or [B, N] of positions, of x [B, N, WIDTH]."""
        return x * factors.view(*factors.shape[:-1] or (1,), -1, 1)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids) + position_ids[..., None].float() * 0
        places = torch.arange(x.shape[1]) + 0
        return self.head(self.scale(x, self.factors(places.to(torch.float32))))

    def wanted(self) -> Tensor:
        x = self.embedding(TOKENS)
        return self.head(self.scale(x, self.factors(POSITIONS.float())))


class Expanded(Scaled):
    """Expanded to the batch first, as transformers writes it."""

    def scale(self, x: Tensor, factors: Tensor) -> Tensor:
        factors = factors.view(*factors.shape[:-1] or (1,), -1, 1)
        return x * factors.expand(x.shape[0], x.shape[1], 1)


class OfHeads(Scaled):
    """With a dimension of one before the tokens', and arithmetic after it."""

    def scale(self, x: Tensor, factors: Tensor) -> Tensor:
        factors = factors.view(*factors.shape[:-1] or (1,), 1, -1, 1) * 2.0
        heads = x.unflatten(-1, (2, 3)).transpose(1, 2)
        return (heads * factors).transpose(1, 2).flatten(2)


def made(model: nn.Module) -> tuple[Program, int]:
    """Its program, and what the pass rewrote."""
    program = trace_padded(model.eval(), "target")
    Normalize().run(program)
    return program, ReadPaddedPlaces().run(program).rewrites


def logits(program: Program, model: nn.Module) -> Tensor:
    given = {"tokens": TOKENS, "positions": POSITIONS, "write_index": torch.zeros(2).long()}
    given["logit_rows"] = torch.arange(8)
    parameters = dict(model.named_parameters())
    values = [
        given[node.target]
        if node.target in given
        else parameters[program.weights[node.target].parameters[0]]
        for node in program.graph.find_nodes(op="placeholder")
    ]
    found = fx.Interpreter(fx.GraphModule(nn.Module(), program.graph)).run(*values)
    return found[0] if isinstance(found, tuple | list) else found


@pytest.mark.parametrize("kind", [Scaled, Expanded, OfHeads])
def test_each_sequence_has_its_positions(kind: type[Scaled]) -> None:
    torch.manual_seed(0)
    model = kind()
    program, count = made(model)
    assert count == 1
    found = logits(program, model).reshape(2, 4, VOCAB)
    torch.testing.assert_close(found, model.wanted(), rtol=1e-6, atol=1e-6)


class Broadcast(Scaled):
    """From the right: over the tokens of whatever has no batch."""

    def scale(self, x: Tensor, factors: Tensor) -> Tensor:
        return (x.transpose(1, 2) * factors).transpose(1, 2)


class Summed(Scaled):
    def factors(self, places: Tensor) -> Tensor:
        return places.cumsum(0)


class Turned(Scaled):
    def scale(self, x: Tensor, factors: Tensor) -> Tensor:
        return x * factors.view(-1, 1)


@pytest.mark.parametrize(
    ("kind", "what"), [(Broadcast, "from the right"), (Summed, "cumsum"), (Turned, "view")]
)
def test_other_uses_are_refused(kind: type[Scaled], what: str) -> None:
    with pytest.raises(UnsupportedGraphError, match=what) as caught:
        made(kind())
    assert "places of tokens" in caught.value.found


class OfColumns(Scaled):
    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids) + position_ids[..., None].float() * 0
        return self.head(x * torch.arange(WIDTH).float())


def test_counts_of_columns_stay() -> None:
    assert made(OfColumns())[1] == 0
