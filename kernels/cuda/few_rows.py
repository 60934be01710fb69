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

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specc.kernels.cuda.dependent import DTYPES
from specc.kernels.cuda.launch import is_dependent
from specc.kernels.cuda.strided_rows import FLOATS, check

# what compiles the tiles: what was measured holds for this version alone
COMPILER = f"triton {triton.__version__}"
MAX_ROWS = 16
# columns of the sum that a program stores at a time
BLOCK_TOTAL = 64


@dataclass(frozen=True)
class Tile:
    """Launch parameters.

    Args:
        block_n: rows of each of a program's blocks of the weight, of which those with a norm have
            two.
        block_k: columns of a step.
        num_warps: of a program.
        num_stages: steps in flight.
        splits: programs that share the columns of a block between them.
        starts_early: it is a dependent launch where launches are; else an ordinary one, always.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    splits: int = 1
    starts_early: bool = True

    @property
    def sizes(self) -> dict[str, int]:
        """Constants of every kernel of few rows, by the names of its parameters."""
        return {"BM": MAX_ROWS, "BN": self.block_n, "BK": self.block_k}

    @property
    def options(self) -> dict[str, Any]:
        """What Triton is told beside them."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}

    def copies(self, dtype: torch.dtype) -> int:
        """Copies of a step's gamma that a load has: 4 bytes a thread, fewer are not prefetched."""
        return max(1, 4 * 32 * self.num_warps // (self.block_k * dtype.itemsize))


# tiles to choose from, the smaller first
TILES = {
    torch.bfloat16: (Tile(16, 128, 4, 5), Tile(32, 128, 4, 4)),
    # operands as float32 take twice the registers: with 32 rows ptxas spills on sm_120
    torch.float16: (Tile(16, 128, 4, 5),),
    torch.float32: (Tile(16, 32, 4, 3),),
}

SKINNY = "skinny_linear"
# tiles of products that nothing stands around: of 4096 rows of a weight 32 at a time are a program
# for nearly every multiprocessor of a large GPU, of 2048 rows 16 are, or 32 in two parts
_HALF_TILES = (
    Tile(32, 128, 4, 5), Tile(16, 128, 4, 6), Tile(64, 128, 4, 4),
    Tile(32, 128, 4, 5, 2), Tile(32, 128, 4, 5, 4),
)  # fmt: skip
LINEAR_TILES = {
    torch.bfloat16: _HALF_TILES,
    torch.float16: _HALF_TILES,
    torch.float32: (Tile(32, 32, 4, 3), Tile(32, 32, 4, 3, 4)),
}
# programs that share the columns of a block, at most
MAX_SPLITS = max(tile.splits for tiles in LINEAR_TILES.values() for tile in tiles)

# of quantized weights: rows of one launch, and layouts that have kernels; others are decoded
MAX_QUANTIZED_ROWS = 64
QUANTIZED = (
    "int8", "fp8", "fp8-g128", "mxfp4",
    *(f"int4-g{group}{zeros}" for group in (32, 64, 128) for zeros in ("", "-zeros")),
)  # fmt: skip
# the first is for blocks of the weight that are many, the second where they are not
_QUANTIZED_TILES = {
    torch.bfloat16: (Tile(32, 128, 4, 4), Tile(16, 128, 4, 6)),
    torch.float16: (Tile(32, 128, 4, 4), Tile(16, 128, 4, 6)),
    torch.float32: (Tile(16, 32, 4, 3),),
}
_MANY_TILES = {
    torch.bfloat16: (Tile(32, 128, 4, 4),),
    torch.float16: (Tile(32, 128, 4, 4),),
    torch.float32: (),
}


def quantized_tiles(layout: str, dtype: torch.dtype, num_rows: int) -> tuple[Tile, ...]:
    """Tiles of `linear_q`; none where the weight is decoded instead.

    Args:
        layout: name of a `specc.artifact.quantized_layout.QuantizedLayout`.
        dtype: of rows.
        num_rows: of the product.
    """
    if layout not in QUANTIZED or num_rows > MAX_QUANTIZED_ROWS:
        return ()
    return (_QUANTIZED_TILES if num_rows <= MAX_ROWS else _MANY_TILES)[dtype]


@dataclass(frozen=True)
class Product:
    """What a choice is made for.

    Args:
        operator: name.
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
        rows = triton.next_power_of_2(max(1, num_rows))
        return cls("linear_q", dtype, shape, rows, layout)

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """What its kernel may be launched with; none of more rows than it takes."""
        if self.layout:
            return quantized_tiles(self.layout, self.dtype, self.rows)
        tiles = LINEAR_TILES if self.operator == SKINNY else TILES
        return tiles[self.dtype] if self.rows <= MAX_ROWS else ()

    @property
    def can_start_early(self) -> bool:
        """Whether its kernel has a configuration for dependent launches."""
        return not self.layout and self.dtype in DTYPES


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


# what was measured in this process, or read from what was measured before; what is not here is the
# library's
choices: dict[Product, Choice] = {}
_forced: ContextVar[tuple[int | None] | None] = ContextVar("specc_forced_tile", default=None)
_chosen_for: ContextVar[bool | None] = ContextVar("specc_products_of_launches", default=None)


def tile_for(operator: str, num_rows: int, weight: Tensor) -> Tile | None:
    """The tile to launch a kernel with; None is the library's product and separate kernels."""
    return _tile_of(Product.of(operator, num_rows, weight), None)


def _tile_of(product: Product, unknown: Tile | None) -> Tile | None:
    """What is forced, else what was chosen for the launches of this thread, else `unknown`."""
    forced = _forced.get()
    if forced is not None:
        (number,) = forced
        return None if number is None or number >= len(product.tiles) else product.tiles[number]
    choice = choices.get(product)
    if choice is None:
        return unknown
    chosen_for = _chosen_for.get()
    early = is_dependent() if chosen_for is None else chosen_for
    return choice.dependent if early else choice.ordinary


@contextlib.contextmanager
def chosen_for(is_dependent: bool) -> Iterator[None]:
    """Let operators of this thread take the tiles of dependent launches, or of ordinary ones.

    Whichever way they are launched: with the same tiles both give the same, bit for bit.
    """
    token = _chosen_for.set(is_dependent)
    try:
        yield
    finally:
        _chosen_for.reset(token)


def quantized_tile_for(x: Tensor, size: int, layout: str) -> Tile | None:
    """The tile of a product of rows x [M, K] with N = `size` outputs; None decodes the weight.

    Without a measurement it is the first: a weight that is decoded is read and written as floats,
    several times what a tile that suits it badly costs.
    """
    product = Product.of_quantized(x.shape[0], x.dtype, (size, x.shape[1]), layout)
    return _tile_of(product, next(iter(product.tiles), None))


@contextlib.contextmanager
def forced(number: int | None) -> Iterator[None]:
    """Let operators of this thread take the tile of this number, or the library's for None.

    Operators that have no tile of this number, as those of many rows, take the library's.
    """
    token = _forced.set((number,))
    try:
        yield
    finally:
        _forced.reset(token)


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
        operator: name.
        x: [..., K].
        residual: like x, or None.
        gamma: of the norm.
        weight: of the product.
        bias: of the product.
        name: of x among the operator's arguments.
    """
    check_linear(operator, x, weight, bias, name)
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


@triton.jit
def _rounded_to_tf32(b_x):
    """The nearest numbers with ten bits after the first."""
    b_bits = (b_x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    # of a NaN no bits may be left, or those of a number
    return tl.where(b_x == b_x, b_bits.to(tl.float32, bitcast=True), b_x)


@triton.jit
def normed_pair(
    x, residual, gamma, weight, o_r, m_r, o_a, o_b, K, eps, offset,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, COPIES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """norm(x + residual) times rows o_a and o_b of the weight: two [BM, BN] in float32.

    o_r [BM] are rows of x and of residual, where m_r; others are zeros. residual may be None.
    o_a and o_b [BN] are inside the weight.
    """
    o_k = tl.arange(0, BK)
    m_m = m_r[:, None]
    p_x = x + o_r[:, None] * K + o_k[None, :]
    if residual is not None:
        p_residual = residual + o_r[:, None] * K + o_k[None, :]
    p_a = weight + o_a.to(tl.int64)[:, None] * K + o_k[None, :]
    p_b = weight + o_b.to(tl.int64)[:, None] * K + o_k[None, :]
    p_gamma = gamma + tl.zeros([COPIES, 1], tl.int32) + o_k[None, :]  # [COPIES, BK]
    b_a = tl.zeros([BM, BN], tl.float32)
    b_b = tl.zeros([BM, BN], tl.float32)
    b_squares = tl.zeros([BM], tl.float32)
    for k in range(0, K, BK):
        m_k = o_k[None, :] < K - k  # [1, BK]
        b_x = tl.load(p_x + k, mask=m_m & m_k, other=0.0).to(tl.float32)
        if residual is not None:
            b_x += tl.load(p_residual + k, mask=m_m & m_k, other=0.0).to(tl.float32)
        # the next layers read the rounded sum: normalize what they see
        b_x = b_x.to(x.dtype.element_ty).to(tl.float32)  # [BM, BK]
        b_squares += tl.sum(b_x * b_x, 1)
        b_gamma = tl.max(tl.load(p_gamma + k, mask=m_k, other=0.0).to(tl.float32), 0) + offset
        b_x = b_x * b_gamma[None, :]
        b_wa = tl.load(p_a + k, mask=m_k, other=0.0)  # [BN, BK]
        b_wb = tl.load(p_b + k, mask=m_k, other=0.0)
        if PRECISION == "half":
            b_y = b_x.to(weight.dtype.element_ty)
            b_a = tl.dot(b_y, tl.trans(b_wa), b_a)
            b_b = tl.dot(b_y, tl.trans(b_wb), b_b)
        else:
            if PRECISION == "tf32":
                b_x = _rounded_to_tf32(b_x)
            b_wa = tl.trans(b_wa.to(tl.float32))
            b_wb = tl.trans(b_wb.to(tl.float32))
            b_a = tl.dot(b_x, b_wa, b_a, input_precision=PRECISION)
            b_b = tl.dot(b_x, b_wb, b_b, input_precision=PRECISION)
    b_scale = tl.rsqrt(b_squares / K + eps)[:, None]
    return b_a * b_scale, b_b * b_scale


@triton.jit
def store_sum(
    x, residual, total, o_r, m_r, num_rows, K, i_n, num_programs,
    BM: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Columns of rows o_r of x + residual, each of one program; zeros where not m_r."""
    o_m = tl.arange(0, BM)[:, None]
    o_r = o_r[:, None]
    for i in range(i_n * BT, K, num_programs * BT):
        o_k = i + tl.arange(0, BT)[None, :]
        m_k = m_r[:, None] & (o_k < K)
        b_x = tl.load(x + o_r * K + o_k, mask=m_k, other=0.0).to(tl.float32)
        if residual is not None:
            b_x += tl.load(residual + o_r * K + o_k, mask=m_k, other=0.0).to(tl.float32)
        m_out = (o_m < num_rows) & (o_k < K)
        tl.store(total + o_m * K + o_k, b_x.to(total.dtype.element_ty), mask=m_out)


@triton.jit
def looked_up(indices, stride, num_rows, num_entries, BM: tl.constexpr):
    """Rows of a table [BM] that the first `num_rows` indices name, and which of them exist."""
    o_m = tl.arange(0, BM)
    b_row = tl.load(indices + o_m * stride, mask=o_m < num_rows, other=-1)
    m_r = (b_row >= 0) & (b_row < num_entries)
    return tl.where(m_r, b_row, 0), m_r
