"""Experts that every token takes are some of a mixture's, where they have the size of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specc.kernels import ops
from tests import models
from tests.passes.modules import assert_runs_alike, aten, reasons, rewrites
from tests.passes.modules import lower_for_cuda as lower
from tests.passes.rewrite.test_fuse_latent_write import assert_latents_alike
from tests.passes.rewrite.test_fuse_latent_write import lower as lower_latents

NAME = "JoinSharedExperts"


def qwen(width: int = 48, **changes: Any) -> nn.Module:
    """Of two layers, with four experts of 48 columns between their products, and one of these."""
    changes |= {"shared_expert_intermediate_size": width}
    return models.build_model("qwen2_moe", **changes)


@pytest.mark.parametrize(
    ("name", "count", "is_gated", "changes"),
    [
        ("qwen2_moe", 1, True, {}),
        ("qwen2_moe", 3, True, {"shared_expert_intermediate_size": 144}),
        ("deepseek_v2", 2, False, {"n_shared_experts": 2, "q_lora_rank": None}),
        ("deepseek_v3", 1, False, {}),
    ],
)
def test_shared_experts_are_chosen_by_every_token(
    name: str, count: int, is_gated: bool, changes: dict[str, Any]
) -> None:
    is_latent = name.startswith("deepseek")
    changes |= {"first_k_dense_replace": 0} if is_latent else {}
    model = models.build_model(name, **changes)
    before, after, program, pipeline = (lower_latents if is_latent else lower)(model)
    assert (rewrites(pipeline, NAME), reasons(pipeline, NAME)) == (2, [])
    routes, experts = program.calls(ops.route), program.calls(ops.experts)
    assert len(routes) == len(experts) == 2
    assert not program.calls(ops.act_and_mul, aten.sigmoid.default, aten.add.Tensor)
    for layer, (route, call) in enumerate(zip(routes, experts, strict=True)):
        given, gate = route.args[-2:]
        assert given == count
        assert (gate is not None) == is_gated
        assert call.args[1].meta["val"].shape[1] == 2 + count
        parts = [program.weights[node.target].parameters for node in call.args[-2:]]
        prefix = f"model.layers.{layer}.mlp.shared_expert{'s' if is_latent else ''}"
        own = [f"{prefix}.{part}_proj.weight" for part in ("gate", "up", "down")]
        assert parts == [tuple(own[:2]), (own[2],)]
    (assert_latents_alike if is_latent else assert_runs_alike)(before, after, models.VOCAB)


class _Of(nn.Module):
    """A module that is given something else."""

    def __init__(self, module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.module, self.change = module, change

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.module(self.change(x))
        return result


def _change_of(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Any], None]:
    return lambda mlp: setattr(mlp, name, _Of(getattr(mlp, name), change))


def _activation(mlp: Any) -> None:
    mlp.shared_expert.act_fn = nn.GELU()


def _bias(mlp: Any) -> None:
    mlp.shared_expert.down_proj.bias = nn.Parameter(torch.ones(64))


STAY: dict[str, tuple[int, Callable[[Any], None]]] = {
    "24 columns between their products, where others have 48": (24, lambda mlp: None),
    "15 experts more than the 2 of a token": (720, lambda mlp: None),
    "it reads other rows": (48, _change_of("shared_expert", lambda x: 2 * x)),
    "the gate of what is added reads something else": (
        48, _change_of("shared_expert_gate", lambda x: 2 * x),
    ),
    "it has gelu between its products, not silu": (48, _activation),
    "a product of what is added has a bias, or computes its weight": (48, _bias),
}  # fmt: skip


@pytest.mark.parametrize("reason", STAY)
def test_others_stay(reason: str) -> None:
    width, change = STAY[reason]
    model: Any = qwen(width)
    for layer in model.model.layers:
        change(layer.mlp)
    before, after, program, pipeline = lower(model)
    assert (rewrites(pipeline, NAME), set(reasons(pipeline, NAME))) == (0, {reason})
    assert len(program.calls(ops.act_and_mul)) == 2
    assert_runs_alike(before, after, models.VOCAB)
