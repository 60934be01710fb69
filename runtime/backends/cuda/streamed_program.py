"""The target on a GPU, with some of its weights in pinned memory of the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from specc.artifact.directory import available_memory_bytes
from specc.artifact.graph_io import graph_from_json
from specc.artifact.manifest import Manifest
from specc.artifact.offload import OffloadPlan, plan_offload
from specc.errors import EngineError
from specc.runtime.backends.captured.weight_copies import WeightCopies, find_weights
from specc.runtime.backends.eager.program import ModelProgram
from specc.runtime.backends.engine_cache import caches_of, states_of
from specc.runtime.backends.graph_device import GraphDevice
from specc.runtime.backends.program_files import (
    check_program,
    map_weights,
    read_json,
)
from specc.runtime.scheduling.kv_cache import KVCache
from specc.system.files import format_bytes


class StreamedProgram(ModelProgram):
    """A model's graph that copies weights around their use; see `WeightCopies`.

    Args:
        program: content of `program.json`.
        weights: key → tensor on the host of each weight and constant.
        caches: per layer, the k and v cache, on the device.
        graphs: the device.
        budget: bytes of its memory that weights may take.
        states: see `ModelProgram`.
    Raises:
        ConfigError: they need more.
        EngineError: an input has no weight, or the host has no memory for what is copied.
    """

    def __init__(
        self,
        program: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        caches: Sequence[tuple[Tensor, Tensor]],
        graphs: GraphDevice,
        budget: int,
        states: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> None:
        check_program(program, len(caches), len(states))
        self.offload = plan_streams(program, weights, budget)
        _check_host(self.offload)
        copies = WeightCopies(graphs, self.offload, weights)
        kept = [key for piece in self.offload.kept for key in piece.keys]
        bound = {key: weights[key].to(graphs.device) for key in (*kept, *self.offload.rest)}
        bound |= copies.tensors
        super().__init__(program, bound, caches, graphs.device, states=states)
        copies.insert(self.graph)
        self._graph.recompile()

    @property
    def is_resident(self) -> bool:
        """All of the weights are on the device."""
        return not self.offload.streamed


def load_streamed(
    path: Path, manifest: Manifest, cache: KVCache, graphs: GraphDevice, budget: int
) -> StreamedProgram:
    """The target of an engine of one rank.

    Raises:
        ConfigError, EngineError: see `StreamedProgram`.
    """
    target = manifest.models[0]
    weights = map_weights(path, manifest, manifest.weights_file(target))
    program = read_json(path / target.program_file)
    own = caches_of(target, cache), graphs, budget, states_of(target, cache)
    return StreamedProgram(program, weights, *own)


def plan_streams(
    program: Mapping[str, Any], weights: Mapping[str, Tensor], budget: int
) -> OffloadPlan:
    """Which weights of a program stay on the device, by a budget.

    Raises:
        ConfigError: what always stays and two slots take more.
    """
    graph = graph_from_json(program["graph"]).graph
    names = [node.target for node in graph.find_nodes(op="placeholder")]
    keys = {
        name: entry["key"]
        for name, entry in zip(names, program["inputs"], strict=True)
        if entry["kind"] in ("weight", "constant")
    }
    sizes = {key: weights[key].nbytes for key in keys.values() if key in weights}
    pieces, rest = find_weights(graph, keys, sizes)
    return plan_offload(pieces, rest, budget, sum(sizes.get(key, 0) for key in rest))


def _check_host(plan: OffloadPlan) -> None:
    available = available_memory_bytes()
    needed = sum(piece.size for piece in plan.streamed)
    if available is not None and needed > available:
        raise EngineError(
            f"{format_bytes(available)} of memory available on the host",
            f"{format_bytes(needed)} for the weights that are not on the GPU",
            "raise --offload-weights, or free memory",
        )
