"""Calls of products without a norm in a model's graph, to be timed: see `choose_products`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from specc.artifact.quantized_layout import QuantizedLayout

LINEAR, QUANTIZED = "skinny_linear", "linear_q"


@dataclass(frozen=True)
class LinearCall:
    """A call of `specc.skinny_linear`, with the tensors that do not change.

    Args:
        weight: [N, K].
        bias: [N], or None.
    """

    weight: Tensor
    bias: Tensor | None
    operator = LINEAR
    rows = (1, 2, 4, 8, 16)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for calls that run the same code."""
        return LINEAR, self.weight.dtype, tuple(self.weight.shape), self.bias is None

    def product(self, rows: int) -> Any:
        """What a choice is made for."""
        from specc.kernels.cuda.few_rows import Product

        return Product.of(LINEAR, rows, self.weight)

    def bind(self, rows: int) -> Callable[[], object]:
        """The call for this many rows."""
        dice = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, self.weight.shape[1], generator=dice)
        args = (x.to(self.weight.device, self.weight.dtype), self.weight, self.bias)
        return lambda: torch.ops.specc.skinny_linear(*args)


@dataclass(frozen=True)
class QuantizedCall:
    """A call of `specc.linear_q`, with the tensors that do not change.

    Args:
        weight: uint8 [blocks, bytes].
        bias: [N], or None.
        shape: of the weight, [N, K].
    """

    weight: Tensor
    bias: Tensor | None
    shape: tuple[int, int]
    layout: QuantizedLayout
    dtype: torch.dtype
    operator = QUANTIZED
    # a tree of several sequences has more than a kernel with a norm takes
    rows = (1, 2, 4, 8, 16, 32, 64)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for calls that run the same code."""
        return QUANTIZED, self.dtype, self.shape, self.layout, self.bias is None

    def product(self, rows: int) -> Any:
        """What a choice is made for."""
        from specc.kernels.cuda.few_rows import Product

        return Product.of_quantized(rows, self.dtype, self.shape, self.layout.unpaired.name)

    def bind(self, rows: int) -> Callable[[], object]:
        """The call for this many rows."""
        dice = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, self.shape[1], generator=dice).to(self.weight.device, self.dtype)
        args = (x, self.weight, self.bias, self.shape[0], *self.layout.facts)
        return lambda: torch.ops.specc.linear_q(*args)


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


def quantized_call(
    node: fx.Node,
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, int]],
    dtype: torch.dtype,
) -> QuantizedCall:
    """What a node of a graph calls.

    Args:
        node: of `specc.linear_q`.
        tensors: weights by the names of inputs.
        shapes: of quantized weights [N, K], likewise.
    """
    _, weight, bias, _, *facts = node.args
    name = weight.target  # type: ignore[union-attr]
    return QuantizedCall(
        tensors[name],
        None if bias is None else tensors[bias.target],  # type: ignore[union-attr]
        shapes[name],
        QuantizedLayout.of_facts(facts),
        dtype,
    )
