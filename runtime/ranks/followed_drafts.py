"""The parts of draft stages that a rank which follows computes, with drafts that it alone has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from specc.artifact.graph_io import graph_from_json
from specc.artifact.manifest import Manifest
from specc.runtime.backends.program_files import plan_of, read_json
from specc.runtime.backends.step import Model
from specc.runtime.backends.step_constants import step_constants
from specc.runtime.ranks.draft_parts import SENT, asked_of, parts_of
from specc.runtime.ranks.led_drafts import use_operators
from specc.runtime.ranks.orders import Message, refused


class FollowedDrafts:
    """Drafts of this rank, plan by plan.

    Args:
        manifest: of the engine, with all of its plans.
        models: name → draft of this rank.
        rank: of this process.
        operators: namespace of the `specc::` operators.
    Raises:
        EngineError: a malformed step program.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        models: Mapping[str, Model],
        rank: int,
        operators: Any,
    ) -> None:
        self._parts: dict[int, _Part] = {}
        for number, entry in enumerate(manifest.plans):
            if models.keys() & set(entry.plan.model_names):
                program = read_json(path / entry.file)
                homes = manifest.draft_homes
                self._parts[number] = _Part(program, models, homes, rank, operators)

    def answer(self, order: Message) -> list[Tensor | int] | None:
        """Results of this rank's part; None where it has none.

        Raises:
            FaultError: it is no order of such a plan.
        """
        number, *inputs = order.tensors or (None,)
        if number is None or number.dtype != torch.int64 or number.shape != (1,):
            raise refused("DRAFT without a plan")
        part = self._parts.get(int(number))
        return None if part is None else part.run(inputs)


class _Part:
    def __init__(
        self,
        program: Mapping[str, Any],
        models: Mapping[str, Model],
        homes: Mapping[str, int],
        rank: int,
        operators: Any,
    ) -> None:
        self._constants = step_constants(program, plan_of(program))
        (data,) = (stage["graph"] for stage in program["stages"] if stage["name"] == "draft")
        names = {node["target"] for node in data["nodes"] if node["op"] == "call_module"}
        modules = {name: _Own(models.get(name)) for name in names}
        parts = parts_of(graph_from_json(data, modules=modules), homes, self._constants)
        self._asked = asked_of(parts, self._constants)
        (own,) = (part for part in parts if part.rank == rank)
        self._graph: fx.GraphModule = own.graph
        use_operators(self._graph, operators)
        self._names = own.inputs

    def run(self, inputs: list[Tensor | None]) -> list[Tensor | int]:
        found = [None if value is None else (value.dtype, value.ndim) for value in inputs]
        if found != [SENT.get(name) for name in self._asked]:
            raise refused(f"DRAFT with {found}, of {', '.join(self._asked)}")
        given = {**self._constants, **dict(zip(self._asked, inputs, strict=True))}
        return list(self._graph(*(given[name] for name in self._names)))


class _Own(nn.Module):
    """A draft of this rank as graphs call it; others are in no part of it."""

    def __init__(self, model: Model | None) -> None:
        super().__init__()
        self._model = [model]

    def forward(self, *inputs: Tensor | None) -> Tensor:
        (model,) = self._model
        assert model is not None
        return model(*inputs)
