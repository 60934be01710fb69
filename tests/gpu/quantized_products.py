"""Products of few rows by quantized weights, and the tiles of fragments that are tried for each."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from specc.artifact.quantized_layout import QuantizedLayout, dequantize, pack
from specc.kernels.cuda import add_norm_linear, linear_q, linear_q_fragments
from specc.kernels.cuda.few_rows import forced
from specc.kernels.cuda.few_rows_tiles import FRAGMENTS, Tile, quantized_tiles

FIRST = "int4-g128"
KINDS = (FIRST, "int8", "fp8", "mxfp4", "int4-g32")
# of products whose results are compared
CHECKED_ROWS = (1, 6, 16, 32)
# by the names of `few_rows`' operators: outputs and columns, of Llama 3.1 8B and 3.2 1B
SHAPES = {
    "8b qkv": (6144, 4096), "8b o": (4096, 4096), "8b gate_up": (28672, 4096),
    "8b down": (4096, 14336), "1b qkv": (3072, 2048), "1b o": (2048, 2048),
    "1b gate_up": (16384, 2048), "1b down": (2048, 8192),
}  # fmt: skip
# of those that are compared with a norm in front, and columns that its kernel takes
NORMED_ROWS, NORMED_MOST = (1, 6), 6144
EPS = 1e-5
# outputs that differ; a weight repeats them
OUTPUTS = 256
# of shared memory of a program, with room for what is not the ring
SHARED_BYTES = 219 << 10
DTYPE = torch.bfloat16


def candidates(kind: str, rows: int) -> list[Tile]:
    """Tiles of fragments that a program has room for; those of the product's tables come first."""
    layout = QuantizedLayout.named(kind).as_fragments
    found = list(quantized_tiles(layout.name, DTYPE, rows))
    block_m = next(m for m in (8, 16, 32) if m >= rows)
    for warps, stages, blocks, tiles in itertools.product(
        (8, 4), (3, 2, 4, 6), (2, 1, 4), (4, 2, 8)
    ):
        shared = 512 * warps * tiles * blocks * (stages if stages > 2 else 0)
        tile = Tile(
            16 * blocks, tiles * 256 // layout.bits, warps, stages, form=FRAGMENTS, block_m=block_m
        )
        if shared <= SHARED_BYTES and name_of(tile) not in map(name_of, found):
            found.append(tile)
    return found


def name_of(tile: Tile) -> str:
    block = f"m{tile.block_m}-n{tile.block_n}-k{tile.block_k}"
    return f"fragments-{block}-w{tile.num_warps}-s{tile.num_stages}"


def compile_candidate(kind: str, rows: int, number: int) -> None:
    """In a process beside others: what the sweep launches is then compiled."""
    device = torch.device("cuda")
    weight = Weight.make(kind, (OUTPUTS, 2048), 1, device)
    x = torch.zeros(rows, 2048, dtype=DTYPE, device=device)
    weight.multiply(x, candidates(kind, rows)[number])
    torch.cuda.synchronize()


@dataclass(frozen=True)
class Weight:
    """Copies of a quantized weight in both layouts, and what it stands for.

    Args:
        stored: uint8 [copies, blocks, bytes], in blocks.
        fragments: likewise, in fragments.
        values: [OUTPUTS, K] float32, which the outputs repeat.
    """

    layout: QuantizedLayout
    shape: tuple[int, int]
    stored: Tensor
    fragments: Tensor
    values: Tensor

    @classmethod
    def make(cls, kind: str, shape: tuple[int, int], copies: int, device: torch.device) -> Weight:
        layout = QuantizedLayout.named(kind)
        outputs, columns = shape
        dice = torch.Generator().manual_seed(columns)
        size = (OUTPUTS, columns)
        levels = torch.randint(0, 1 << layout.bits, size, generator=dice, dtype=torch.uint8)
        if layout.is_float and layout.bits == 8:
            # no NaN
            levels = torch.where(levels & 0x7F == 0x7F, levels - 1, levels)
        groups = (OUTPUTS, layout.num_groups(columns))
        scales = torch.rand(groups, generator=dice) * 0.02 + 0.01
        if kind == "mxfp4":
            scales = torch.exp2(torch.randint(-8, -4, groups, generator=dice).float())
        parts = []
        for each in (layout, layout.as_fragments):
            block = pack(levels, scales, None, each)
            times = (copies, outputs // OUTPUTS, 1)
            parts.append(block.to(device).repeat(*times).view(copies, -1, block.shape[1]))
        values = dequantize(pack(levels, scales, None, layout), size, layout)
        return cls(layout, shape, *parts, values.to(device))

    @classmethod
    def bytes_of(cls, kind: str, shape: tuple[int, int]) -> int:
        blocks = QuantizedLayout.named(kind).stored_shape(shape)
        return blocks[0] * blocks[1]

    def normed(self, x: Tensor, residual: Tensor, gamma: Tensor) -> Tensor:
        """By fragments with a norm in front, a row or eight in one launch."""
        layout = self.layout.as_fragments
        operands = x, residual, gamma, EPS, False, self.fragments[0], None
        return add_norm_linear.add_norm_linear(*operands, layout.name)[0]

    def normed_values(self, x: Tensor, residual: Tensor, gamma: Tensor) -> Tensor:
        """The same by decoded weights, in float32 but for the sum."""
        wide = (x + residual).float()
        wide = wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * gamma.float()
        return (wide @ self.values.T).repeat(1, self.shape[0] // OUTPUTS).to(DTYPE)

    def multiply(self, x: Tensor, tile: Tile | int | None, copy: int = 0) -> Tensor:
        """By fragments with this tile; by an older form for its number; None is decoded weights."""
        if isinstance(tile, Tile):
            layout = self.layout.as_fragments
            return linear_q_fragments.multiply(
                x, self.fragments[copy], None, self.shape[0], layout, tile
            )
        layout = self.layout
        with forced(tile):
            return linear_q.linear_q(
                x, self.stored[copy], None, self.shape[0], layout.bits, layout.group,
                layout.has_zeros, layout.is_float, 0, layout.format,
            )  # fmt: skip
