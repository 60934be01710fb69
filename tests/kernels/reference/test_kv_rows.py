"""Quantized rows: what is stored of a row, and what attention and votes read of it.

Bytes are decoded by `struct`, one row at a time; expected outputs are loops over Python floats.
"""

from __future__ import annotations

import math
import struct

import pytest
import torch
from torch import Tensor

from specc.artifact.kv_rows import AUTO, FP8, INT8, SCALE_BYTES, kind_of, row_bytes, stored_row
from specc.kernels import ops
from specc.kernels.reference.kv_rows import hadamard_reference, read_rows, store_rows

DIM, HEADS, KV_HEADS, BLOCK = 5, 4, 2, 3
# slots 0 … 6 are committed, then a tree of five nodes
PARENTS = (-1, 0, 0, 1, 2)
LENGTH = 7


I8, U8 = torch.int8, torch.uint8


def decode_e4m3(code: int) -> float:
    """OCP 8-bit floating point, §5.2: four bits of exponent, three of mantissa, no infinity."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    value = math.ldexp(8 * (exponent > 0) + mantissa, max(exponent, 1) - 10)
    return math.nan if code & 127 == 127 else -value if code & 128 else value


NUMBERS = {I8: range(-127, 128), U8: [decode_e4m3(x) for x in range(256) if x & 127 != 127]}


def codes_of(row: Tensor) -> list[float]:
    data = bytes(x & 0xFF for x in row.tolist())[:-4]
    if row.dtype == I8:
        return list(struct.unpack(f"{len(data)}b", data))
    return [decode_e4m3(x) for x in data]


def decode(row: Tensor) -> list[float]:
    (scale,) = struct.unpack("=f", bytes(x & 0xFF for x in row[-4:].tolist()))
    return [code * scale for code in codes_of(row)]


@pytest.mark.parametrize("stored", [I8, U8])
def test_no_other_codes_are_nearer(stored: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = torch.randn(100, 17) * torch.logspace(-20, 20, 100)[:, None]
    # powers of two apart, as fp8 has numbers below its normal ones
    rows[:, 3:] *= torch.logspace(0, -20, 14, base=2)
    largest = max(NUMBERS[stored])
    for row, found in zip(rows, store_rows(rows, stored), strict=True):
        scale = float(row.abs().max()) / largest
        assert max(abs(code) for code in codes_of(found)) == largest
        for x, y in zip(row.tolist(), decode(found), strict=True):
            nearest = min(abs(x - code * scale) for code in NUMBERS[stored])
            assert abs(x - y) <= 1.0001 * nearest + 1e-6 * abs(x)
    codes = codes_of(store_rows(rows, stored)[0])
    assert codes_of(store_rows(-rows, stored)[0]) == [-code for code in codes]


def test_values_are_as_near_as_codes_can_be() -> None:
    torch.manual_seed(0)
    rows = torch.randn(300, 17) * torch.logspace(-20, 20, 300)[:, None]
    for row, stored in zip(rows, store_rows(rows, torch.int8), strict=True):
        scale = float(row.abs().max()) / 127
        assert max(abs(code) for code in stored[:-SCALE_BYTES].tolist()) == 127
        for x, found in zip(row.tolist(), decode(stored), strict=True):
            assert abs(x - found) <= 0.5001 * scale
    assert torch.equal(store_rows(-rows, torch.int8)[:, :17], -store_rows(rows, torch.int8)[:, :17])


def test_ties_go_to_even_codes() -> None:
    row = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.49, -126.5])
    assert store_rows(row, torch.int8)[:9].tolist() == [127, 0, 2, 2, 0, -2, -2, 0, -126]
    # of fp8, to even mantissas: 17 and 19 lie between 16, 18 and 20, and 2^-10 between 0 and 2^-9
    row = torch.tensor([448.0, 17.0, 19.0, -17.0, -19.0, 2**-10, 3 * 2**-10, 1.01 * 2**-10])
    wanted = [448, 16, 20, -16, -20, 0, 2**-8, 2**-9]
    assert codes_of(store_rows(row, torch.uint8)) == wanted


@pytest.mark.parametrize("kind", [I8, U8])
def test_zeros_and_bad_rows(kind: torch.dtype) -> None:
    rows = torch.tensor([[0.0, 0.0], [1e-35, -1e-36], [1.0, math.nan], [math.inf, 2.0]])
    stored = store_rows(rows, kind)
    assert [decode(row) for row in stored[:2]] == [[0.0, 0.0]] * 2
    assert all(math.isnan(x) for row in stored[2:] for x in decode(row))
    assert read_rows(stored)[2:].isnan().all()
    assert (stored[2:, :-SCALE_BYTES] == 0).all()


@pytest.mark.parametrize("kind", [I8, U8])
def test_rows_are_read_as_they_are_stored(kind: torch.dtype) -> None:
    rows = store_rows(torch.randn(2, 3, 4, 6), kind)
    found = read_rows(rows).view(-1, 6).tolist()
    for row, values in zip(rows.view(-1, 10), found, strict=True):
        assert values == pytest.approx(decode(row), rel=1e-6)


def test_sizes() -> None:
    assert stored_row(64, torch.bfloat16, INT8) == (68, torch.int8)
    assert stored_row(64, torch.bfloat16, AUTO) == (64, torch.bfloat16)
    assert stored_row(64, torch.bfloat16, FP8) == (68, torch.uint8)
    assert [kind_of(stored_row(64, torch.float16, x)[1]) for x in (AUTO, INT8, FP8)] == [
        AUTO,
        INT8,
        FP8,
    ]
    assert row_bytes(64, torch.float32, INT8) == 68
    assert row_bytes(64, torch.float32, AUTO) == 256


class Pass:
    """A tree after some committed rows, with quantized caches in blocks of any order."""

    def __init__(self, kind: torch.dtype) -> None:
        torch.manual_seed(4)
        self.blocks = [4, 1, 3, 2]
        self.caches = [store_rows(torch.randn(6, BLOCK, KV_HEADS, DIM), kind) for _ in range(2)]
        self.q = torch.randn(HEADS, 5, DIM)
        self.k, self.v = torch.randn(2, KV_HEADS, 5, DIM) * 3
        self.paths = []
        for node, parent in enumerate(PARENTS):
            self.paths.append([*(self.paths[parent] if parent >= 0 else []), node])
        slots = torch.arange(LENGTH, LENGTH + 5)
        depths = torch.tensor([len(path) - 1 for path in self.paths])
        self.rest = (
            torch.tensor([0, 5], dtype=torch.int32), LENGTH + depths, slots.int(),
            torch.tensor([LENGTH], dtype=torch.int32),
            torch.tensor([[sum(1 << node for node in path)] for path in self.paths]),
            torch.tensor([self.blocks], dtype=torch.int32),
        )  # fmt: skip

    def row(self, part: int, slot: int, head: int) -> list[float]:
        return decode(self.caches[part][self.blocks[slot // BLOCK], slot % BLOCK, head])

    def weights(self, node: int, head: int) -> dict[int, float]:
        """Slot → weight; every row, the tree's own, too, is what the cache holds of it."""
        query = self.q[head, node].tolist()
        seen = [*range(LENGTH), *(LENGTH + other for other in self.paths[node])]
        scores = {
            slot: sum(x * y for x, y in zip(query, self.row(0, slot, head // 2), strict=True))
            for slot in seen
        }
        powers = {slot: math.exp(score) for slot, score in scores.items()}
        return {slot: power / sum(powers.values()) for slot, power in powers.items()}


@pytest.mark.parametrize("kind", [I8, U8])
def test_attention_reads_the_rows_of_its_own_pass_as_they_are_stored(kind: torch.dtype) -> None:
    made = Pass(kind)
    out = ops.tree_attention(made.q, made.k, made.v, *made.caches, *made.rest, scale=1.0)
    for node in range(5):
        for head in range(HEADS):
            wanted = [0.0] * DIM
            for slot, weight in made.weights(node, head).items():
                for d, value in enumerate(made.row(1, slot, head // 2)):
                    wanted[d] += weight * value
            assert out[head, node].tolist() == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    # what was stored is what was given, to half a code, which is largest at the largest value
    half = 0.5001 / 127 if kind == I8 else 16.001 / 448
    for part, given in enumerate((made.k, made.v)):
        for node in range(5):
            for head in range(KV_HEADS):
                row = given[head, node]
                found = torch.tensor(made.row(part, LENGTH + node, head))
                assert (found - row).abs().max() <= half * row.abs().max()


@pytest.mark.parametrize("kind", [I8, U8])
def test_votes_read_values(kind: torch.dtype) -> None:
    made = Pass(kind)
    ops.tree_attention(made.q, made.k, made.v, *made.caches, *made.rest, scale=1.0)
    mass = torch.zeros(1, 4)
    ops.block_mass(made.q, made.caches[0], *made.rest, mass, scale=1.0)
    wanted = [0.0] * 4
    for node in range(5):
        for head in range(HEADS):
            for slot, weight in made.weights(node, head).items():
                wanted[slot // BLOCK] += weight
    assert mass[0].tolist() == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("kind", [I8, U8])
def test_rows_move_with_their_scales(kind: torch.dtype) -> None:
    made = Pass(kind)
    slab = torch.stack(made.caches)[None]
    wanted = [made.row(part, 9, head) for part in range(2) for head in range(KV_HEADS)]
    source, target = torch.tensor([[9]]), torch.tensor([[2]])
    ops.commit_kv(slab, source, target, made.rest[-1])
    made.caches = list(slab[0])
    assert [made.row(part, 2, head) for part in range(2) for head in range(KV_HEADS)] == wanted


@pytest.mark.parametrize("columns", [1, 6, 7, 8, 96])
def test_hadamard_matrix(columns: int) -> None:
    """Signs by the bits that two numbers share, in blocks of the largest power of two."""
    size = math.gcd(columns, 128)
    number = torch.arange(columns)
    place = number % size
    shared = (place[:, None] & place).unsqueeze(-1) >> torch.arange(7) & 1
    signs = 1.0 - 2.0 * (shared.sum(-1) % 2)
    is_block = number[:, None] // size == number // size
    matrix = torch.where(is_block, signs / math.sqrt(size), 0.0)
    x = torch.randn(3, columns)
    torch.testing.assert_close(hadamard_reference(x), x @ matrix)
    torch.testing.assert_close(hadamard_reference(hadamard_reference(x)), x)
    assert hadamard_reference(x.bfloat16()).dtype == torch.bfloat16


def test_keys_with_a_large_column_lose_less_when_mixed() -> None:
    """Scores of int8 keys: a column a hundred times the others leaves these a code or two."""
    torch.manual_seed(0)
    q, k = torch.randn(50, 64), torch.randn(200, 64)
    k[:, 3] *= 100
    q[:, 3] /= 100
    wanted, errors = q @ k.T, []
    for queries, keys in ((q, k), (hadamard_reference(q), hadamard_reference(k))):
        errors.append(float((queries @ read_rows(store_rows(keys, I8)).T - wanted).abs().mean()))
    assert errors[1] < errors[0] / 5
