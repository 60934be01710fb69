"""Calls of `specc.skinny_linear` in a model's graph, to be timed: see `choose_products`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

NAME = "skinny_linear"


@dataclass(frozen=True)
class LinearCall:
    """A call, with the tensors that do not change.

    Args:
        weight: [N, K].
        bias: [N], or None.
    """

    weight: Tensor
    bias: Tensor | None
    operator = NAME
    rows = (1, 2, 4, 8, 16)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for calls that run the same code."""
        return NAME, self.weight.dtype, tuple(self.weight.shape), self.bias is None

    def product(self, rows: int) -> Any:
        """What a choice is made for."""
        from specc.kernels.cuda.few_rows import Product

        return Product.of(NAME, rows, self.weight)

    def bind(self, rows: int) -> Callable[[], object]:
        """The call for this many rows."""
        dice = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, self.weight.shape[1], generator=dice)
        args = (x.to(self.weight.device, self.weight.dtype), self.weight, self.bias)
        return lambda: torch.ops.specc.skinny_linear(*args)


def linear_call(node: fx.Node, tensors: Mapping[str, Tensor]) -> LinearCall:
    """What a node of a graph calls.

    Args:
        node: of `specc.skinny_linear`.
        tensors: weights by the names of inputs.
    """
    _, weight, bias = node.args
    return LinearCall(
        tensors[weight.target],  # type: ignore[union-attr,index]
        None if bias is None else tensors[bias.target],  # type: ignore[union-attr,index]
    )
