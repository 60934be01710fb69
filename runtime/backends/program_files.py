"""What files of an engine hold to run: programs on a device, mapped weights, operators."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, fx

from specc.artifact.block_sums import read_in_blocks
from specc.artifact.lent_keys import bound_key, with_lent
from specc.artifact.manifest import Manifest
from specc.artifact.model_entry import ModelEntry, SelfDraftEntry
from specc.bounds import MOST_LAYERS
from specc.errors import EngineError
from specc.kernels import native
from specc.runtime.backends.step_io import ADAPTERS, STATES
from specc.speculation.plan_json import plan_from_json
from specc.speculation.plans import SpecPlan
from specc.system import json_file
from specc.system.dropped_pages import drop_pages

STEP_SCHEMA_VERSIONS = (2,)
# 2: weights may be stored in blocks; 3: as integers
PROGRAM_SCHEMA_VERSIONS = (1, 2, 3)
_DO = "compile the engine again"


def read_json(path: Path) -> dict[str, Any]:
    """Raises EngineError: the file is absent or no JSON object."""
    data = json_file.read_engine_json(path, "a readable JSON file", _DO)
    if not isinstance(data, dict):
        raise EngineError(f"{path} is no JSON object", "a JSON object", _DO)
    return data


def read_self_draft(path: Path, entry: SelfDraftEntry) -> dict[str, Any]:
    """The program of a self-draft, which is bound to the target's weights and caches.

    Raises:
        EngineError: the file is absent or no JSON object, or reads caches of other layers.
    """
    program = read_json(path / entry.program_file)
    check_program(program, MOST_LAYERS, MOST_LAYERS)
    layers = {item["layer"] for item in program["inputs"] if item["kind"] == "cache"}
    if layers != set(entry.layers):
        raise EngineError(
            f"{path / entry.program_file} with caches of layers {sorted(layers)}",
            f"those of layers {list(entry.layers)}, as the manifest says",
            _DO,
        )
    return program


def plan_of(program: Mapping[str, Any]) -> SpecPlan:
    """The plan of a step program.

    Raises:
        EngineError: a step program of another schema, or a malformed one.
    """
    check_schema(program, "a step program", STEP_SCHEMA_VERSIONS)
    plan, stages = plan_from_json(program.get("plan", {})), program.get("stages")
    if not isinstance(stages, list) or not all(map(_is_stage, stages)):
        raise EngineError("a step program without stages", "stages with names and graphs", _DO)
    return plan


def check_program(program: Mapping[str, Any], num_layers: int, num_states: int = 0) -> None:
    """Look at the name and the inputs of a model's program.

    Args:
        program: content of `program.json`.
        num_layers: of the model, each with two caches; and one more of what it keeps for drafts.
        num_states: layers of the model that keep states.
    Raises:
        EngineError: another schema, or an input that is none.
    """
    check_schema(program, "program.json", PROGRAM_SCHEMA_VERSIONS)
    inputs, graph = program.get("inputs"), program.get("graph")
    is_named = isinstance(program.get("name"), str)
    if not (is_named and isinstance(inputs, list) and isinstance(graph, Mapping)):
        raise EngineError("a program.json without name, inputs or graph", "all three", _DO)
    for place_, entry in enumerate(inputs):
        if not (isinstance(entry, Mapping) and _is_input(entry, num_layers, num_states)):
            raise EngineError(
                f"input {place_} of {program['name']} is {entry!r:.100}",
                "a weight, a constant, a cache or state of a layer, or an input of the runtime",
                _DO,
            )


def _is_stage(stage: Any) -> bool:
    is_object = isinstance(stage, Mapping) and isinstance(stage.get("graph"), Mapping)
    return is_object and isinstance(stage.get("name"), str)


def _is_input(entry: Mapping[str, Any], num_layers: int, num_states: int) -> bool:
    kind = entry.get("kind")
    if kind == "input":
        return True
    if kind in ("cache", "state"):
        layer, is_state = entry.get("layer"), kind == "state"
        is_known = entry.get("part") in (("state", "rows") if is_state else ("k", "v", "rows"))
        count = num_states if is_state else num_layers
        return type(layer) is int and 0 <= layer < count and is_known
    shapes = (entry.get("shape"), entry.get("blocks_of", []))
    has_shapes = all(isinstance(s, list) and all(type(n) is int for n in s) for s in shapes)
    is_named = all(isinstance(entry.get(name), str) for name in ("key", "dtype"))
    return kind in ("weight", "constant") and has_shapes and is_named


def slab_of(
    entry: Mapping[str, Any],
    caches: Sequence[tuple[Tensor, Tensor]],
    states: Sequence[tuple[Tensor, Tensor]],
) -> Tensor | None:
    """The cache, states or replay rows that an input of a program is bound to; None of others.

    Args:
        entry: of `program.json`, after `check_program`.
        caches: per layer, see `ModelProgram`.
        states: per layer that keeps some, states and replay rows.
    """
    if entry["kind"] == "cache":
        return caches[entry["layer"]][entry["part"] == "v"]
    if entry["kind"] == "state":
        return states[entry["layer"]][entry["part"] == "rows"]
    return None


def takes_mass(program: Mapping[str, Any]) -> bool:
    """Whether a model's program is given the mass of blocks, see `ModelProgram.forward`."""
    return any(entry.get("name") == "mass" for entry in program["inputs"])


def takes_states(program: Mapping[str, Any]) -> bool:
    """Whether a model's program is given places of states, see `ModelProgram.forward`."""
    return _takes(program, STATES)


def takes_adapters(program: Mapping[str, Any]) -> bool:
    """Whether a target's program is given adapters of tokens, see `ModelProgram.forward`."""
    return _takes(program, ADAPTERS)


def _takes(program: Mapping[str, Any], name: str) -> bool:
    return any(
        entry.get("name") == name and entry.get("kind") == "input" for entry in program["inputs"]
    )


def check_schema(program: Mapping[str, Any], name: str, versions: Sequence[int]) -> None:
    """Raises EngineError: a program of another schema."""
    version = program.get("schema_version")
    if version not in versions:
        needed = " or ".join(map(str, versions))
        raise EngineError(f"{name} of schema {version}", f"schema {needed}", _DO)


def readable_weights(
    model: ModelEntry, target: ModelEntry, weights: Mapping[str, Mapping[str, Tensor]]
) -> Mapping[str, Tensor]:
    """What the program of a model may read: its own weights, and of a draft the target's, too.

    Args:
        weights: name of a model → tensors of its file.
    """
    own = weights[model.name]
    return own if model is target else with_lent(own, weights[target.name])


def bind_weights(program: Mapping[str, Any], weights: Mapping[str, Tensor]) -> list[Tensor]:
    """Tensors of a program's weight and constant inputs, in their order.

    Raises:
        EngineError: an input has no weight, or one of another shape or dtype.
    """
    return [
        _bound_weight(program["name"], entry, weights)
        for entry in program["inputs"]
        if entry["kind"] in ("weight", "constant")
    ]


def _bound_weight(model: str, entry: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Tensor:
    key, needed = bound_key(entry), f"{entry['dtype']}{list(entry['shape'])}"
    if key not in weights:
        raise EngineError(f"{model} has no weight {key}", needed, _DO)
    weight = weights[key]
    found = f"{str(weight.dtype).removeprefix('torch.')}{list(weight.shape)}"
    if found != needed:
        raise EngineError(f"{model} weight {key} is {found}", needed, _DO)
    return weight


def place(graph: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """Let every operator that makes or moves tensors use this device; changes the graph.

    Programs are traced without a device of their own, so whatever device they name is the one
    that they were traced on.
    """
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.kwargs.get("device") is not None:
            node.kwargs = {**node.kwargs, "device": device}
    graph.recompile()
    return graph


def load_operators() -> Any:
    """Namespace of the `specc::` operators on the host: those of the library.

    Raises:
        EngineError: the library does not load on this machine.
    """
    native.load()
    return torch.ops.specc_cpu


def last_used(nodes: Iterable[fx.Node], kept: set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Node → values that no node after it reads, its own included.

    Args:
        nodes: in the order in which they run.
        kept: values that are needed after all of them.
    """
    last: dict[fx.Node, fx.Node] = {}
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        found[node] = []
        last |= dict.fromkeys([node, *node.all_input_nodes], node)
    for value, node in last.items():
        if value not in kept:
            found[node].append(value)
    return found


def map_weights(path: Path, manifest: Manifest, name: str) -> MappedWeights:
    """Weights in the mapped file of an engine, compared with what its manifest says."""
    return MappedWeights(path / name, manifest.files[name].crc32)


class StoredWeights(dict[str, Tensor]):
    """Tensors of a safetensors file, by key, whose memory may go back to the system for a while.

    Args:
        path: of the file, which is kept open: another one may take its place.
        crc32: `BlockSums.hex` of it; empty where nobody knows.
    """

    def __init__(self, path: Path, crc32: str) -> None:
        super().__init__()
        self._path, self._crc32 = path, crc32
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)

    @property
    def _opened(self) -> Path:
        """The file that was opened, whatever has its name by now."""
        return Path(f"/proc/self/fd/{self._descriptor}")

    def drop(self) -> int:
        """Give memory back; returns how many bytes. Nobody may read a tensor before `restore`."""
        return drop_pages(self.values())

    def restore(self) -> None:
        """Have the file's content in memory again, at the same addresses.

        Raises:
            EngineError: the file has been altered.
        """
        raise NotImplementedError


class MappedWeights(StoredWeights):
    """Tensors of a safetensors file, by key; they lie in the mapped file.

    Args:
        crc32: `BlockSums.hex` of it, which is compared before anything is mapped: all of the file
            is read once. Empty: nobody looks.
    Raises:
        EngineError: the file is absent or no safetensors file, or was altered.
    """

    def __init__(self, path: Path, crc32: str = "") -> None:
        try:
            if crc32:
                read_in_blocks(path, crc32)
            super().__init__(path, crc32)
            with safe_open(path, framework="pt") as file:
                self.update((key, file.get_tensor(key)) for key in file.keys())  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise EngineError(
                f"{path}: {error}", "a safetensors file", "compile the engine again"
            ) from error
        self._num_bytes = os.fstat(self._descriptor).st_size

    def restore(self) -> None:
        """See `StoredWeights`: what is mapped comes back page by page, after one look at all."""
        self.check()
        if self._crc32:
            read_in_blocks(self._opened, self._crc32)

    def check(self) -> None:
        """Find out whether the file still holds what is mapped; a microsecond.

        Reading after the end of a mapped file kills the process, whatever cut it.

        Raises:
            EngineError: the file has become shorter.
        """
        size = os.fstat(self._descriptor).st_size
        if size < self._num_bytes:
            raise EngineError(
                f"{self._path} was cut to {size} bytes while the engine was using it",
                f"{self._num_bytes} bytes, unchanged while the engine runs",
                "copy the engine again; replace engines by renaming, never in place",
            )
