"""Programs of an engine, ready to run: one model's graph, and one plan's step."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from specc.config import SpecPlan
from specc.errors import EngineError
from specc.graph_io import graph_from_json

SCHEMA_VERSION = 1
_DO = "compile the engine again"


class Model(Protocol):
    """A model's program of any backend; inputs and result as of `ModelProgram.forward`."""

    def __call__(self, *inputs: Tensor | None) -> Tensor: ...


class Step(Protocol):
    """One plan's step of any backend; see `StepProgram`."""

    plan: SpecPlan
    before_accept: Callable[[dict[str, Tensor]], object] | None

    def run(self, environment: dict[str, Tensor]) -> dict[str, float]: ...


class ModelProgram(nn.Module):
    """A model's graph with its weights and caches bound.

    Args:
        program: content of `program.json`.
        weights: key → tensor of each weight and constant input.
        caches: per layer, the k and v cache [blocks, block_size, HK, D].
    Raises:
        EngineError: an input has no weight, or one of another shape or dtype.
    """

    def __init__(
        self,
        program: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        caches: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        super().__init__()
        check_schema(program, "program.json")
        self.name: str = program["name"]
        # plain lists: as parameters or buffers, nn.Module would list and move the mapped file
        self._weights: list[Tensor] = bind_weights(program, weights)
        self._caches: list[Tensor] = [
            caches[entry["layer"]][entry["part"] == "v"]
            for entry in program["inputs"]
            if entry["kind"] == "cache"
        ]
        self._graph = graph_from_json(program["graph"])

    @classmethod
    def load(cls, directory: Path, caches: Sequence[tuple[Tensor, Tensor]]) -> ModelProgram:
        """Bind the weights of an engine's model directory without copying them.

        Raises:
            EngineError: a file is absent or cannot be read.
        """
        return cls(
            read_json(directory / "program.json"),
            map_weights(directory / "weights.safetensors"),
            caches,
        )

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        q_start: Tensor,
        slot: Tensor,
        cache_len: Tensor,
        ancestors: Tensor | None,
        block_table: Tensor,
        logit_rows: Tensor,
    ) -> Tensor:
        """One pass over the flat tokens of all sequences; writes their K and V to the caches.

        Args:
            tokens: [Nt] int64.
            positions: [Nt] int64.
            q_start: [B + 1] int32; sequence b owns tokens q_start[b] … q_start[b + 1] - 1.
            slot: [Nt] int32 cache row of each token, -1 for none.
            cache_len: [B] int32 committed rows.
            ancestors: [Nt, W] int64, or None for a causal pass.
            block_table: [B, n] int32.
            logit_rows: [R] int64 flat rows that get logits.
        Returns:
            [R, V] logits.
        """
        return self._graph(
            *self._weights,
            tokens,
            positions,
            q_start,
            slot,
            cache_len,
            ancestors,
            block_table,
            logit_rows,
            *self._caches,
        )


class StepProgram:
    """One plan's step: stages that read an environment of tensors and add to it.

    Args:
        program: content of `steps/<plan>.json`.
        models: name → program, for the stages' calls.
    Raises:
        EngineError: a malformed program.

    `before_accept`, where set, is called with the environment between verification and acceptance:
    benchmarks read or replace the target's `logits` there.
    """

    def __init__(self, program: Mapping[str, Any], models: Mapping[str, nn.Module]) -> None:
        check_schema(program, "a step program")
        self.before_accept: Callable[[dict[str, Tensor]], object] | None = None
        self.plan = SpecPlan(program["plan"]["name"], tuple(program["plan"]["widths"]))
        self._constants = {
            name: torch.tensor(entry["values"], dtype=getattr(torch, entry["dtype"]))
            for name, entry in program.get("constants", {}).items()
        }
        self._stages: list[tuple[str, list[str], nn.Module]] = []
        for stage in program["stages"]:
            graph = graph_from_json(stage["graph"], modules=models)
            names = [node.target for node in graph.graph.find_nodes(op="placeholder")]
            self._stages.append((stage["name"], names, graph))

    @classmethod
    def load(cls, path: Path, models: Mapping[str, nn.Module]) -> StepProgram:
        return cls(read_json(path), models)

    def run(self, environment: dict[str, Tensor]) -> dict[str, float]:
        """Run all stages; results are added to the environment.

        Returns:
            seconds of each stage, by name.
        """
        environment.update(self._constants)
        stage_s = {}
        for name, inputs, graph in self._stages:
            if name == "accept_commit" and self.before_accept is not None:
                self.before_accept(environment)
            begin = time.perf_counter()
            environment.update(graph(*(environment[key] for key in inputs)))
            stage_s[name] = time.perf_counter() - begin
        return stage_s


def read_json(path: Path) -> dict[str, Any]:
    """Raises EngineError: the file is absent or no JSON object."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(f"{path}: {error}", "a readable JSON file", _DO) from error


def map_weights(path: Path) -> dict[str, Tensor]:
    """Tensors that lie in the memory-mapped file: nothing is read before it is used.

    Raises:
        EngineError: the file is absent or no safetensors file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise EngineError(f"{path}: {error}", "a safetensors file", _DO) from error


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
    key, needed = entry["key"], f"{entry['dtype']}{list(entry['shape'])}"
    if key not in weights:
        raise EngineError(f"{model} has no weight {key}", needed, _DO)
    weight = weights[key]
    found = f"{str(weight.dtype).removeprefix('torch.')}{list(weight.shape)}"
    if found != needed:
        raise EngineError(f"{model} weight {key} is {found}", needed, _DO)
    return weight


def check_schema(program: Mapping[str, Any], name: str) -> None:
    """Raises EngineError: a program of another schema."""
    version = program.get("schema_version")
    if version != SCHEMA_VERSION:
        raise EngineError(f"{name} of schema {version}", f"schema {SCHEMA_VERSION}", _DO)
