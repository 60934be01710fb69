"""Oracles of the fused operators against the formulas they stand for, written out."""

from __future__ import annotations

import math

import pytest
import torch

from specc.kernels.reference.core import (
    attend_reference,
    tree_attention_reference,
    write_kv_reference,
)
from specc.kernels.reference.fused import (
    ACTIVATIONS,
    act_and_mul_reference,
    add_rms_norm_reference,
    rms_norm_reference,
    rope_write_reference,
)

# two sequences, of 3 and 2 tokens; the last token of the first is dead
Q_START = torch.tensor([0, 3, 5], dtype=torch.int32)
SLOT = torch.tensor([2, 3, -1, 0, 1], dtype=torch.int32)
TABLE = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
# token → (block, row) where SLOT leads, in blocks of two
ROWS = {0: (1, 0), 1: (1, 1), 3: (0, 0), 4: (0, 1)}


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rms_norm(dtype, unit_offset):
    x, weight = torch.randn(3, 5, 12).to(dtype), torch.randn(12).to(dtype)
    got = rms_norm_reference(x, weight, 0.1, unit_offset)
    for row, found in zip(x.view(15, 12).double(), got.view(15, 12), strict=True):
        root = math.sqrt(sum(value.item() ** 2 for value in row) / 12 + 0.1)
        want = row / root * (weight.double() + (1 if unit_offset else 0))
        torch.testing.assert_close(found, want.to(dtype), rtol=2**-8, atol=1e-6)


def test_rms_norm_rounds_once():
    """The nearest bfloat16 of the exact result, but for ties that float32 misses."""
    x, weight = torch.randn(64, 128).bfloat16(), torch.randn(128).bfloat16()
    exact = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True)) * weight.double()
    got = rms_norm_reference(x, weight, 0.0)
    assert (got != exact.to(torch.bfloat16)).float().mean() < 1e-3


def test_add_rms_norm_normalizes_the_rounded_sum():
    x, residual = torch.randn(2, 8, 32).bfloat16().unbind(0)
    weight = torch.randn(32).bfloat16()
    got, total = add_rms_norm_reference(x, residual, weight, 1e-3, True)
    assert torch.equal(total, x + residual)
    assert torch.equal(got, rms_norm_reference(total, weight, 1e-3, True))


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("silu", lambda x: x / (1 + math.exp(-x))),
        ("gelu", lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2),
        (
            "gelu_tanh",
            lambda x: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
        ),
        ("relu", lambda x: max(x, 0.0)),
    ],
)
def test_act_and_mul(name, function):
    x = 3 * torch.randn(4, 10)
    want = torch.tensor([[function(row[i]) * row[5 + i] for i in range(5)] for row in x.tolist()])
    torch.testing.assert_close(act_and_mul_reference(x, name), want)
    assert name in ACTIVATIONS


@pytest.mark.parametrize("size", [8, 4, 2])
def test_rope_write_turns_pairs(size):
    """Columns (i, i + R/2) are a point in a plane, turned by each token's angle."""
    q, k, v = torch.randn(4, 5, 8), torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    angles = torch.rand(5, size // 2) * 6
    cos, sin = (torch.cat([f(angles)] * 2, dim=-1) for f in (torch.cos, torch.sin))
    caches = torch.zeros(2, 4, 2, 2, 8)
    got = rope_write_reference(q, k, v, cos, sin, *caches, Q_START, SLOT, TABLE)
    for t in range(5):
        for i in range(size // 2):
            turn = torch.polar(torch.tensor(1.0), angles[t, i])
            pair = torch.complex(q[:, t, i], q[:, t, i + size // 2]) * turn
            torch.testing.assert_close(got[:, t, i], pair.real)
            torch.testing.assert_close(got[:, t, i + size // 2], pair.imag)
    assert torch.equal(got[:, :, size:], q[:, :, size:])
    rotated = rope_write_reference(
        k, k, v, cos, sin, *torch.zeros(2, 4, 2, 2, 8), Q_START, SLOT, TABLE
    )
    written = torch.zeros(4, 2, dtype=torch.bool)
    for token, (block, row) in ROWS.items():
        assert torch.equal(caches[0][block, row], rotated[:, token])
        assert torch.equal(caches[1][block, row], v[:, token])
        written[block, row] = True
    assert caches[:, ~written].abs().max() == 0


def test_each_half_has_its_own_columns():
    q = torch.randn(1, 5, 4)
    cos, sin = torch.randn(5, 4), torch.randn(5, 4)
    got = rope_write_reference(
        q, q, q, cos, sin, *torch.zeros(2, 4, 2, 1, 4), Q_START, SLOT, TABLE
    )[0]
    a, b = q[0, :, :2], q[0, :, 2:]
    torch.testing.assert_close(got[:, :2], a * cos[:, :2] - b * sin[:, :2])
    torch.testing.assert_close(got[:, 2:], b * cos[:, 2:] + a * sin[:, 2:])


@pytest.mark.parametrize("ancestors", [None, torch.tensor([[1], [2], [0], [1], [3]])])
def test_write_and_attend_are_tree_attention(ancestors):
    q, k, v = torch.randn(4, 5, 8), torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    cache_len = torch.tensor([2, 0], dtype=torch.int32)
    position = SLOT.clamp(min=0).long()
    first, second = torch.randn(2, 4, 2, 2, 8).repeat(2, 1, 1, 1, 1).split(2)
    inputs = Q_START, position, SLOT, cache_len, ancestors, TABLE
    want = tree_attention_reference(q, k, v, *first, *inputs, scale=0.3, window=3, sink=1)
    write_kv_reference(k, v, *second, Q_START, SLOT, TABLE)
    got = attend_reference(q, *second, *inputs, scale=0.3, window=3, sink=1)
    assert torch.equal(got, want)
    assert torch.equal(first, second)
