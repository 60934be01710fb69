"""What is written into slices of a tensor is in the tensor that is read afterwards."""

from __future__ import annotations

import pytest
import torch

from specc.errors import SpeccError
from specc.passes.rewrite.normalize import Normalize
from tests.passes.modules import Tiny, aten, compiled, dense_logits, program_logits, traced
from tests.passes.modules import random_tokens as draw


class Interleaved(Tiny):
    """As Qwen3-VL takes every third column from positions along another axis of an image."""

    def after(self, x, positions):
        rows = torch.stack([x * 2, x * 3, x * 5])
        first = rows[0]
        for place in (1, 2):
            first[..., place:12:3] = rows[place, ..., place:12:3]
        return torch.cat((first, first), -1)[..., : self.width] + x


class Fresh(Tiny):
    """Into a tensor that is no view, whose slices are read later."""

    def after(self, x, positions):
        made = x * 2
        made[..., 3:7] = x[..., :4] * 7
        return made + made[..., 2:3]


class Added(Tiny):
    """As Gemma 3n adds the first of several streams to the others."""

    def after(self, x, positions):
        streams = torch.stack([x * 2, x * 3, x * 5]).contiguous()
        streams[1:] += streams[0].clone()
        return streams.sum(0)


@pytest.mark.parametrize("kind", [Interleaved, Fresh, Added])
def test_readers_see_what_was_written(kind):
    torch.manual_seed(0)
    model, tokens = kind(), draw()
    program, _ = traced(model, Normalize())
    assert not program.calls(aten.copy_.default)
    assert len(program.calls(aten.slice_scatter.default)) == (1 if kind is Fresh else 2)
    found = program_logits(compiled(model)[0], model, tokens)
    torch.testing.assert_close(found, dense_logits(model, tokens))


class ReadByAView(Tiny):
    """A view that was made before the write would see it, and is read after it."""

    def after(self, x, positions):
        made = x * 2
        early = made[..., 3:9]
        made[..., 3:7] = x[..., :4] * 7
        return made + early.sum(-1, keepdim=True)


class ReadInTheSource(Tiny):
    """The tensor that `first` is a part of is read as a whole after the write."""

    def after(self, x, positions):
        rows = torch.stack([x * 2, x * 3])
        first = rows[0]
        first[..., 3:7] = x[..., :4] * 7
        return rows.sum(0) + first


class AnotherSign(Tiny):
    """rows[-2] is rows[0]."""

    def after(self, x, positions):
        rows = torch.stack([x * 2, x * 3])
        first = rows[0]
        first[..., 3:7] = x[..., :4] * 7
        return rows[-2] + first


@pytest.mark.parametrize("kind", [ReadByAView, ReadInTheSource, AnotherSign])
def test_what_others_see_is_not_rewritten(kind):
    program, _ = traced(kind(), Normalize())
    assert program.calls(aten.copy_.default)
    with pytest.raises(SpeccError, match="in place"):
        compiled(kind())
