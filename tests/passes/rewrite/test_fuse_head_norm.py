"""Norms of the heads of q and k go into their rotation where nothing else reads them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from specc.kernels import ops
from specc.passes.rewrite.fuse_head_norm import FuseHeadNorm
from specc.passes.rewrite.fuse_rope_write import FuseRopeWrite, attention_reads_caches
from tests.passes.modules import Runner, Tiny, assert_runs_alike, traced
from tests.passes.rewrite.test_fuse_rope_write import LAYOUT, Partial, Rotary


class Normalized(Rotary):
    """Qwen 3: q and k have weights of their own, and all heads of either the same."""

    eps = 1e-2, 1e-2
    unit_offset = False

    def __init__(self):
        super().__init__()
        self.gammas = nn.ParameterList(torch.randn(self.head_dim) for _ in range(2))

    def rotate_both(self, q, k, cos, sin):
        rows = (self.norm(x, i) for i, x in enumerate((q, k)))
        return super().rotate_both(*rows, cos, sin)

    def norm(self, x, i):
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps[i])
        if self.unit_offset:
            return (x.float() * scale * (1.0 + self.gammas[i].float())).to(x.dtype)
        return self.gammas[i] * (x.float() * scale).to(x.dtype)


class Gemma(Normalized):
    unit_offset = True


class PartOfHeads(Normalized, Partial):
    """GLM-4.5: all of a head is normalized, its first columns are rotated."""


class BeforeHeadsMove(Normalized):
    """The norm as transformers has it: of [1, T, H, D], which is transposed after it."""

    def norm(self, x, i):
        return super().norm(x.transpose(1, 2), i).transpose(1, 2)


def run(kind):
    torch.manual_seed(0)
    model = kind().eval()
    program, _ = traced(model, *(item() for item in LAYOUT), FuseRopeWrite())
    before = Runner(program, model)
    result = FuseHeadNorm().run(program)
    program.graph.lint()
    return before, Runner(program, model), program, result


@pytest.mark.parametrize("kind", [Normalized, Gemma, PartOfHeads, BeforeHeadsMove])
def test_fires_and_computes_the_same(kind):
    before, after, program, result = run(kind)
    assert (result.rewrites, result.declined) == (1, [])
    assert not program.calls(ops.rms_norm, ops.rope_write)
    (write,) = program.calls(ops.norm_rope_write)
    assert write.args[5:7] == (1e-2, kind.unit_offset)
    assert attention_reads_caches(program)
    assert_runs_alike(before, after)


class OfQueries(Normalized):
    def rotate_both(self, q, k, cos, sin):
        return Rotary.rotate_both(self, self.norm(q, 0), k, cos, sin)


class OfKeys(Normalized):
    def rotate_both(self, q, k, cos, sin):
        return Rotary.rotate_both(self, q, self.norm(k, 1), cos, sin)


class OtherEps(Normalized):
    eps = 1e-2, 2e-2


class ReadElsewhere(Normalized):
    """Values are normalized keys."""

    def attend(self, q, k, v, positions):
        k = self.norm(k, 1)
        q, turned = Rotary.rotate_both(self, self.norm(q, 0), k, *self.tables(positions))
        return Tiny.attend(self, q, self.repeat(turned), self.repeat(k), positions)


class MovedColumns(Normalized):
    """Columns change places with heads after the norm."""

    head_dim, size, num_heads, num_kv_heads = 4, 4, 4, 4

    def norm(self, x, i):
        return super().norm(x, i).transpose(1, 3)

    def repeat(self, x):
        return x


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (OfQueries, "k has no norm of its heads"),
        (OfKeys, "q has no norm of its heads"),
        (OtherEps, "eps and unit_offset are 0.01, False of q, and [0.02, False] of k"),
        (ReadElsewhere, "the normalized k, is used elsewhere too"),
        (MovedColumns, "moves the columns of q"),
    ],
)
def test_is_declined_with_reason(kind, reason):
    before, after, program, result = run(kind)
    assert result.rewrites == 0
    (declined,) = result.declined
    assert reason in declined.reason
    assert program.calls(ops.rope_write)
    assert program.calls(ops.rms_norm)
    assert_runs_alike(before, after)


class OfAllHeads(Rotary):
    """OLMo 2: a norm of all that a projection returns, cut into heads after it."""

    def __init__(self):
        super().__init__()
        self.gammas = nn.ParameterList(torch.randn(x.out_features) for x in (self.q, self.k))

    def operands(self, x):
        q, k, v = (item(x) for item in (self.q, self.k, self.v))
        return tuple(map(self.split, (self.norm(q, 0), self.norm(k, 1), v)))

    def norm(self, x, i):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.gammas[i] * (x * scale)


@pytest.mark.parametrize("kind", [Rotary, OfAllHeads])
def test_norms_that_are_not_of_heads_stay(kind):
    _, _, program, result = run(kind)
    assert (result.rewrites, result.declined) == (0, [])
    assert len(program.calls(ops.rms_norm)) == (2 if kind is OfAllHeads else 0)
    assert program.calls(ops.rope_write)
