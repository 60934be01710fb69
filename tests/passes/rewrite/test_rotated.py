"""Rotary embedding whose halves are rotated apart, as gpt-oss writes it, and what only looks so."""

from __future__ import annotations

import pytest
import torch

from specc.kernels import ops
from tests.passes.modules import assert_runs_alike, aten
from tests.passes.rewrite.test_fuse_rope_write import FORM, Partial, Rotary, run


class Halves(Rotary):
    """Tables have half of the columns."""

    def tables(self, positions):
        angles = positions[:, :, None].float() * self.frequencies
        return angles.cos().to(self.weight.dtype), angles.sin().to(self.weight.dtype)

    def rotate(self, x, cos, sin):
        first, second = torch.chunk(x, 2, dim=-1)
        return torch.cat(self.halves(first, second, cos.unsqueeze(1), sin.unsqueeze(1)), dim=-1)

    def halves(self, first, second, cos, sin):
        return first * cos - second * sin, second * cos + first * sin


class OtherOrder(Halves):
    def halves(self, first, second, cos, sin):
        return cos * first - sin * second, sin * first + cos * second


class Sliced(Halves):
    def rotate(self, x, cos, sin):
        halves = self.halves(x[..., :4], x[..., 4:], cos[:, None], sin[:, None])
        return torch.cat(halves, dim=-1)


class PartialHalves(Partial, Halves):
    """The first four columns alone."""

    tables = Halves.tables

    def rotate(self, x, cos, sin):
        first, rest = x[..., : self.size], x[..., self.size :]
        return torch.cat((Halves.rotate(self, first, cos, sin), rest), dim=-1)


class WholeTables(Halves):
    """One half has other columns of its tables than the other, in the code of rotate_half."""

    tables = Rotary.tables
    rotate = Rotary.rotate


@pytest.mark.parametrize("kind", [Halves, OtherOrder, Sliced, PartialHalves, WholeTables])
def test_halves_are_rotated_by_the_cache_write(kind):
    before, after, program, (fused, split) = run(kind)
    assert (fused.rewrites, split.rewrites) == (1, 0)
    (rope,) = program.calls(ops.rope_write)
    assert {int(rope.args[i].meta["val"].shape[-1]) for i in (3, 4)} == {kind.size}
    assert not program.calls(aten.sub.Tensor)
    assert_runs_alike(before, after)


class Turned(Halves):
    """By the opposite angle."""

    def halves(self, first, second, cos, sin):
        return first * cos + second * sin, second * cos - first * sin


class Exchanged(Halves):
    def halves(self, first, second, cos, sin):
        return first * sin - second * cos, second * cos + first * sin


class OneHalf(Halves):
    def halves(self, first, second, cos, sin):
        return first * cos - first * sin, first * cos + first * sin


class Pairs(Halves):
    """DeepSeek V3: neighbors."""

    def rotate(self, x, cos, sin):
        halves = self.halves(x[..., ::2], x[..., 1::2], cos[:, None], sin[:, None])
        return torch.cat(halves, dim=-1)


class SecondFirst(Halves):
    def rotate(self, x, cos, sin):
        halves = self.halves(x[..., 4:], x[..., :4], cos[:, None], sin[:, None])
        return torch.cat(halves, dim=-1)


class Weighted(Halves):
    def halves(self, first, second, cos, sin):
        return first * cos - second * sin, torch.add(second * cos, first * sin, alpha=2)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Turned, FORM),
        (Exchanged, FORM),
        (OneHalf, FORM),
        (Pairs, "rotary embedding of interleaved pairs"),
        (SecondFirst, FORM),
        (Weighted, FORM),
    ],
)
def test_other_sums_of_halves_are_declined(kind, reason):
    before, after, _, (fused, split) = run(kind)
    assert (fused.rewrites, split.rewrites) == (0, 1)
    assert reason in fused.declined[0].reason
    assert_runs_alike(before, after)
