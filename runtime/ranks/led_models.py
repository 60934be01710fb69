"""The models of rank 0's device as those of all ranks: what its steps and prompts call instead."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx

from specc.artifact.manifest import Manifest
from specc.runtime.backends.device_models import DeviceModels, DeviceProgram
from specc.runtime.backends.graph_device import GraphDevice
from specc.runtime.ranks.device_drafts import DeviceAsker, LonePass
from specc.runtime.ranks.device_stages import DeviceStages
from specc.runtime.ranks.draft_parts import asked_of, leave_parts, leave_rows, parts_of
from specc.runtime.ranks.leader import Leader
from specc.runtime.ranks.led_device import DeviceLeader, LedGraphs, LedProgram, share_commits


class LedDevice:
    """See `DeviceRanks`: makes rank 0's programs those of all ranks.

    Args:
        manifest: of the engine, with all of its models.
        wait_ready: returns when the others have loaded their part.
    """

    def __init__(
        self, leader: Leader, manifest: Manifest, wait_ready: Callable[[], object]
    ) -> None:
        self._leader = DeviceLeader(leader)
        self._manifest = manifest
        self._wait_ready = wait_ready

    def join(self, graphs: GraphDevice, models: DeviceModels) -> tuple[GraphDevice, DeviceModels]:
        """See `DeviceRanks.join`."""
        self._wait_ready()
        self._leader.device = graphs.device
        manifest = self._manifest
        homes, vocab_size = manifest.draft_homes, manifest.models[0].vocab_size
        dtypes = {model.name: getattr(torch, model.dtype) for model in manifest.models}
        stages = DeviceStages.of(manifest, 0, self._leader.leader.group)
        programs: dict[str, Any] = {}
        for number, name in enumerate(manifest.ordered_programs):
            programs[name] = (
                LonePass(self._leader, number, name, homes[name], vocab_size, dtypes[name])
                if name in homes
                else LedProgram(
                    self._leader,
                    number,
                    cast(DeviceProgram, models.within[name]),
                    # drafts have none
                    stages if number == 0 else None,
                )
            )
        led = replace(
            models,
            between={
                model.name: programs.get(model.name) or models.between[model.name]
                for model in manifest.models
            },
            within={**models.within, **programs},
            adapt=self._adapt,
        )
        return LedGraphs(graphs, self._leader), led

    def _adapt(self, graph: fx.GraphModule, plan: str, constants: Collection[str]) -> None:
        """Let others draft, and keep their rows; see `Adapt`."""
        manifest, leader = self._manifest, self._leader
        homes = manifest.draft_homes
        if parts := parts_of(graph, homes, constants):
            number = [entry.name for entry in manifest.plans].index(plan)
            asked = asked_of(parts, constants)
            asker = DeviceAsker(leader, number, [part.rank for part in parts], asked)
            leave_parts(graph, parts, asked, {*manifest.led_programs}, asker.ask, asker.take)
        for number, name in enumerate(manifest.ordered_programs):
            share_commits(graph, leader, name, number)
        leave_rows(graph, homes)
