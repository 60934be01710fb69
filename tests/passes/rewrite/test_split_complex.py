"""Rotations by complex numbers as products of real ones: the same numbers, or a refusal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specc.errors import UnsupportedGraphError
from specc.passes.pipeline import PHASES, Phases
from specc.passes.rewrite.normalize import Normalize
from specc.passes.rewrite.split_complex import SplitComplex
from tests.passes.modules import Tiny, assert_same_numbers, compiled, rewrites

(_, (_, *_REST)), *_LATER = PHASES
SPLIT: Phases = (("normalize", (Normalize, SplitComplex, *_REST)), *_LATER)


class Rotated(Tiny):
    """Rotates pairs of columns of queries and keys by their position, as Llama 4 does."""

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().operands(x)
        return self.rotate(q, self.positions), self.rotate(k, self.positions), v

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        self.positions = position_ids
        return super().forward(input_ids, position_ids)

    def turns(self, positions: Tensor) -> Tensor:
        """[1, T, 2] complex."""
        angle = positions[..., None].float() * torch.tensor([1.0, 0.3])
        return torch.polar(torch.ones_like(angle), angle)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        turned = pairs * self.turns(positions)[:, None]
        return torch.view_as_real(turned).flatten(3).type_as(x)


class Lengthened(Rotated):
    """Other lengths than 1, and a real factor on either side."""

    def turns(self, positions: Tensor) -> Tensor:
        angle = positions[..., None].float() * torch.tensor([1.0, 0.3])
        return 0.5 * torch.polar(2.0 + angle, angle) * 1.5


class Backwards(Rotated):
    """By the conjugate, and with the pair as the second factor."""

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        turned = self.turns(positions).conj().unsqueeze(1) * pairs
        return torch.view_as_real(turned).flatten(3).type_as(x)


class Scaled(Rotated):
    """By a real tensor that broadcasts."""

    def turns(self, positions: Tensor) -> Tensor:
        return super().turns(positions) * (1.0 + positions.float())[..., None]


@pytest.mark.parametrize("kind", [Rotated, Lengthened, Backwards, Scaled])
def test_the_same_numbers(kind: type[Rotated]) -> None:
    model = kind()
    program, pipeline = compiled(model, SPLIT)
    assert rewrites(pipeline, SplitComplex.__name__) == 2, "queries and keys"
    assert_same_numbers(program, model)


def test_other_programs_stay() -> None:
    model = Tiny()
    program, pipeline = compiled(model, SPLIT)
    assert rewrites(pipeline, SplitComplex.__name__) == 0
    assert_same_numbers(program, model)


class Summed(Rotated):
    def turns(self, positions: Tensor) -> Tensor:
        turns = super().turns(positions)
        return turns + turns


class Magnitude(Rotated):
    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        return x * self.turns(positions).abs().sum()


class ByAConstant(Rotated):
    def turns(self, positions: Tensor) -> Tensor:
        return super().turns(positions) * 1j


class Table(Rotated):
    """Of complex numbers that the model holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.polar(torch.ones(64, 2), torch.rand(64, 2)))

    def turns(self, positions: Tensor) -> Tensor:
        return self.table[positions]


class InDouble(Rotated):
    def turns(self, positions: Tensor) -> Tensor:
        return super().turns(positions).to(torch.complex128)


@pytest.mark.default("Summed-aten.add.Tensor", "ByAConstant-complex constant")
@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (Summed, "aten.add.Tensor"),
        (Magnitude, "aten.abs.default"),
        (ByAConstant, "complex constant"),
        (Table, "an input of complex numbers"),
        (InDouble, "converts complex numbers"),
    ],
)
def test_other_arithmetic_is_refused(kind: type[Rotated], what: str) -> None:
    with pytest.raises(UnsupportedGraphError, match=what) as caught:
        compiled(kind(), SPLIT)
    assert "--backend cpu" in str(caught.value)
