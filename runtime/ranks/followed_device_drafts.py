"""The parts of draft stages that ranks with devices compute, with drafts that they alone have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from specc.artifact.graph_io import graph_from_json
from specc.artifact.manifest import Manifest
from specc.kernels.cuda.launch import even_tokens
from specc.runtime.backends.captured.bound_step import is_even_pass
from specc.runtime.backends.program_files import place, plan_of, read_json
from specc.runtime.backends.step_constants import step_constants
from specc.runtime.ranks.device_work import DraftWork, take
from specc.runtime.ranks.draft_parts import Part, asked_of, parts_of
from specc.runtime.ranks.orders import refused


class FollowedDeviceDrafts:
    """Drafts of this rank, plan by plan; what it has no part in it hears, too.

    Args:
        manifest: of the engine, with all of its plans.
        models: name → program on the device, of drafts that this rank has.
        rank: of this process.
    Raises:
        EngineError: a malformed step program.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        models: Mapping[str, nn.Module],
        rank: int,
        device: torch.device,
    ) -> None:
        self._device = device
        self._plans: dict[int, _Plan] = {}
        homes = manifest.draft_homes
        for number, entry in enumerate(manifest.plans):
            if homes.keys() & set(entry.plan.model_names):
                program = read_json(path / entry.file)
                self._plans[number] = _plan_of(program, models, homes, rank, device)

    def run(self, work: DraftWork) -> list[Tensor | int] | None:
        """What this rank's part finds of what rank 0 sends; None where it has none.

        Raises:
            FaultError: there is no such plan.
        """
        plan = self._plans.get(work.plan)
        if plan is None:
            raise refused(f"drafts of plan {work.plan}, which are rank 0's")
        inputs = take(work.specs_of(plan.asked), self._device)
        if plan.part is None:
            return None
        given: dict[str, Any] = {**plan.constants, **dict(zip(plan.asked, inputs, strict=True))}
        return list(_Run(plan.part.graph).run(*(given[name] for name in plan.part.inputs)))


@dataclass(frozen=True)
class _Plan:
    asked: list[str]
    constants: dict[str, Tensor]
    part: Part | None


class _Run(fx.Interpreter):
    """Runs a part as `BoundStep` runs a stage."""

    def run_node(self, n: fx.Node) -> Any:
        with even_tokens(is_even_pass(n)):
            return super().run_node(n)


class _Elsewhere(nn.Module):
    """A model of another rank, which is in no part of this one."""


def _plan_of(
    program: Mapping[str, Any],
    models: Mapping[str, nn.Module],
    homes: Mapping[str, int],
    rank: int,
    device: torch.device,
) -> _Plan:
    constants = step_constants(program, plan_of(program))
    (data,) = (stage["graph"] for stage in program["stages"] if stage["name"] == "draft")
    names = {node["target"] for node in data["nodes"] if node["op"] == "call_module"}
    modules = {name: models.get(name, _Elsewhere()) for name in names}
    stage = place(graph_from_json(data, modules=modules), device)
    parts = parts_of(stage, homes, constants)
    own = next((part for part in parts if part.rank == rank), None)
    on_device = {name: value.to(device) for name, value in constants.items()}
    return _Plan(asked_of(parts, constants), on_device, own)
