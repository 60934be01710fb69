"""Calls of products of few rows with one tile or another, over one weight or another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specc.kernels.cuda import (
    add_norm_gate_up,
    add_norm_head,
    add_norm_rope_write,
    few_rows,
    skinny_linear,
)
from specc.kernels.cuda.few_rows_tiles import Tile
from tests.gpu.tile_candidates import Shape

EPS = 1e-5
# tokens of a block of the caches, which nothing is written to
BLOCK = 16


class Problem:
    """Operands of a product but its weight; calls leave no trace in them.

    Args:
        rows: of x.
    """

    def __init__(self, shape: Shape, rows: int, device: torch.device) -> None:
        self.shape, self.rows = shape, rows
        dice = torch.Generator().manual_seed(rows)

        def draw(*size: int) -> Tensor:
            return torch.randn(*size, generator=dice).to(device, torch.bfloat16)

        self.x, self.residual = draw(rows, shape.k), draw(rows, shape.k)
        self.gamma = draw(shape.k)
        self.chosen = torch.arange(rows, device=device)
        self.places: tuple[Tensor, ...] = ()
        if shape.head_dim:
            cache = torch.zeros(
                1, BLOCK, shape.kv_heads, shape.head_dim, dtype=torch.bfloat16, device=device
            )
            i32 = {"dtype": torch.int32, "device": device}
            self.places = (
                draw(rows, shape.head_dim), draw(rows, shape.head_dim), cache, cache.clone(),
                torch.tensor([0, rows], **i32), torch.full((rows,), -1, **i32),
                torch.zeros(1, 1, **i32),
            )  # fmt: skip

    @property
    def _normed(self) -> tuple[Any, ...]:
        return self.x, self.residual, self.gamma, EPS, False

    def call(self, tile: Tile | None, weight: Tensor) -> tuple[Tensor, ...]:
        """Results with this tile; None is the library's product beside its own kernels."""
        # what a tile does not take would be the library's, measured by another name
        assert tile is None or tile.takes(self.rows, self.shape.k), tile
        name = self.shape.operator
        with few_rows.forced(tile):
            if name == few_rows.SKINNY:
                return (skinny_linear.skinny_linear(self.x, weight, None),)
            if name == add_norm_gate_up.NAME:
                return add_norm_gate_up.add_norm_gate_up(*self._normed, weight, "silu")
            if name == add_norm_head.NAME:
                return (add_norm_head.add_norm_head(*self._normed, weight, None, self.chosen),)
            q, total = add_norm_rope_write.add_norm_rope_write(
                *self._normed, weight, None, *self.places
            )
            return q.transpose(0, 1), total

    def product_alone(self, weight: Tensor) -> tuple[Tensor, ...]:
        """The library's product, and nothing beside it."""
        return (torch.nn.functional.linear(self.x, weight),)


class Layers:
    """Layers of a model without attention: o, gate_up, down, qkv, each reading what is before it.

    Args:
        rows: of x.
    """

    def __init__(self, shapes: tuple[Shape, ...], rows: int, device: torch.device) -> None:
        self.qkv, self.o, self.gate_up, self.down = (Problem(s, rows, device) for s in shapes)
        self._begin = self.o.x, self.qkv.residual

    def run(self, chosen: dict[Shape, Tile | None], weights: list[dict[Shape, Tensor]]) -> Tensor:
        """Results of the last layer's qkv, each time the same."""
        (x, residual), rows = self._begin, self.o.rows
        for layer in weights:
            self.o.x = x
            (self.gate_up.x,) = self._call(self.o, chosen, layer)
            self.gate_up.residual = residual
            self.down.x, self.qkv.residual = self._call(self.gate_up, chosen, layer)
            (self.qkv.x,) = self._call(self.down, chosen, layer)
            q, residual = self._call(self.qkv, chosen, layer)
            x = q.reshape(rows, -1)
        return x

    @staticmethod
    def _call(
        problem: Problem, chosen: dict[Shape, Tile | None], layer: dict[Shape, Tensor]
    ) -> tuple[Tensor, ...]:
        return problem.call(chosen[problem.shape], layer[problem.shape])
