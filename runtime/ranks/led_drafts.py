"""Draft stages with passes of other ranks: of targets that draft themselves, of drafts that are
cut, and of drafts that another rank has.

The runner of a step calls programs of its own process. So such a step is run operator by operator,
with the operators of the engine, and its passes are orders; what lies between two passes takes
microseconds. The backend does not load it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn

from specc.artifact.manifest import Manifest
from specc.runtime.backends.eager.step import EagerStep
from specc.runtime.backends.program_files import plan_of
from specc.runtime.backends.step import Model
from specc.runtime.backends.step_constants import step_constants
from specc.runtime.ranks.answers import values_of
from specc.runtime.ranks.draft_parts import asked_of, leave_parts, leave_rows, parts_of
from specc.runtime.ranks.leader import Leader
from specc.runtime.ranks.led_model import LedModel
from specc.runtime.ranks.orders import Kind


def led_plans(manifest: Manifest) -> frozenset[str]:
    """Names of plans that draft with passes of other ranks than rank 0."""
    others = {*manifest.led_programs, *manifest.draft_homes}
    return frozenset(
        entry.name
        for entry in manifest.plans
        if entry.plan.self_drafts or others.intersection(entry.plan.model_names)
    )


def led_drafts(
    program: Mapping[str, Any],
    number: int,
    models: Mapping[str, Model],
    operators: Any,
    homes: Mapping[str, int] = MappingProxyType({}),
) -> EagerStep:
    """A step whose drafts are passes of all ranks, or parts of others.

    Args:
        program: content of `steps/<plan>.json`.
        number: of the plan in the engine.
        models: name → model, those that other ranks run among them.
        operators: namespace of the `specc::` operators.
        homes: draft → its rank, where that is not rank 0.
    """
    constants = step_constants(program, plan_of(program))
    led = {name: model for name, model in models.items() if isinstance(model, LedModel)}

    def adapt(stage: fx.GraphModule) -> None:
        if parts := parts_of(stage, homes, constants):
            asker = _Asker(led["target"].leader, number, [part.rank for part in parts])
            leave_parts(stage, parts, asked_of(parts, constants), led, asker.ask, asker.take)
        leave_rows(stage, homes)
        use_operators(stage, operators)

    return EagerStep(program, {name: _Call(model) for name, model in models.items()}, adapt)


def use_operators(stage: fx.GraphModule, operators: Any) -> None:
    """Let a stage call the operators of an engine; changes its graph."""
    for node in stage.graph.nodes:
        target = node.target
        if isinstance(target, torch._ops.OpOverload) and target.namespace == "specc":
            name, overload = target._opname, target._overloadname
            node.target = getattr(getattr(operators, name), overload)
    stage.recompile()


class _Asker:
    """Asks other ranks for their parts of a plan's drafts."""

    def __init__(self, leader: Leader, number: int, ranks: list[int]) -> None:
        self._leader, self._ranks = leader, ranks
        self._number = torch.tensor([number])

    def ask(self, *inputs: Tensor) -> int:
        """Give the order; returns its number."""
        return self._leader.ask(Kind.DRAFT, (self._number, *inputs))

    def take(self, order: int) -> list[Any]:
        """What all of them answer, rank by rank."""
        answers = (self._leader.answer(rank, order) for rank in self._ranks)
        return [value for answer in answers for value in values_of(answer)]


class _Call(nn.Module):
    """A model as graphs call it."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        # not a module of this one: it is listed elsewhere
        self._model = [model]

    def forward(self, *inputs: Tensor | None) -> Tensor:
        return self._model[0](*inputs)
