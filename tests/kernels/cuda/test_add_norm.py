"""Products with norm and residual before, and gate or rotation after, equal their oracles."""

from __future__ import annotations

import itertools

import pytest
import torch

from specc.kernels.cuda import few_rows
from specc.kernels.cuda.add_norm_gate_up import add_norm_gate_up
from specc.kernels.cuda.add_norm_linear import add_norm_linear
from specc.kernels.cuda.few_rows import Choice, Product, forced, tile_for
from specc.kernels.cuda.few_rows_tiles import Tile
from tests.kernels.cuda.cases_add_norm import (
    BF16,
    DTYPES,
    F16,
    F32,
    GATED,
    HEADS,
    LINEAR,
    ROTATED,
    TILES,
    check_bad_places,
    check_bad_rows,
    check_bad_tokens,
    check_embedded,
    check_gate_up,
    check_head,
    check_large_values,
    check_linear,
    check_rotated,
    check_rounding,
    check_rows_apart,
    make_operands,
)

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]


def _id(value: object) -> str:
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    if isinstance(value, Tile):
        return f"{value.name}x{value.splits}" if value.splits > 1 else value.name
    return str(value).removeprefix("torch.")


def ids(cases: tuple[tuple, ...]) -> list[str]:
    return ["-".join(map(_id, case)) for case in cases]


@pytest.mark.parametrize("case", LINEAR, ids=ids(LINEAR))
def test_add_norm_linear(case, device):
    check_linear(*case, device)


@pytest.mark.default(
    "1x1-1024-48-bfloat16-vector-n4-silu",
    "1-1024-33-bfloat16-vector-n4-gelu_tanh",
    "1x1-512-130-bfloat16-vector-n16-gelu",
    "8-512-33-bfloat16-swap-n16-silu",
    "2x4-512-7-bfloat16-swap-n16-gelu_tanh",
    "1x1-256-48-bfloat16-swap-n64-silu",
    "1x3-256-16-bfloat16-swap-n64-relu",
    "2x4-384-7-bfloat16-joined-n64-silu",
    "1x5-256-70-bfloat16-joined-n64-relu",
    "2x4-264-7-bfloat16-n32-gelu_tanh",
    "1x11-96-130-bfloat16-n32-relu",
    "16-130-33-bfloat16-None-gelu_tanh",
    "1x11-96-130-float16-n16-gelu",
    "16-130-33-float16-None-silu",
    "1x11-96-130-float16-None-relu",
    "16-130-33-float32-n16-gelu_tanh",
    "1x11-96-130-float32-None-gelu",
)
@pytest.mark.parametrize("case", GATED, ids=ids(GATED))
def test_add_norm_gate_up(case, device):
    check_gate_up(*case, device)


@pytest.mark.parametrize("case", HEADS, ids=ids(HEADS))
def test_add_norm_head(case, device):
    check_head(*case, device)


PAIRS = tuple(itertools.product(ROTATED, TILES))
PAIR_IDS = ids(tuple((name, *tile) for name, tile in PAIRS))


def _check_pair(name, tile, device):
    place = list(ROTATED).index(name) + TILES.index(tile)
    check_rotated(ROTATED[name], *tile, bool(place % 2), device)


# every tile and every case; the slow tier has all pairs of them
@pytest.mark.default(
    "decode-bfloat16-n32",
    "decode-float32-None",
    "one-token-float32-n16",
    "tree-float16-None",
    "odd-half-float16-n16",
    "odd-pages-bfloat16-None",
    "dense-float32-None",
    "dead-tokens-float32-n16",
    "many-sequences-bfloat16-swap-n64",
    "wider-cache-bfloat16-swap-n16",
)
@pytest.mark.parametrize(("name", "tile"), PAIRS[::5], ids=PAIR_IDS[::5])
def test_add_norm_rope_write(name, tile, device):
    _check_pair(name, tile, device)


def test_the_quick_tier_has_every_tile_and_case():
    assert {name for name, _ in PAIRS[::5]} == set(ROTATED)
    assert {tile for _, tile in PAIRS[::5]} == set(TILES)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tile"), PAIRS, ids=PAIR_IDS)
def test_add_norm_rope_write_with_every_tile(name, tile, device):
    _check_pair(name, tile, device)


def _check_embedded(name, tile, device):
    place = list(ROTATED).index(name) + TILES.index(tile)
    check_embedded(ROTATED[name], *tile, bool(place % 2), device)


# the same kernel after the product: fewer pairs, and still every tile and every case
@pytest.mark.parametrize(("name", "tile"), PAIRS[3::6], ids=PAIR_IDS[3::6])
def test_embed_norm_rope_write(name, tile, device):
    _check_embedded(name, tile, device)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tile"), PAIRS, ids=PAIR_IDS)
def test_embed_norm_rope_write_with_every_tile(name, tile, device):
    _check_embedded(name, tile, device)


KERNELS = tuple(item for item in TILES if item[1])
every_kernel = pytest.mark.parametrize(("dtype", "tile"), KERNELS, ids=ids(KERNELS))


@every_kernel
def test_bad_rows(dtype, tile, device):
    check_bad_rows(dtype, tile, device)


@pytest.mark.parametrize("tile", few_rows.TILES[F32], ids=_id)
def test_bad_tokens_and_places(tile, device):
    check_bad_tokens(tile, device)
    check_bad_places(tile, device)


@every_kernel
def test_rows_do_not_depend_on_others(dtype, tile, device):
    check_rows_apart(dtype, tile, device)


def test_values_beyond_float16(device):
    check_large_values(device)


def test_float16_is_not_cut_off(device):
    check_rounding(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=ids(tuple((d,) for d in DTYPES)))
def test_no_rows(dtype, device):
    operands = make_operands((0,), 8, 6, dtype, device)
    with forced(0):
        out, total = add_norm_linear(**operands, bias=None)
        gated, _ = add_norm_gate_up(**operands, activation="silu")
    assert (out.shape, total.shape, gated.shape) == ((0, 6), (0, 8), (0, 3))


def test_the_library_has_what_nobody_measured(device):
    operands = make_operands((1, 4), 256, 8, BF16, device)
    weight = operands["weight"]
    assert tile_for("add_norm_linear", 4, weight) is None
    product = Product.of("add_norm_linear", 4, weight)
    few_rows.choices[product] = Choice.of(product.tiles[1])
    try:
        assert tile_for("add_norm_linear", 4, weight) == product.tiles[1]
        # rows of one bucket share a choice; other rows, shapes and operators do not
        assert tile_for("add_norm_linear", 3, weight) == product.tiles[1]
        assert tile_for("add_norm_linear", 2, weight) is None
        assert tile_for("add_norm_gate_up", 4, weight) is None
        assert tile_for("add_norm_linear", 4, weight[:4]) is None
        with forced(None):
            assert tile_for("add_norm_linear", 4, weight) is None
    finally:
        del few_rows.choices[product]


def test_many_rows_are_the_librarys(device):
    operands = make_operands((17,), 16, 8, F16, device)
    with forced(0):
        assert tile_for("add_norm_linear", 17, operands["weight"]) is None
        assert tile_for("add_norm_linear", 16, operands["weight"]) is not None
        check_linear((17,), 16, 8, F16, None, True, False, device)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"residual": torch.zeros(1, 3, 16)}, "found residual"),
        ({"gamma": torch.zeros(15)}, "found gamma"),
        ({"weight": torch.zeros(8, 15)}, "found weight"),
        ({"weight": torch.zeros(16, 8).T}, "found weight"),
        ({"bias": torch.zeros(7)}, "found bias"),
        ({"x": torch.zeros(1, 4, 16, dtype=torch.float64)}, "found x"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_input_is_refused(change, found, device):
    operands = make_operands((1, 4), 16, 8, F32, device) | {"bias": None}
    with pytest.raises(ValueError, match=found):
        add_norm_linear(**(operands | {k: v.to(device) for k, v in change.items()}))


def test_bad_gates_are_refused(device):
    operands = make_operands((1, 4), 16, 7, F32, device)
    with pytest.raises(ValueError, match=r"needed \[2 I, K\]"):
        add_norm_gate_up(**operands, activation="silu")
    operands = make_operands((1, 4), 16, 8, F32, device)
    with pytest.raises(ValueError, match="found swish"):
        add_norm_gate_up(**operands, activation="swish")
