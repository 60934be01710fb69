"""Cases of the `add_norm_*` kernels and how one is checked, without pytest.

Sizes are no multiples of tiles, but for widths where a tile needs that; all tiles of a dtype are
checked, and so is the path without one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specc.kernels.cuda import few_rows, few_rows_tiles
from specc.kernels.cuda.add_norm_gate_up import add_norm_gate_up
from specc.kernels.cuda.add_norm_head import add_norm_head
from specc.kernels.cuda.add_norm_linear import add_norm_linear
from specc.kernels.cuda.add_norm_rope_write import add_norm_rope_write
from specc.kernels.cuda.embed_norm_rope_write import embed_norm_rope_write
from specc.kernels.cuda.few_rows_tiles import Tile
from specc.kernels.reference.fused import ACTIVATIONS
from specc.kernels.reference.products import (
    add_norm_gate_up_reference,
    add_norm_head_reference,
    add_norm_linear_reference,
    add_norm_rope_write_reference,
    embed_norm_rope_write_reference,
)
from tests.kernels.cuda.cases_write_kv import Case, break_rows, split_slabs
from tests.kernels.cuda.cases_write_kv import make_rows as make_cache_rows

EPS = 1e-3
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = (BF16, F16, F32)
# x times gamma is rounded to the operands' type, and the result to its own; both relative to the
# largest result of a row
TOLERANCE = {F32: 1e-5, F16: 2e-3, BF16: 1.2e-2}
# (rows as dimensions, K, N or I): odd, less than a tile, several tiles, one program, all 16 rows
SHAPES = (
    ((1, 1), 64, 48),
    ((1, 5), 200, 70),
    ((16,), 130, 33),
    ((1, 3), 33, 16),
    ((2, 4), 264, 7),
    ((1, 11), 96, 130),
)
# None is the library's product
TILES = tuple((dtype, tile) for dtype in DTYPES for tile in (*few_rows.TILES[dtype], None))


def fitted(rows: tuple[int, ...], size: int, tile: Tile | None) -> tuple[tuple[int, ...], int]:
    """Rows and columns of a case, as a tile takes them: no more rows, and two whole steps or more.

    The last step of `dot` may be cut, so its cases stay what they are.
    """
    if tile is None or tile.takes(torch.Size(rows).numel(), size):
        return rows, size
    if torch.Size(rows).numel() > tile.block_m:
        rows = (*(1 for _ in rows[1:]), tile.block_m)
    return rows, tile.block_k * max(2, -(-size // tile.block_k))


def cut(case: Case, tile: Tile | None) -> Case:
    """The first tokens of a case, as many as a tile takes."""
    seqs, left = [], few_rows_tiles.MAX_ROWS if tile is None else tile.block_m
    for tokens, first in case.seqs:
        seqs.append((min(tokens, left), first))
        left -= seqs[-1][0]
    num_tokens = sum(tokens for tokens, _ in seqs) + min(case.tail, left)
    dead = tuple(token for token in case.dead if token < num_tokens)
    return replace(case, seqs=tuple(seqs), dead=dead, tail=min(case.tail, left))


LINEAR = tuple(
    (*fitted(rows, size, tile), num_out, dtype, tile, bool(i % 2), bool(i // 2 % 2))
    for i, (dtype, tile, _) in enumerate((*item, j) for item in TILES for j in range(3))
    for rows, size, num_out in (SHAPES[i % len(SHAPES)],)
)
GATED = tuple(
    (*fitted(rows, size, tile), num_out, dtype, tile, activation)
    for i, ((dtype, tile), activation) in enumerate(itertools.product(TILES, ACTIVATIONS))
    for rows, size, num_out in (SHAPES[i % len(SHAPES)],)
)
# (tokens, rows that get logits, K, N): one, some in any order, few of many, one twice, all
CHOSEN = (
    (1, (0,), 64, 50),
    (5, (4, 0, 2), 200, 33),
    (40, (39, 3), 130, 70),
    (3, (1, 1), 33, 16),
    (16, tuple(range(16)), 96, 35),
)
HEADS = tuple(
    (num_tokens, rows[: fits[-1]], size, num_out, dtype, tile, bool(i % 2), bool(i // 2 % 2))
    for i, (dtype, tile, _) in enumerate((*item, j) for item in TILES for j in range(3))
    for num_tokens, rows, columns, num_out in (CHOSEN[i % len(CHOSEN)],)
    for fits, size in (fitted((len(rows),), columns, tile),)
)
# rows of the embedding
NUM_EMBEDDINGS = 29
ROTATED = {
    "decode": Case(((1, 30), (1, 0), (1, 47))),
    "one-token": Case(((1, 5),), (2, 1), (128, 128)),
    "tree": Case(((7, 30), (0, 3), (9, 15)), (2, 1), (80, 80), angle_dtype=F32),
    "odd-half": Case(((2, 9),), (4, 2), (36, 36)),
    "odd-pages": Case(((9, 4), (3, 6)), (2, 2), (64, 64), block_size=3),
    "dense": Case(((4, 77), (2, 10)), (4, 4), (64, 64), block_size=0),
    "dead-tokens": Case(((5, 30), (2, 4), (3, 9)), dead=(1, 5, 6, 9), tail=3),
    "many-sequences": Case(((0, 0),) * 40 + ((2, 9), (0, 3), (1, 0)), (2, 1), (16, 16)),
    "wider-cache": Case(((3, 8),), cache_dtype=F32, angle_dtype=F32),
}


def make_operands(
    rows: tuple[int, ...],
    size: int,
    num_out: int,
    dtype: torch.dtype,
    device: torch.device,
    has_bias: bool = False,
) -> dict[str, Any]:
    """x, residual, gamma, weight and bias; rows differ in scale, so that a wrong one shows."""
    torch.manual_seed(size * 31 + num_out)
    scales = torch.logspace(-1, 1, torch.Size(rows).numel()).view(*rows, 1)
    x, residual = torch.randn(*rows, size) * scales, torch.randn(*rows, size) * scales
    operands: dict[str, Any] = {
        "x": x.to(dtype).to(device),
        "residual": residual.to(dtype).to(device),
        "gamma": (torch.randn(size) + 1.5).to(dtype).to(device),
        "eps": EPS,
        "unit_offset": False,
        "weight": torch.randn(num_out, size).to(dtype).to(device),
    }
    if has_bias:
        operands["bias"] = (3 * torch.randn(num_out)).to(dtype).to(device)
    return operands


def check_linear(
    rows: tuple[int, ...],
    size: int,
    num_out: int,
    dtype: torch.dtype,
    tile: Tile | None,
    has_bias: bool,
    unit_offset: bool,
    device: torch.device,
) -> None:
    operands = make_operands(rows, size, num_out, dtype, device, has_bias)
    operands |= {"unit_offset": unit_offset, "bias": operands.get("bias")}
    _check(add_norm_linear, add_norm_linear_reference, operands, tile)


def check_gate_up(
    rows: tuple[int, ...],
    size: int,
    num_out: int,
    dtype: torch.dtype,
    tile: Tile | None,
    activation: str,
    device: torch.device,
) -> None:
    operands = make_operands(rows, size, 2 * num_out, dtype, device)
    _check(
        add_norm_gate_up,
        add_norm_gate_up_reference,
        operands | {"activation": activation},
        tile,
    )


def make_rotation(
    case: Case, dtype: torch.dtype, tile: Tile | None, has_bias: bool, device: torch.device
) -> dict[str, Any]:
    """Arguments of `add_norm_rope_write`, as a tile takes them, and the slabs."""
    case = cut(case, tile)
    args = make_cache_rows(case, device)
    del args["k"], args["v"]
    for name in ("k", "v"):
        slab = args[f"{name}_slab"].to(case.cache_dtype or dtype)
        args |= {f"{name}_slab": slab, f"{name}_cache": slab[1, 0 if name == "k" else 1]}
    num_tokens, head_dim = args["slot"].shape[0], case.sizes[0]
    num_out = (case.heads[0] + 2 * case.heads[1]) * head_dim
    rows, size = fitted((1, num_tokens), 72, tile)
    operands = make_operands(rows, size, num_out, dtype, device, has_bias)
    # columns of its own for each half, and rows of a wider table
    wide = torch.randn(2, num_tokens, head_dim + 8, device=device).clamp(-2, 2)
    cos, sin = wide.to(case.angle_dtype or dtype)[..., :head_dim]
    return {"bias": None} | operands | {"cos": cos, "sin": sin} | args


def check_rotated(
    case: Case, dtype: torch.dtype, tile: Tile | None, has_bias: bool, device: torch.device
) -> None:
    """Compare queries, the sum, and all of the slabs with the oracle's."""
    args, slabs = split_slabs(make_rotation(case, dtype, tile, has_bias, device))
    expected, expected_slabs = split_slabs(make_rotation(case, dtype, tile, has_bias, device))
    _check(add_norm_rope_write, add_norm_rope_write_reference, args, tile, expected)
    _check_slabs(slabs, expected_slabs, dtype)


def _check_slabs(slabs: Sequence[Tensor], expected: Sequence[Tensor], dtype: torch.dtype) -> None:
    """What nobody writes stays, to the bit."""
    for slab, other in zip(slabs, expected, strict=True):
        is_written = other != slab.new_tensor(12288.0)
        assert torch.equal(slab[~is_written], other[~is_written])
        assert_close(slab, other, dtype)


def check_head(
    num_tokens: int,
    rows: tuple[int, ...],
    size: int,
    num_out: int,
    dtype: torch.dtype,
    tile: Tile | None,
    has_bias: bool,
    unit_offset: bool,
    device: torch.device,
) -> None:
    operands = make_operands((1, num_tokens), size, num_out, dtype, device, has_bias)
    operands |= {"unit_offset": unit_offset, "bias": operands.get("bias")}
    operands["rows"] = torch.tensor(rows, device=device)
    _check_head(operands, tile, add_norm_head_reference(**operands))


def check_bad_rows(dtype: torch.dtype, tile: Tile, device: torch.device) -> None:
    """Rows that are not there have the logits of zeros."""
    _, size = fitted((1, 4), 72, tile)
    operands = make_operands((1, 4), size, 40, dtype, device, has_bias=True)
    rows = torch.tensor([-1, 2, 4, 3], device=device)[: tile.block_m]
    is_bad = (rows < 0) | (rows > 3)
    want = add_norm_head_reference(**operands, rows=rows.where(~is_bad, 0))
    want[:, is_bad] = operands["bias"]
    operands["rows"] = rows
    _check_head(operands, tile, want)


def check_rows_apart(dtype: torch.dtype, tile: Tile, device: torch.device) -> None:
    """A row is the same bit for bit, whatever other rows a launch has."""
    rows, size = fitted((tile.block_m,), 264, tile)
    operands = make_operands(rows, size, 70, dtype, device) | {"bias": None}
    with few_rows.forced(tile):
        whole, _ = add_norm_linear(**operands)
        for count in {1, 7} & set(range(tile.block_m)):
            own = {name: operands[name][:count].contiguous() for name in ("x", "residual")}
            part, _ = add_norm_linear(**operands | own)
            assert torch.equal(part, whole[:count])


def _check_head(operands: dict[str, Any], tile: Tile | None, want: Tensor) -> None:
    assert tile is None or tile.takes(want.shape[-2], operands["x"].shape[-1])
    with few_rows.forced(tile):
        got = add_norm_head(**operands)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    assert got.is_contiguous()
    assert_close(got, want, got.dtype)


def make_embedded(
    case: Case, dtype: torch.dtype, tile: Tile | None, has_bias: bool, device: torch.device
) -> dict[str, Any]:
    """Arguments of `embed_norm_rope_write`, as a tile takes them, and the slabs."""
    args = make_rotation(case, dtype, tile, has_bias, device)
    x = args.pop("x")
    del args["residual"]
    rows = torch.randn(NUM_EMBEDDINGS, x.shape[-1]) * torch.logspace(-1, 1, NUM_EMBEDDINGS)[:, None]
    # the last of two columns: a batch's tokens lie apart
    tokens = torch.randint(0, NUM_EMBEDDINGS, (*x.shape[:-1], 2)).to(device)[..., 1]
    return {"tokens": tokens, "embedding": rows.to(dtype).to(device)} | args


def check_embedded(
    case: Case, dtype: torch.dtype, tile: Tile | None, has_bias: bool, device: torch.device
) -> None:
    """Compare queries, rows of the embedding, and all of the slabs with the oracle's."""
    args, slabs = split_slabs(make_embedded(case, dtype, tile, has_bias, device))
    expected, expected_slabs = split_slabs(make_embedded(case, dtype, tile, has_bias, device))
    _check(embed_norm_rope_write, embed_norm_rope_write_reference, args, tile, expected)
    _check_slabs(slabs, expected_slabs, dtype)


def check_bad_tokens(tile: Tile, device: torch.device) -> None:
    """Tokens that the embedding has no row for are rows of zeros."""
    case = Case(((2, 30), (3, 20)))
    args, _ = split_slabs(make_embedded(case, F32, tile, True, device))
    expected, _ = split_slabs(make_embedded(case, F32, tile, True, device))
    args["tokens"][0, 1:3] = torch.tensor([-1, NUM_EMBEDDINGS], device=device)
    expected["tokens"][0, 1:3] = NUM_EMBEDDINGS
    zeros = expected["embedding"].new_zeros(1, expected["embedding"].shape[1])
    expected["embedding"] = torch.cat([expected["embedding"], zeros])
    _check(embed_norm_rope_write, embed_norm_rope_write_reference, args, tile, expected)


def check_bad_places(tile: Tile, device: torch.device) -> None:
    """Rows without a place are not written; queries are computed all the same."""
    case = Case(((2, 15), (3, 20), (2, 12)))
    args, slabs = split_slabs(break_rows(make_rotation(case, F32, tile, False, device)))
    expected, expected_slabs = split_slabs(make_rotation(case, F32, tile, False, device))
    expected["slot"][:2] = -1
    expected["slot"][5:] = -1
    _check(add_norm_rope_write, add_norm_rope_write_reference, args, tile, expected)
    for slab, other in zip(slabs, expected_slabs, strict=True):
        assert_close(slab, other, F32)


def check_large_values(device: torch.device) -> None:
    """Products of x and gamma leave float16's range; the norm does not."""
    operands = make_operands((1, 3), 64, 16, F16, device) | {"bias": None}
    operands["x"] = (torch.randn(1, 3, 64) * 8000).to(F16).to(device)
    operands["gamma"] = torch.full((64,), 40.0).to(F16).to(device)
    operands["weight"] = operands["weight"] / 64
    want, _ = add_norm_linear_reference(**operands)
    assert torch.isfinite(want).all()
    for tile in few_rows.TILES[F16]:
        _check(add_norm_linear, add_norm_linear_reference, operands, tile)


def check_rounding(device: torch.device) -> None:
    """Results of float16 are too small as often as too large: nothing is cut off."""
    generator = torch.Generator().manual_seed(2)
    # of one sign, so that what is lost of each adds up
    x, gamma, weight = (
        (torch.rand(*shape, generator=generator) + 0.5).to(F16)
        for shape in ((16, 256), (256,), (64, 256))
    )
    operands = {"gamma": gamma, "eps": EPS, "unit_offset": False, "weight": weight, "bias": None}
    scale = (x.double().pow(2).mean(-1, keepdim=True) + EPS).rsqrt()
    want = (x.double() * scale * gamma.double()) @ weight.double().T
    operands |= {"x": x, "residual": torch.zeros_like(x)}
    operands = {k: v.to(device) if torch.is_tensor(v) else v for k, v in operands.items()}
    for tile in few_rows.TILES[F16]:
        with few_rows.forced(tile):
            got, _ = add_norm_linear(**operands)
        assert abs((got.cpu().double() / want - 1).mean()) < 5e-5


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    largest = want.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-3)
    error = ((got.float() - want.float()).abs() / largest).max()
    assert error <= TOLERANCE[dtype], f"{error} of the largest in a row"


def _check(
    operator: Callable[..., tuple[Tensor, Tensor]],
    reference: Callable[..., tuple[Tensor, Tensor]],
    operands: dict[str, Any],
    tile: Tile | None,
    expected: dict[str, Any] | None = None,
) -> None:
    want, want_total = reference(**(expected or operands))
    # what a tile does not take would be the library's, and nothing of it checked
    assert tile is None or tile.takes(want_total.shape[:-1].numel(), want_total.shape[-1])
    with few_rows.forced(tile):
        got, total = operator(**operands)
    dtype = operands["weight"].dtype
    assert (got.dtype, got.shape) == (dtype, want.shape)
    is_heads = operator in (add_norm_rope_write, embed_norm_rope_write)
    assert (got.transpose(0, 1) if is_heads else got).is_contiguous()
    # the stream is exact: every later layer reads it
    assert torch.equal(total, want_total)
    assert_close(got, want, dtype)
