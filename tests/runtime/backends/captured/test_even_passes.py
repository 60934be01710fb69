"""Passes of a captured step have equally many tokens of each sequence, and launches know it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, fx, nn

from specc.kernels.cuda.launch import even_tokens, is_even
from specc.passes.step.fuse_step import fuse_step
from specc.runtime.backends.captured.bound_step import BoundStep, StepParts, is_even_pass
from tests.runtime.backends.test_step_constants import PLANS


@pytest.mark.parametrize("tile", [None, 2])
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
def test_every_pass_of_a_step_is_even(plan, tile) -> None:
    plan = dataclasses.replace(plan, tile=tile if plan.speculates else None)
    step = fuse_step(plan, {"target": 1, **dict.fromkeys(plan.model_names, 1)})
    passes = [node for g in step.stages.values() for node in g.nodes if node.op == "call_module"]
    assert passes
    assert all(is_even_pass(node) for node in passes)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[bool, list[int]]] = []

    def forward(self, tokens: Tensor, positions: Tensor, q_start: Tensor) -> Tensor:
        self.found.append((is_even(), q_start.tolist()))
        return tokens


def test_launches_know_it_of_such_passes_alone() -> None:
    graph = fx.Graph()
    last_tokens, starts = graph.placeholder("last_tokens"), graph.placeholder("starts")
    even = graph.call_function(torch.ops.aten.arange.start_step, (0, 5, 2), {"dtype": torch.int32})
    late = graph.call_function(torch.ops.aten.arange.start_step, (1, 6, 2), {"dtype": torch.int32})
    for q_start in (even, starts, late):
        found = graph.call_module("model", (last_tokens, last_tokens, q_start))
    names = ("num_accepted", "output_tokens", "next_cache_len", "next_last_tokens")
    graph.output(dict.fromkeys(names, found))
    model, module = Model(), nn.Module()
    module.model = model
    inputs = {
        "last_tokens": torch.zeros(2, dtype=torch.int64),
        "cache_len": torch.zeros(2, dtype=torch.int64),
        "starts": torch.tensor([0, 2, 4], dtype=torch.int32),
    }
    stages = {"all": fx.GraphModule(module, graph)}
    step = BoundStep(StepParts(stages, {}, inputs, torch.zeros(2, 3)))
    step._leave_results = lambda: None  # type: ignore[method-assign]
    with even_tokens():
        # of a pass that says nothing, whoever called
        step.run()
    assert model.found == [(True, [0, 2, 4]), (False, [0, 2, 4]), (False, [1, 3, 5])]
    assert not is_even()
