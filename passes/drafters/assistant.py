"""Gemma 4 assistants: trees that are grown level by level, over the cache of the target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx

from specc.artifact.safetensors_io import TensorReader
from specc.drafters.drafter import Drafter
from specc.errors import HeadError
from specc.passes.base import Pass
from specc.passes.drafters.assistant_head import AssistantHead
from specc.passes.drafters.assistant_source import fit_assistant, row_inputs, says_assistant
from specc.passes.drafters.assistant_spec import SLIDING, AssistantSpec
from specc.passes.drafters.head import CompilerHead, HeadGrower, feature_rows
from specc.passes.drafters.head_spec import HeadSwitches, TargetFacts
from specc.passes.program import Program, RowInput
from specc.passes.rewrite.read_target_caches import ReadTargetCaches
from specc.passes.step.proposer import Proposer
from specc.passes.step.step_graph import StepGraph
from specc.speculation.plans import SpecPlan

aten = torch.ops.aten


class AssistantGrower(HeadGrower):
    """All nodes stand where the root stands. Their rows, of what they hand on, begin with it."""

    def __init__(self, drafter: Drafter, g: StepGraph) -> None:
        super().__init__(drafter, 1, g["cache_len"])

    def first_features(self, g: StepGraph, slots: fx.Node) -> list[fx.Node]:
        """The row that has chosen the root."""
        return [feature_rows(g, g.call(aten.sub.Tensor, slots, 1), is_own=False)]

    def slots(self, g: StepGraph, nodes: fx.Node, depths: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Rows of nodes, and the position of the root."""
        return super().slots(g, nodes, g.call(aten.full_like.default, depths, 0))


class CompilerAssistant(CompilerHead):
    called = "Gemma 4 assistant"

    def proposer(self, g: StepGraph, plan: SpecPlan, drafter: Drafter) -> Proposer:
        return AssistantGrower(drafter, g)

    def says(self, raw: Mapping[str, Any], name: str) -> bool:
        return says_assistant(raw)

    def is_no_model(self, raw: Mapping[str, Any]) -> bool:
        return says_assistant(raw)

    def fit(
        self,
        reader: TensorReader,
        raw: dict[str, Any],
        directory: Path,
        weights: Path,
        target: TargetFacts,
        switches: HeadSwitches,
    ) -> AssistantSpec | None:
        return fit_assistant(reader, raw, directory, target) if says_assistant(raw) else None

    def module(self, spec: AssistantSpec) -> AssistantHead:
        return AssistantHead(spec)

    def rows(self, spec: AssistantSpec, dtype: torch.dtype) -> tuple[RowInput, ...]:
        given = (RowInput(name, columns, dtype) for _, name, columns in row_inputs(spec))
        return (*super().rows(spec, dtype), *given)

    def target_passes(self, spec: AssistantSpec, target: Program) -> tuple[Callable[[], Pass], ...]:
        """Of each kind of layers, the last of the target; where that has the keys and values of an
        earlier one, its cache has them, too.
        """
        found = {}
        for kind, name, _ in row_inputs(spec):
            layers = [
                number
                for number, layer in enumerate(target.layers)
                if bool(layer.window) == (kind == SLIDING)
            ]
            if not layers:
                raise HeadError(
                    f"{spec.directory}: layers of kind {kind}, and {spec.target.name} has none",
                    "the assistant of this target",
                    "pass the assistant of this target",
                )
            if name.endswith("keys"):
                found[name] = layers[-1]
        return (partial(ReadTargetCaches, target, found, str(spec.directory)),)


DRAFTER = CompilerAssistant()
