"""Draft stages with passes that all ranks run: of targets that draft themselves, and cut drafts.

The runner of a step calls programs of its own process. So such a step is run operator by operator,
with the operators of the engine, and its passes are orders; what lies between two passes takes
microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from specc.runtime.backends.eager.step import EagerStep
from specc.runtime.backends.step import Model
from specc.runtime.ranks.led_model import LedModel
from specc.speculation.plans import SpecPlan


def drafts_led(plan: SpecPlan, models: Mapping[str, Model]) -> bool:
    """Whether drafting takes passes that all ranks run.

    Args:
        plan: of an engine.
        models: of the engine; those that all ranks run are `LedModel`s.
    """
    return bool(plan.self_drafts) or any(isinstance(models[name], LedModel) for name in plan.models)


def led_drafts(
    program: Mapping[str, Any], models: Mapping[str, Model], operators: Any
) -> EagerStep:
    """The step whose drafts are passes of all ranks.

    Args:
        program: content of `steps/<plan>.json`.
        models: name → model, those that all ranks run among them.
        operators: namespace of the `specc::` operators.
    """

    def adapt(graph: fx.GraphModule) -> None:
        for node in graph.graph.nodes:
            target = node.target
            if isinstance(target, torch._ops.OpOverload) and target.namespace == "specc":
                name, overload = target._opname, target._overloadname
                node.target = getattr(getattr(operators, name), overload)
        graph.recompile()

    return EagerStep(program, {name: _Call(model) for name, model in models.items()}, adapt)


class _Call(nn.Module):
    """A model as graphs call it."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        # not a module of this one: it is listed elsewhere
        self._model = [model]

    def forward(self, *inputs: Tensor | None) -> Tensor:
        return self._model[0](*inputs)
