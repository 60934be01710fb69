"""Masks over experts of other ranks go where no id can be one of theirs, and stay elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from specc.kernels import ops
from specc.passes.rewrite.drop_sentinel_masks import DropSentinelMasks
from specc.passes.rewrite.normalize import Normalize
from tests import models
from tests.models import build_model
from tests.passes.modules import Runner, Tiny, assert_runs_alike, aten, compiled, rewrites, traced
from tests.passes.rewrite.test_fuse_experts import lower

EXPERTS = 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_a_mixture_with_masks_is_that_without(name):
    """Version 5.17 of transformers has the masks in every mixture; later ones where this is set."""
    model, masked = build_model(name), build_model(name)
    for module in masked.modules():
        if hasattr(module, "_is_expert_parallel"):
            module._is_expert_parallel = True
    program, pipeline = compiled(masked)
    assert rewrites(pipeline, "DropSentinelMasks") == 3 * len(program.layers) == 6
    assert not program.calls(aten.masked_fill.Scalar, aten.ge.Scalar)
    _, after, lowered, cuda = lower(masked)
    assert rewrites(cuda, "FuseExperts") == 2
    assert len(lowered.calls(ops.experts)) == 2
    plain, _ = compiled(model)
    assert_runs_alike(Runner(plain, model), after, models.VOCAB)


class Masked(Tiny):
    """Rows that a mask hides, as a mixture does it, or nearly."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.router = nn.Linear(self.width, EXPERTS, bias=False)

    def after(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        rows = x[0]
        _, ids = torch.topk(self.router(rows), 2)
        by_expert, order = torch.sort(ids.reshape(-1))
        if self.kind == "places of the sort":
            by_expert = order
        if self.kind == "sums":
            by_expert = by_expert + 1
        if self.kind == "positions":
            by_expert = positions[0].repeat(2)
        bound = {"one expert fewer": EXPERTS - 1, "one more": EXPERTS + 1}.get(self.kind, EXPERTS)
        source = rows[order // 2]
        if self.kind == "of one row":
            source = rows[:1]
        chosen = source.masked_fill((by_expert >= bound).unsqueeze(-1), 0.0)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.shape[0])
        return chosen[inverse].view(-1, 2, self.width).sum(1)[None]


@pytest.mark.parametrize(
    ("kind", "dropped"),
    [
        ("of all experts", 1),
        ("one more", 1),
        ("one expert fewer", 0),
        ("places of the sort", 0),
        ("sums", 0),
        ("positions", 0),
        # a mask has rows that what it hides has not
        ("of one row", 0),
    ],
)
def test_only_what_hides_nothing_is_dropped(kind, dropped):
    program, (_, result) = traced(Masked(kind).eval(), Normalize(), DropSentinelMasks())
    assert result.rewrites == dropped
    assert len(program.calls(aten.masked_fill.Scalar)) == 1 - dropped
    assert [item.reason for item in result.declined] == (
        [f"ids below {EXPERTS}, of {EXPERTS - 1} experts here"] * (kind == "one expert fewer")
    )
