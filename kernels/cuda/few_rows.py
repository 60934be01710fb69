"""Products of few rows with what stands around them: common parts of the `add_norm_*` operators.

Up to MAX_ROWS rows a product takes as long as reading its weights, and every launch next to it
takes as long again as some megabytes of them. So one kernel adds the residual, normalizes,
multiplies, and does what follows. A program owns two blocks of rows of the weight (gate and up, or
both halves of a head), which it reads once, and reads all of the few rows of x. On that way it
sums their squares: the scale of the norm is common to a row, so it multiplies the result, while
gamma multiplies x before the product.

Whether that beats the library's product beside its own kernels is measured, not assumed: an
operator launches the kernel only where `choices` names a tile for its shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from specc.kernels.cuda.attend_config import machine
from specc.kernels.cuda.dependent import DTYPES, with_dependent
from specc.kernels.cuda.few_rows_tiles import (
    EMBED_TILES,
    FRAGMENT_LAYOUTS,
    LINEAR_TILES,
    TILES,
    Tile,
    normed_tiles,
    quantized_tiles,
    suited,
)
from specc.kernels.cuda.launch import is_dependent, set_in_context
from specc.kernels.cuda.shipped import TYPE_NAMES, Shipped, Types
from specc.kernels.cuda.strided_rows import FLOATS, check

# what compiles the tiles: what was measured holds for this version alone
COMPILER = f"triton {triton.__version__}"
SKINNY = "skinny_linear"
QUANTIZED = "linear_q"
EMBED = "embed_norm_rope_write"
# columns of the sum that a program stores at a time
BLOCK_TOTAL = 64


@dataclass(frozen=True)
class Product:
    """What a choice is made for.

    Args:
        dtype: of activations, and of a weight that is not quantized.
        shape: of the weight [N, K].
        rows: of the product, rounded up to a power of two.
        layout: of a quantized weight; empty where it is not.
    """

    operator: str
    dtype: torch.dtype
    shape: tuple[int, int]
    rows: int
    layout: str = ""

    @classmethod
    def of(cls, operator: str, num_rows: int, weight: Tensor) -> Product:
        n, k = weight.shape
        return cls(operator, weight.dtype, (n, k), triton.next_power_of_2(max(1, num_rows)))

    @classmethod
    def of_quantized(
        cls, num_rows: int, dtype: torch.dtype, shape: tuple[int, int], layout: str
    ) -> Product:
        """That of `linear_q`."""
        return cls.of_layout(QUANTIZED, num_rows, dtype, shape, layout)

    @classmethod
    def of_layout(
        cls, operator: str, num_rows: int, dtype: torch.dtype, shape: tuple[int, int], layout: str
    ) -> Product:
        """Of an operator with a quantized weight."""
        rows = triton.next_power_of_2(max(1, num_rows))
        return cls(operator, dtype, shape, rows, layout)

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """What its kernel may be launched with on the current device; none of too many rows."""
        if self.operator == QUANTIZED:
            return quantized_tiles(self.layout, self.dtype, self.rows)
        if self.layout:
            return normed_tiles(self.layout, self.rows, self.shape[1], _capability())
        tables = {SKINNY: LINEAR_TILES, EMBED: EMBED_TILES}
        tiles = tables.get(self.operator, TILES)[self.dtype]
        return suited(tiles, self.rows, self.shape[1], _capability())

    @property
    def can_start_early(self) -> bool:
        """Whether its kernel has a configuration for dependent launches."""
        is_able = not self.layout or self.layout in FRAGMENT_LAYOUTS
        return is_able and self.dtype in DTYPES


@dataclass(frozen=True)
class Choice:
    """The fastest tiles of a product, by launches; None is the library's product.

    Args:
        ordinary: where launches are ordinary.
        dependent: where those that can be are dependent.
    """

    ordinary: Tile | None
    dependent: Tile | None

    @classmethod
    def of(cls, tile: Tile | None) -> Choice:
        """The same, however kernels are launched."""
        return cls(tile, tile)

    @property
    def differs(self) -> bool:
        """Whether launches make another product of it, whose roundings may be others."""
        return self.ordinary != (self.dependent and replace(self.dependent, starts_early=True))


def _capability() -> int:
    """Compute capability of the current GPU, or of what stands for one where there is none."""
    # a weight on a device has initialized CUDA; a device that is simulated has no driver
    if not torch.cuda.is_initialized():
        return machine(torch.device("cpu"))[0]
    # by its number: what is cached of a device without one is what the first to be asked has
    return machine(torch.device("cuda", torch.cuda.current_device()))[0]


# what was measured in this process, or read from what was measured before; what is not here is the
# library's
choices: dict[Product, Choice] = {}
_forced: ContextVar[tuple[int | Tile | None] | None] = ContextVar("specc_forced_tile", default=None)
_chosen_for: ContextVar[bool | None] = ContextVar("specc_products_of_launches", default=None)


def tile_for(operator: str, num_rows: int, weight: Tensor) -> Tile | None:
    """The tile to launch a kernel with; None is the library's product and separate kernels."""
    return _tile_of(Product.of(operator, num_rows, weight), None)


def _tile_of(product: Product, unknown: Tile | None) -> Tile | None:
    """What is forced, else what was chosen for the launches of this thread, else `unknown`."""
    forced = _forced.get()
    if forced is not None:
        (tile,) = forced
        if isinstance(tile, int):
            return product.tiles[tile] if tile < len(product.tiles) else None
        if tile is None or product.layout or not tile.takes(product.rows, product.shape[1]):
            return None
        return tile if tile.fits(_capability()) else None
    choice = choices.get(product)
    if choice is None:
        return unknown
    chosen_for = _chosen_for.get()
    early = is_dependent() if chosen_for is None else chosen_for
    return choice.dependent if early else choice.ordinary


def chosen_for(is_dependent: bool) -> AbstractContextManager[None]:
    """Let operators of this thread take the tiles of dependent launches, or of ordinary ones.

    Whichever way they are launched: with the same tiles both give the same, bit for bit.
    """
    return set_in_context(_chosen_for, is_dependent)


def quantized_tile_for(x: Tensor, size: int, layout: str) -> Tile | None:
    """The tile of a product of rows x [M, K] with N = `size` outputs; None decodes the weight.

    Without a measurement it is the first: a weight that is decoded is read and written as floats,
    several times what a tile that suits it badly costs.
    """
    product = Product.of_quantized(x.shape[0], x.dtype, (size, x.shape[1]), layout)
    return _tile_of(product, next(iter(product.tiles), None))


def normed_tile_for(operator: str, x: Tensor, size: int, layout: str) -> Tile | None:
    """As `quantized_tile_for`, with a norm in front; None is separate kernels."""
    shape, num_rows = (size, x.shape[-1]), x.shape[:-1].numel()
    product = Product.of_layout(operator, num_rows, x.dtype, shape, layout)
    return _tile_of(product, next(iter(product.tiles), None))


def unforced() -> AbstractContextManager[None]:
    """Let operators of this thread take their own, as the parts of one that was forced do."""
    return set_in_context(_forced, None)


def forced(tile: int | Tile | None) -> AbstractContextManager[None]:
    """Let operators of this thread take a tile, or the library's product for None.

    Args:
        tile: one of any table or of none, or the number of one of a product's own. Operators that
            have none of this number, or that it does not take, as those of many rows, take the
            library's.
    """
    return set_in_context(_forced, (tile,))


def check_product(
    operator: str,
    x: Tensor,
    residual: Tensor | None,
    gamma: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    name: str = "x",
) -> None:
    """Raises ValueError: what the kernels would misread.

    Args:
        x: [..., K].
        residual: like x, or None.
        name: of x among the operator's arguments.
    """
    check_linear(operator, x, weight, bias, name)
    check_norm(operator, x, residual, gamma, name)


def check_norm(
    operator: str, x: Tensor, residual: Tensor | None, gamma: Tensor, name: str = "x"
) -> None:
    """As `check_product`, of what stands before the product."""
    size = x.shape[-1]
    if residual is not None:
        check(
            residual.shape == x.shape and residual.dtype == x.dtype,
            operator,
            f"residual {residual.dtype} {list(residual.shape)}",
            f"that of {name}, {x.dtype} {list(x.shape)}",
        )
    check(
        gamma.shape == (size,) and gamma.dtype in FLOATS and gamma.is_contiguous(),
        operator,
        f"gamma {gamma.dtype} {list(gamma.shape)}",
        f"a contiguous [{size}]",
    )


def check_linear(
    operator: str, x: Tensor, weight: Tensor, bias: Tensor | None, name: str = "x"
) -> None:
    """As `check_product`, of a product without a norm."""
    size = x.shape[-1] if x.dim() else 0
    found = f"{name} {x.dtype} {list(x.shape)}"
    check(x.dtype in FLOATS and size > 0, operator, found, "rows of floats")
    is_matrix = weight.dim() == 2 and weight.shape[1] == size and weight.is_contiguous()
    check(
        is_matrix and weight.dtype == x.dtype,
        operator,
        f"weight {weight.dtype} {list(weight.shape)}, strides {weight.stride()}",
        f"a contiguous [N, {size}] of {x.dtype}",
    )
    if bias is not None:
        check(
            bias.shape == weight.shape[:1] and bias.dtype == x.dtype and bias.is_contiguous(),
            operator,
            f"bias {bias.dtype} {list(bias.shape)}",
            f"a contiguous {list(weight.shape[:1])} of {x.dtype}",
        )


def normed_options(tile: Tile, dtype: torch.dtype, gamma: torch.dtype) -> dict[str, Any]:
    """Keywords of a launch of a product with a norm in front, but for when it may start.

    Args:
        dtype: of x.
        gamma: of the weight of the norm.
    """
    sizes = tile.sizes | {"COPIES": tile.copies(gamma), "PRECISION": precision(dtype)}
    return sizes | tile.options


def shipped_normed(
    kernel: Any,
    capability: int,
    tiles: Mapping[torch.dtype, Iterable[Tile]],
    like_x: Sequence[str],
    types: Types,
    **given: Any,
) -> Iterator[Shipped]:
    """Configurations of such a product: every tile, with and without a bias.

    Args:
        like_x: tensors in its dtype besides those that all have.
        types: of other arguments.
        given: further keywords of a launch.
    """
    for dtype in FLOATS:
        own = {dtype: ("x", "gamma", "weight", "bias", "out", *like_x), float: ("eps", "offset")}
        for tile in tiles[dtype]:
            for suffix, absent in (("", {"bias": None}), ("-bias", {})):
                item = Shipped.of(
                    f"{TYPE_NAMES[dtype]}-{tile.name}{suffix}", kernel, own, types,
                    **normed_options(tile, dtype, dtype), **absent, **given,
                )  # fmt: skip
                yield from with_dependent(item, capability, dtype)


def in_rows(x: Tensor) -> Tensor:
    """[..., K] as [rows, K], columns side by side."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def precision(dtype: torch.dtype) -> str:
    """How operands are multiplied.

    x times gamma leaves float16's range where the norm's scale would bring it back: TF32 has the
    range of float32 and float16's mantissa. What is multiplied is rounded to it before, since
    Triton's products leave that to tensor cores, which cut bits off: results would be too small.
    """
    return "ieee" if dtype == torch.float32 else "tf32" if dtype == torch.float16 else "half"
