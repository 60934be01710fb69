"""Tiles of the products of few rows: what their kernels may be launched with.

A tile says which form the loop of the kernel has (`few_rows_loops`):

- `dot`: rows of x, as many as a tensor core takes, are the first operand, and each block of the
  weight is a product of its own. The last step may be cut, so every width has it.
- `joined`: the same, but both blocks of a program are one operand.
- `swap`: the weight is the first operand, and its transposed result the product. The rows of x are
  the columns of an instruction, which has 8 of them: half of what `dot` computes for nothing.
- `vector`: one row, multiplied without tensor cores, so the weight goes from memory to registers
  as it is, and is not laid out for an instruction.

All but `dot` have steps that are all whole, so no load of a weight has a mask, and are for
bfloat16. Tiles of quantized weights take any width, and have the form `dot`.

Weights in fragments (`specc.artifact.fragments`) have tiles of their own:

- `fragments`: the weight is the first operand, as it was loaded, and each warp has columns of its
  own of a step (`linear_q_fragments_kernels`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

DOT, JOINED, SWAP, VECTOR = "dot", "joined", "swap", "vector"
FRAGMENTS = "fragments"
# of a product that is not of a quantized weight
MAX_ROWS = 16
# rows that tiles of a form have, unless their names say others
_ROWS = {DOT: 16, JOINED: 16, SWAP: 8, VECTOR: 1, FRAGMENTS: 8}
# bytes of shared memory that a program may have (CUDA programming guide, technical specifications
# per compute capability), and what it may have on those that are not listed
_SHARED = {80: 163 << 10, 87: 163 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10}
LEAST_SHARED = 99 << 10
# of a multiprocessor
REGISTERS = 65536


@dataclass(frozen=True)
class Tile:
    """Launch parameters.

    Args:
        block_n: rows of each of a program's blocks of the weight, of which those with a norm have
            two.
        block_k: columns of a step, at most where a weight is quantized; of fragments those of a
            warp.
        num_warps: of a program.
        num_stages: steps in flight.
        splits: programs that share the columns of a block between them.
        starts_early: it is a dependent launch where launches are; else an ordinary one, always.
        block_m: rows of x, at most.
        shared: bytes of shared memory that the device must give a program, if not all do.
        columns: of rows that a program has in shared memory, at most; 0 where it has none.
        registers: of a thread, where ptxas would spill for one more program of a multiprocessor.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    splits: int = 1
    starts_early: bool = True
    form: str = DOT
    block_m: int = MAX_ROWS
    shared: int = LEAST_SHARED
    columns: int = 0
    registers: int | None = None

    @property
    def sizes(self) -> dict[str, Any]:
        """Constants of every kernel of few rows, by the names of its parameters."""
        blocks = {"BM": self.block_m, "BN": self.block_n, "BK": self.block_k}
        return blocks | {"FORM": self.form, "STAGES": self.num_stages}

    @property
    def options(self) -> dict[str, Any]:
        """What Triton is told beside them."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}

    @property
    def name(self) -> str:
        """Of its configurations, for tables: `n32`, `swap-n16`, `swap-m16-n64`."""
        form = "" if self.form == DOT else f"{self.form}-"
        rows = "" if self.block_m == _ROWS[self.form] else f"m{self.block_m}-"
        return f"{form}{rows}n{self.block_n}"

    def copies(self, dtype: torch.dtype) -> int:
        """Copies of a step's gamma that a load has: 4 bytes a thread, fewer are not prefetched."""
        return max(1, 4 * 32 * self.num_warps // (self.block_k * dtype.itemsize))

    def takes(self, num_rows: int, columns: int) -> bool:
        """Whether its kernel computes a product of so many rows by a weight of so many columns."""
        takes_columns = self.form == DOT or columns % self.block_k == 0
        return num_rows <= self.block_m and takes_columns and columns <= (self.columns or columns)

    def fits(self, capability: int) -> bool:
        """Whether devices of a compute capability (90) have the shared memory it needs."""
        return self.shared <= _SHARED.get(capability, LEAST_SHARED)


def suited(tiles: Iterable[Tile], num_rows: int, columns: int, capability: int) -> tuple[Tile, ...]:
    """Of those that take a product the ones with the fewest rows: others compute more for nothing.

    Args:
        num_rows: of x.
        columns: of the weight.
        capability: of the device.
    """
    fitting = [t for t in tiles if t.takes(num_rows, columns) and t.fits(capability)]
    least = min((tile.block_m for tile in fitting), default=0)
    return tuple(tile for tile in fitting if tile.block_m == least)


# In bfloat16 those that together come closest to the best of 1044 measurements: on an H200,
# 2026-11-26, one row and eight, shapes of 8B and 1B (docs/results/gpu.json#gpu_tiles). Time over
# that of reading the weight, summed over the six products with a norm, is 9.57 (one row) and 9.71
# (eight) with the library's, 7.83 and 8.77 with these, 7.71 and 8.72 with the best of each; of the
# four without a norm 7.49 and 7.51, 5.87 and 6.85, which are the best. With 16 rows
# (2026-11-27, docs/results/gpu.json#gpu_products_16) the two of 16 are the fastest, or level with
# it, wherever the library takes 1 % of a layer longer. All fit where there is least shared memory.
TILES = {
    torch.bfloat16: (
        Tile(4, 512, 2, 4, form=VECTOR, block_m=1),
        Tile(16, 256, 4, 4, form=VECTOR, block_m=1),
        Tile(16, 256, 2, 4, form=SWAP, block_m=8),
        Tile(64, 128, 8, 3, form=SWAP, block_m=8),
        Tile(64, 128, 8, 3, form=JOINED),
        Tile(32, 128, 4, 4),
    ),
    # operands as float32 take twice the registers: with 32 rows ptxas spills on sm_120
    torch.float16: (Tile(16, 128, 4, 5),),
    torch.float32: (Tile(16, 32, 4, 3),),
}
# of those that start with tokens: without a residual Triton 3.6 spills the first of one row on 9.0
EMBED_TILES = TILES | {torch.bfloat16: TILES[torch.bfloat16][1:]}
# of products that nothing stands around: of 4096 rows of a weight 32 at a time are a program for
# nearly every multiprocessor of a large GPU, of 2048 rows 16 are, or 32 in two parts. With 16 rows
# one of the last two, in a dependent launch, takes 3.1 % (down of 8B) to 6.7 % (o of 8B) less than
# the library and all tiles of other columns; in four parts they were measured with three steps in
# flight alone
LINEAR_TILES = {
    torch.bfloat16: (
        Tile(8, 512, 4, 4, form=VECTOR, block_m=1),
        Tile(16, 256, 2, 4, form=VECTOR, block_m=1),
        Tile(64, 128, 4, 5, form=SWAP, block_m=8),
        Tile(64, 128, 4, 5, 2, form=SWAP, block_m=8),
        Tile(64, 128, 4, 5, 4, form=SWAP, block_m=8),
        Tile(32, 128, 2, 6, 4, form=SWAP, block_m=8),
        Tile(32, 128, 4, 5), Tile(32, 128, 4, 5, 2), Tile(32, 128, 4, 5, 4),
        Tile(64, 256, 4, 4, 2, form=SWAP, shared=163 << 10),
        Tile(64, 256, 4, 4, 4, form=SWAP, shared=163 << 10),
    ),
    torch.float16: (
        Tile(32, 128, 4, 5), Tile(16, 128, 4, 6), Tile(64, 128, 4, 4),
        Tile(32, 128, 4, 5, 2), Tile(32, 128, 4, 5, 4),
    ),
    torch.float32: (Tile(32, 32, 4, 3), Tile(32, 32, 4, 3, 4)),
}  # fmt: skip
# programs that share the columns of a block, at most
MAX_SPLITS = max(tile.splits for tiles in LINEAR_TILES.values() for tile in tiles)

# of quantized weights: rows of one launch, and layouts that have kernels; others are decoded
MAX_QUANTIZED_ROWS = 64
FOUR_BITS = ("int4", "mxfp4", "nvfp4")
QUANTIZED = (
    "int8", "int8-zeros", "fp8", "fp8-g128", "mxfp4",
    *(
        f"{kind}-g{group}{zeros}"
        for kind in ("int8", "int4")
        for group in (32, 64, 128)
        for zeros in ("", "-zeros")
    ),
    "nvfp4",
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


# of weights in fragments: of the two of 8 rows one is for weights whose blocks of 32 are many, the
# other for those where they are not. Warps and columns of a warp decide the order of a sum: all
# tiles have the same, so rows have the same bits however many they are. Three steps in flight are
# as much shared memory as all devices have. What is not here ptxas spills on some device.
FRAGMENT_LAYOUTS = tuple(
    f"{layout}-fragments"
    for layout in QUANTIZED
    if layout in ("int8", "fp8", "fp8-g128") or layout.startswith(FOUR_BITS)
)
_WIDE_ROWS = Tile(16, 256, 8, 4, form=FRAGMENTS, block_m=32)
_NO_RING = Tile(16, 256, 8, 2, form=FRAGMENTS, block_m=8)
_FRAGMENT_TILES = {
    4: (Tile(32, 256, 8, 3, form=FRAGMENTS, block_m=8, registers=128), _NO_RING, _WIDE_ROWS),
    8: (
        Tile(32, 128, 8, 3, form=FRAGMENTS, block_m=8),
        Tile(32, 128, 8, 3, form=FRAGMENTS, block_m=16, registers=128),
        replace(_WIDE_ROWS, block_k=128),
    ),
}


def fragment_tiles(layout: str) -> tuple[Tile, ...]:
    """All of a layout: a warp has as many bytes of a step, whatever a level has."""
    first, second, *others = _FRAGMENT_TILES[4 if layout.startswith(FOUR_BITS) else 8]
    if "-g32-" in layout:
        # groups that are one span take more
        first = replace(first, registers=168)
    if layout == "int4-g128-fragments":
        second = replace(second, registers=80)
    return first, second, *others


# with a norm in front: of a row, or of eight, that are in shared memory, beside a ring where that
# fits. More columns are separate kernels
NORMED_COLUMNS = 2048
_ONE = Tile(32, 256, 8, 3, form=FRAGMENTS, block_m=1, columns=6144, shared=112 << 10, registers=128)
_EIGHT = replace(_ONE, block_m=8, shared=196 << 10, registers=200)
_NORMED_TILES = (
    _ONE,
    replace(_ONE, num_stages=2, shared=16 << 10),
    _EIGHT,
    replace(_EIGHT, num_stages=2, shared=100 << 10),
    replace(_EIGHT, num_stages=2, columns=4096, shared=68 << 10),
)


def all_normed_tiles(layout: str, capability: int) -> tuple[Tile, ...]:
    """Of products with a norm in front: the first that a device has room for, by rows."""
    if layout not in FRAGMENT_LAYOUTS:
        return ()
    fitting = [tile for tile in _NORMED_TILES if tile.fits(capability)]
    first = {tile.block_m: tile for tile in reversed(fitting)}
    columns = 256 if layout.startswith(FOUR_BITS) else 128
    if layout.startswith(("int4-g32", "int4-g64")):
        first[1] = replace(first[1], registers=168)
    return tuple(replace(first[rows], block_k=columns) for rows in sorted(first))


def normed_tiles(layout: str, num_rows: int, columns: int, capability: int) -> tuple[Tile, ...]:
    """Likewise, the one that takes so many rows and columns; or none."""
    tiles = all_normed_tiles(layout, capability)
    return tuple(tile for tile in tiles if tile.takes(num_rows, columns))[:1]


def resident(tile: Tile, capability: int) -> int:
    """Programs with a norm in front that a multiprocessor holds: one, or two."""
    # a multiprocessor has 1 KiB more than a program may have, which takes 1 KiB more than it asks
    room = _SHARED.get(capability, LEAST_SHARED) + 1024
    registers = 32 * tile.num_warps * (tile.registers or REGISTERS)
    return 2 if 2 * (tile.shared + 1024) <= room and 2 * registers <= REGISTERS else 1


def quantized_tiles(layout: str, dtype: torch.dtype, num_rows: int) -> tuple[Tile, ...]:
    """Tiles of `linear_q`; none where the weight is decoded instead.

    Args:
        layout: name of a `specc.artifact.quantized_layout.QuantizedLayout`.
        num_rows: of the product.
    """
    if layout in FRAGMENT_LAYOUTS:
        tiles = fragment_tiles(layout)
        least = min((tile.block_m for tile in tiles if tile.block_m >= num_rows), default=0)
        return tuple(tile for tile in tiles if tile.block_m == least)
    if layout not in QUANTIZED or num_rows > MAX_QUANTIZED_ROWS:
        return ()
    return (_MANY_TILES if num_rows > MAX_ROWS else _QUANTIZED_TILES)[dtype]
