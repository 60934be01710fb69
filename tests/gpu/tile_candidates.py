"""Shapes of products of few rows, and the tiles that `tests.gpu.sweep_tiles` tries for each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from specc.kernels.cuda.few_rows import Product
from specc.kernels.cuda.few_rows_tiles import DOT, JOINED, SWAP, VECTOR, Tile

# bytes of shared memory of a program, at most; of capability 9.0
SHARED_BYTES = 227 * 1024
ITEM = 2
# of a wgmma: rows of its first operand
WGMMA_ROWS = 64


@dataclass(frozen=True)
class Shape:
    """A product of a model.

    Args:
        n: rows of the weight.
        k: its columns.
        head_dim: of attention.
        kv_heads: likewise.
    """

    model: str
    operator: str
    n: int
    k: int
    head_dim: int = 0
    kv_heads: int = 0

    @property
    def name(self) -> str:
        return f"{self.model} {self.operator} {self.n}x{self.k}"

    @property
    def bytes(self) -> int:
        return self.n * self.k * ITEM


def _shapes(model: str, width: int, inner: int, head_dim: int, vocab: int) -> tuple[Shape, ...]:
    qkv = width + 2 * 8 * head_dim
    return (
        Shape(model, "add_norm_rope_write", qkv, width, head_dim, 8),
        Shape(model, "skinny_linear", width, width),
        Shape(model, "add_norm_gate_up", 2 * inner, width),
        Shape(model, "skinny_linear", width, inner),
        Shape(model, "add_norm_head", vocab, width),
    )


# of Llama 3.1 8B and 3.2 1B; a layer is the first four
MODELS = {
    "8b": _shapes("8b", 4096, 14336, 128, 128256),
    "1b": _shapes("1b", 2048, 8192, 64, 128256),
}
SHAPES = tuple(shape for shapes in MODELS.values() for shape in shapes)


def name_of(tile: Tile) -> str:
    """Of a candidate; those of the product's tables may share names."""
    block = f"m{tile.block_m}-n{tile.block_n}-k{tile.block_k}"
    return f"{tile.form}-{block}-w{tile.num_warps}-s{tile.num_stages}-x{tile.splits}"


def shared_bytes(tile: Tile, is_normed: bool) -> int:
    """About what the compiler allocates: stages but one, of a weight that a wgmma reads all."""
    rows = tile.block_n * (2 if is_normed else 1)
    step = ITEM * tile.block_k
    is_wgmma = tile.form == SWAP and rows >= WGMMA_ROWS and tile.block_m >= 16
    stages = max(0, tile.num_stages - 1)
    weight = rows * step * (stages + is_wgmma)
    if not is_normed:
        return weight + stages * tile.block_m * step
    copies = tile.copies(torch.bfloat16)
    gamma = step * (copies if tile.form == DOT or copies == 1 else tile.block_m)
    return weight + stages * (2 * tile.block_m * step + gamma) + tile.block_m * step


# (rows of x, rows of a block, warps) and (columns, stages) of each; the most promising first. One
# row has 4 bytes for each thread, or it is not prefetched
_NORMED = {
    DOT: {
        (16, 32, 4): ((128, 4), (128, 6), (128, 3), (64, 6)),
        (16, 32, 8): ((128, 4), (256, 3)),
        (16, 64, 8): ((128, 3),),
        (16, 16, 8): ((256, 4),),
        (16, 64, 4): ((64, 5),),
    },
    JOINED: {
        (16, 32, 4): ((128, 4), (128, 5), (256, 3)),
        (16, 16, 4): ((256, 3), (128, 5)),
        (16, 64, 8): ((128, 3),),
        (16, 16, 2): ((128, 5),),
    },
    SWAP: {
        (16, 32, 4): ((128, 4), (256, 3), (128, 6), (128, 3), (256, 4), (64, 6), (64, 8), (128, 5)),
        (8, 32, 4): ((128, 5), (256, 3), (128, 4), (128, 6), (256, 4)),
        (8, 16, 2): ((256, 4), (128, 6), (256, 3), (128, 4)),
        (8, 16, 4): ((256, 4), (128, 6), (256, 3)),
        (16, 64, 4): ((128, 3), (64, 6), (64, 4), (128, 4)),
        (16, 64, 8): ((128, 4), (64, 6), (128, 3)),
        (16, 16, 2): ((128, 6),),
        (16, 16, 4): ((256, 3), (128, 5)),
        (8, 8, 2): ((256, 4), (256, 6)),
        (8, 64, 8): ((128, 4), (128, 3)),
    },
    VECTOR: {
        (1, 16, 4): ((256, 4), (256, 3), (256, 6), (512, 3), (256, 1)),
        (1, 8, 4): ((512, 4), (256, 4), (512, 3), (256, 6), (512, 1), (256, 1)),
        (1, 16, 8): ((512, 3), (512, 4), (512, 1)),
        (1, 32, 4): ((256, 3), (256, 4)),
        (1, 32, 8): ((512, 3),),
        (1, 16, 2): ((128, 6), (128, 4)),
        (1, 4, 4): ((512, 4), (512, 1)),
        (1, 8, 2): ((256, 4), (256, 6)),
        (1, 4, 2): ((512, 4),),
    },
}
_LINEAR = {
    DOT: {
        (16, 32, 4): ((128, 5), (128, 7), (256, 4)),
        (16, 16, 4): ((128, 6), (256, 4)),
        (16, 64, 4): ((128, 4), (256, 3)),
        (16, 32, 2): ((128, 5),),
    },
    SWAP: {
        (16, 64, 4): ((128, 4), (128, 6), (256, 3), (256, 4), (64, 8)),
        (8, 32, 2): ((256, 4), (128, 6)),
        (8, 32, 4): ((256, 4), (128, 6)),
        (8, 64, 4): ((128, 5), (256, 4)),
        (8, 16, 2): ((256, 4), (256, 5), (128, 6)),
        (16, 32, 4): ((256, 4), (128, 6)),
        (16, 128, 8): ((128, 4),),
        (16, 128, 4): ((128, 4),),
    },
    VECTOR: {
        (1, 32, 4): ((256, 4), (256, 3)),
        (1, 16, 4): ((512, 3), (256, 4), (512, 4), (256, 6)),
        (1, 8, 4): ((512, 4), (512, 6), (1024, 3)),
        (1, 32, 8): ((512, 3),),
        (1, 16, 2): ((256, 4),),
        (1, 64, 8): ((512, 3),),
    },
}
# programs of a launch, per multiprocessor: fewer leave some idle, more are launched for nothing
_LEAST_PROGRAMS, _MOST_PROGRAMS = 60, 132 * 9
_SPLITS = (1, 2, 4, 8)


def current(shape: Shape, rows: int) -> tuple[Tile, ...]:
    """What the tables of the product have for these rows."""
    weight = torch.empty(shape.n, shape.k, dtype=torch.bfloat16, device="meta")
    return Product.of(shape.operator, rows, weight).tiles


def candidates(shape: Shape, rows: int) -> list[Tile]:
    """What is tried, the current ones first, then by turns of the forms."""
    is_normed = shape.operator != "skinny_linear"
    found = dict.fromkeys(current(shape, rows))
    found.update(dict.fromkeys(_by_turns(shape, rows, is_normed)))
    return [item for item in found if shared_bytes(item, is_normed) <= SHARED_BYTES]


def _by_turns(shape: Shape, rows: int, is_normed: bool) -> Iterator[Tile]:
    tables = _NORMED if is_normed else _LINEAR
    queues = [
        _of_form(form, table, shape, rows, is_normed)
        for form, table in tables.items()
        if form != VECTOR or rows == 1
    ]
    while queues:
        for queue in list(queues):
            item = next(queue, None)
            if item is None:
                queues.remove(queue)
            else:
                yield item


def _of_form(
    form: str,
    table: dict[tuple[int, int, int], tuple[tuple[int, int], ...]],
    shape: Shape,
    rows: int,
    is_normed: bool,
) -> Iterator[Tile]:
    most = max(len(steps) for steps in table.values())
    for place in range(most):
        for (block_m, block_n, warps), steps in table.items():
            is_fitting = block_m >= rows and (not shape.head_dim or 2 * block_n <= shape.head_dim)
            if place >= len(steps) or not is_fitting:
                continue
            block_k, stages = steps[place]
            item = Tile(block_n, block_k, warps, stages, form=form, block_m=block_m)
            blocks = -(-shape.n // (block_n * (2 if is_normed else 1)))
            for splits in (1,) if is_normed else _SPLITS:
                # a part has a step for every stage, or the pipeline never fills
                is_deep = shape.k // (splits * item.block_k) >= min(4, item.num_stages)
                is_many = blocks * splits >= _LEAST_PROGRAMS
                is_few = blocks * splits <= _MOST_PROGRAMS or splits == 1
                if is_many and is_few and is_deep:
                    yield replace(item, splits=splits)
