"""Oracles of products with norm and epilogue: those of their parts, one after the other."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from specc.kernels import ops
from specc.kernels.reference.fused import (
    act_and_mul_reference,
    add_rms_norm_reference,
    rms_norm_reference,
    rope_write_reference,
)

EPS = 1e-5
X, RESIDUAL, GAMMA = *torch.randn(2, 1, 4, 24).unbind(), torch.randn(24)
WEIGHT, BIAS = torch.randn(32, 24), torch.randn(32)
NORM = (X, RESIDUAL, GAMMA, EPS)
COS, SIN = torch.randn(2, 4, 4)
Q_START, SLOT = torch.tensor([0, 4]).int(), torch.tensor([5, 6, -1, 7]).int()
TABLE = torch.tensor([[1, 2, 0, 3]]).int()


def caches() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(4, 3, 2, 4), torch.zeros(4, 3, 2, 4)


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("bias", [None, BIAS], ids=["plain", "bias"])
def test_add_norm_linear(unit_offset, bias):
    normed, total = add_rms_norm_reference(*NORM, unit_offset)
    y, stream = ops.add_norm_linear(*NORM, unit_offset, WEIGHT, bias)
    assert torch.equal(stream, total)
    torch.testing.assert_close(y, functional.linear(normed, WEIGHT, bias), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_add_norm_gate_up(activation):
    normed, total = add_rms_norm_reference(*NORM, False)
    y, stream = ops.add_norm_gate_up(*NORM, False, WEIGHT, activation)
    want = act_and_mul_reference(functional.linear(normed, WEIGHT), activation)
    assert torch.equal(stream, total)
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)


def test_add_norm_rope_write():
    normed, total = add_rms_norm_reference(*NORM, False)
    heads = functional.linear(normed, WEIGHT, BIAS).view(4, 8, 4).transpose(0, 1)
    found, wanted = caches(), caches()
    places = (Q_START, SLOT, TABLE)
    want = rope_write_reference(*heads.split([4, 2, 2]), COS, SIN, *wanted, *places)
    got, stream = ops.add_norm_rope_write(*NORM, False, WEIGHT, BIAS, COS, SIN, *found, *places)
    assert torch.equal(stream, total)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert got.stride() == want.stride()
    for cache, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(cache, other, rtol=1e-5, atol=1e-5)
    assert found[0].abs().sum() > 0


def test_embed_norm_rope_write():
    table, tokens = torch.randn(9, 24), torch.tensor([[3, 0, 3, 8]])
    normed = rms_norm_reference(table[tokens], GAMMA, EPS, True)
    heads = functional.linear(normed, WEIGHT, BIAS).view(4, 8, 4).transpose(0, 1)
    found, wanted = caches(), caches()
    places = (Q_START, SLOT, TABLE)
    want = rope_write_reference(*heads.split([4, 2, 2]), COS, SIN, *wanted, *places)
    norm = (tokens, table, GAMMA, EPS, True)
    got, rows = ops.embed_norm_rope_write(*norm, WEIGHT, BIAS, COS, SIN, *found, *places)
    assert torch.equal(rows, table[tokens])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for cache, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(cache, other, rtol=1e-5, atol=1e-5)
    assert found[0].abs().sum() > 0


@pytest.mark.parametrize("bias", [None, BIAS], ids=["plain", "bias"])
def test_add_norm_head(bias):
    rows = torch.tensor([3, 1, 3])
    normed, _ = add_rms_norm_reference(*NORM, False)
    got = ops.add_norm_head(*NORM, False, WEIGHT, bias, rows)
    want = functional.linear(normed[:, rows], WEIGHT, bias)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
