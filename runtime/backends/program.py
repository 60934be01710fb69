"""Programs of an engine, ready to run: one model's graph, and one plan's step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, fx, nn

from specc.artifact.graph_io import graph_from_json
from specc.artifact.weight_layout import from_blocks
from specc.errors import EngineError
from specc.runtime.backends.mapped_weights import MappedWeights
from specc.runtime.backends.place import place
from specc.runtime.backends.step_constants import step_constants
from specc.speculation.plans import SpecPlan
from specc.system import json_file

STEP_SCHEMA_VERSIONS = (2,)
# 2: weights may be stored in blocks
PROGRAM_SCHEMA_VERSIONS = (1, 2)
_DO = "compile the engine again"


class StepResult(NamedTuple):
    """What one step did for its B sequences.

    Args:
        num_accepted: [B] accepted draft tokens.
        output_tokens: [B][P] accepted tokens, bonus token, then -1.
        next_cache_len: [B] committed rows of the target.
        draft_lens: draft → [B] committed rows of it.
        stage_s: seconds of each stage.
        values: what was asked for by name, as it is before the next step.
    """

    num_accepted: list[int]
    output_tokens: list[list[int]]
    next_cache_len: list[int]
    draft_lens: dict[int, list[int]]
    stage_s: dict[str, float]
    values: dict[str, Tensor] = {}  # noqa: RUF012  a tuple's default, never changed


class StepInputs(NamedTuple):
    """What the host brings to a step of B sequences.

    Args:
        rows: of each sequence, its last C tokens, and its committed rows.
        block_table: [B, n] int32.
        sampling_values: [B, 6] float32, see `specc.sampling.rows`.
        sampling_words: [B, 4] int64.
        extra: what only some plans read: `vote_weights` [B, S] float32, `proposals` [B, L] int64.
    """

    rows: Sequence[Sequence[int]]
    block_table: Tensor
    sampling_values: Tensor
    sampling_words: Tensor
    extra: Mapping[str, Tensor] = MappingProxyType({})


class Drafted(NamedTuple):
    """A step whose tree is there, and whose nodes somebody else passes through the target.

    Args:
        values: what the stages so far have computed, by name.
        accept: runs the rest, once; given `logits` [B * N, V] of the nodes (and `tokens` [B, 1]
            of off), and names of values that the caller wants to see.
    """

    values: Mapping[str, Tensor] | StepValues
    accept: Callable[[Mapping[str, Tensor], Sequence[str]], StepResult]


class StepValues(Protocol):
    """Named values of a step in progress, for hooks: read them, or put others in their place."""

    def __getitem__(self, name: str, /) -> Tensor: ...

    def __setitem__(self, name: str, value: Tensor, /) -> None: ...


# called between verification and acceptance
BeforeAccept = Callable[[StepValues], object]


class Model(Protocol):
    """A model's program of any backend; inputs and result as of `ModelProgram.forward`."""

    def __call__(self, *inputs: Tensor | None) -> Tensor: ...


class Step(Protocol):
    """One plan's step of any backend; see `StepProgram`."""

    plan: SpecPlan
    before_accept: BeforeAccept | None

    def run(self, environment: dict[str, Tensor]) -> dict[str, float]: ...

    def advance(
        self, inputs: StepInputs, slabs: Mapping[str, Tensor], reads: Sequence[str] = ()
    ) -> StepResult: ...


class ModelProgram(nn.Module):
    """A model's graph with its weights and caches bound.

    Args:
        program: content of `program.json`.
        weights: key → tensor of each weight and constant input.
        caches: per layer, the k and v cache [blocks, block_size, HK, D].
        device: that weights and caches lie on.
    Raises:
        EngineError: an input has no weight, or one of another shape or dtype.
    """

    def __init__(
        self,
        program: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        caches: Sequence[tuple[Tensor, Tensor]],
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        check_program(program, len(caches))
        self.name: str = program["name"]
        self.weights = weights
        # plain lists: as parameters or buffers, nn.Module would list and move the mapped file
        self._weights: list[Tensor] = weights_in_rows(program, bind_weights(program, weights))
        self._caches: list[Tensor] = [
            caches[entry["layer"]][entry["part"] == "v"]
            for entry in program["inputs"]
            if entry["kind"] == "cache"
        ]
        graph = graph_from_json(program["graph"])
        taken = len(graph.graph.find_nodes(op="placeholder"))
        if taken != len(program["inputs"]):
            raise EngineError(
                f"{self.name} has {len(program['inputs'])} inputs, its graph takes {taken}",
                "as many",
                _DO,
            )
        self._graph = place(graph, torch.device(device))

    @property
    def graph(self) -> fx.Graph:
        return self._graph.graph

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Weights, constants and caches by the names of the graph's inputs."""
        names = [node.target for node in self.graph.find_nodes(op="placeholder")]
        first = len(names) - len(self._caches)
        return {
            **dict(zip(names, self._weights, strict=False)),
            **dict(zip(names[first:], self._caches, strict=True)),
        }

    @classmethod
    def load(cls, directory: Path, caches: Sequence[tuple[Tensor, Tensor]]) -> ModelProgram:
        """Bind the weights of an engine's model directory without copying them.

        Raises:
            EngineError: a file is absent or cannot be read.
        """
        return cls(
            read_json(directory / "program.json"),
            MappedWeights(directory / "weights.safetensors"),
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
        # not the call of the module, which drops the traceback of an error and prints it instead
        return self._graph.forward(
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
        adapt: called with each stage's graph, which it may change.
    Raises:
        EngineError: a malformed program.

    `before_accept`, where set, is called with all values between verification and acceptance:
    benchmarks read the tree's `tokens` there, and read or replace the target's `logits`, or, of
    plans in tiles, its `winners`.
    """

    def __init__(
        self,
        program: Mapping[str, Any],
        models: Mapping[str, nn.Module],
        adapt: Callable[[fx.GraphModule], object] = lambda graph: None,
    ) -> None:
        self.plan = plan_of(program)
        self.before_accept: BeforeAccept | None = None
        self._constants = step_constants(program, self.plan)
        self._stages: list[tuple[str, list[str], nn.Module]] = []
        for stage in program["stages"]:
            graph = graph_from_json(stage["graph"], modules=models)
            adapt(graph)
            names = [node.target for node in graph.graph.find_nodes(op="placeholder")]
            # the module and its graph name each other: with that cycle, weights and caches would
            # outlive the engine until the garbage collector comes by
            graph.graph.owning_module = None
            self._stages.append((stage["name"], names, graph))

    @classmethod
    def load(cls, path: Path, models: Mapping[str, nn.Module]) -> StepProgram:
        return cls(read_json(path), models)

    @torch.inference_mode()
    def run(self, environment: dict[str, Tensor]) -> dict[str, float]:
        """Run all stages; results are added to the environment.

        Returns:
            seconds of each stage, by name.
        """
        environment.update(self._constants)
        return self._run_stages(environment, [name for name, *_ in self._stages])

    def _run_stages(self, environment: dict[str, Tensor], names: Sequence[str]) -> dict[str, float]:
        stage_s = {}
        for name, inputs, graph in self._stages:
            if name not in names:
                continue
            if name == "accept_commit" and self.before_accept is not None:
                self.before_accept(environment)
            begin = time.perf_counter()
            environment.update(graph(*(environment[key] for key in inputs)))
            stage_s[name] = time.perf_counter() - begin
        return stage_s

    def advance(
        self, inputs: StepInputs, slabs: Mapping[str, Tensor], reads: Sequence[str] = ()
    ) -> StepResult:
        """Run the step for sequences that are known on the host; see `advance`."""
        return advance(self, inputs, slabs, reads)

    @torch.inference_mode()
    def draft(self, inputs: StepInputs, slabs: Mapping[str, Tensor]) -> Drafted:
        """Run what stands before the target's pass; see `Drafted`."""
        environment = {**environment_of(inputs, slabs), **self._constants}
        stage_s = self._run_stages(environment, ["draft"])

        def accept(values: Mapping[str, Tensor], reads: Sequence[str]) -> StepResult:
            environment.update(values)
            stage_s.update(self._run_stages(environment, ["accept_commit"]))
            return result_of(self.plan, environment, stage_s, reads)

        return Drafted(environment, torch.inference_mode()(accept))


def advance(
    step: Step, inputs: StepInputs, slabs: Mapping[str, Tensor], reads: Sequence[str] = ()
) -> StepResult:
    """Run a step for sequences that are known on the host.

    Args:
        step: to run.
        inputs: of the host.
        slabs: caches and history under their names in the environment.
        reads: names of values that the caller wants to see.
    """
    environment = environment_of(inputs, slabs)
    stage_s = step.run(environment)
    return result_of(step.plan, environment, stage_s, reads)


def environment_of(inputs: StepInputs, slabs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the first stage of a step reads, by name."""
    return {
        "last_tokens": torch.tensor([row[:-1] for row in inputs.rows]),
        "cache_len": torch.tensor([row[-1] for row in inputs.rows], dtype=torch.int32),
        "block_table": inputs.block_table,
        "sampling_values": inputs.sampling_values,
        "sampling_words": inputs.sampling_words,
        **inputs.extra,
        **slabs,
    }


def result_of(
    plan: SpecPlan,
    environment: Mapping[str, Tensor],
    stage_s: dict[str, float],
    reads: Sequence[str],
) -> StepResult:
    """What the host reads of an environment after the last stage."""
    return StepResult(
        environment["num_accepted"].tolist(),
        environment["output_tokens"].tolist(),
        environment["next_cache_len"].tolist(),
        {index: environment[name].tolist() for index, name in draft_lens_of(plan).items()},
        stage_s,
        {name: environment[name] for name in reads},
    )


def read_json(path: Path) -> dict[str, Any]:
    """Raises EngineError: the file is absent or no JSON object."""
    data = json_file.read_json(path, EngineError, "a readable JSON file", _DO)
    if not isinstance(data, dict):
        raise EngineError(f"{path} is no JSON object", "a JSON object", _DO)
    return data


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


def weights_in_rows(program: Mapping[str, Any], bound: Sequence[Tensor]) -> list[Tensor]:
    """What `bind_weights` returns, as the graph reads it.

    The weights that a CPU engine stores in blocks are copied, which takes memory and time: eager
    graphs of such engines are for looking into a result.
    """
    entries = [e for e in program["inputs"] if e["kind"] in ("weight", "constant")]
    rows: dict[str, Tensor] = {}
    for entry, weight in zip(entries, bound, strict=True):
        # inputs of one key are one tensor
        if entry["key"] not in rows:
            is_packed = "blocks_of" in entry
            rows[entry["key"]] = from_blocks(weight, entry["blocks_of"]) if is_packed else weight
    return [rows[entry["key"]] for entry in entries]


def _bound_weight(model: str, entry: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Tensor:
    key, needed = entry["key"], f"{entry['dtype']}{list(entry['shape'])}"
    if key not in weights:
        raise EngineError(f"{model} has no weight {key}", needed, _DO)
    weight = weights[key]
    found = f"{str(weight.dtype).removeprefix('torch.')}{list(weight.shape)}"
    if found != needed:
        raise EngineError(f"{model} weight {key} is {found}", needed, _DO)
    return weight


def draft_lens_of(plan: SpecPlan) -> dict[int, str]:
    """Draft → environment name of its committed rows after a step of this plan."""
    return {int(model.removeprefix("draft_")): f"{model}_len" for model in plan.models}


def plan_of(program: Mapping[str, Any]) -> SpecPlan:
    """The plan of a step program.

    Raises:
        EngineError: a step program of another schema, or a malformed one.
    """
    check_schema(program, "a step program", STEP_SCHEMA_VERSIONS)
    return SpecPlan.from_json(program.get("plan", {}))


def check_program(program: Mapping[str, Any], num_layers: int) -> None:
    """Look at the name and the inputs of a model's program.

    Args:
        program: content of `program.json`.
        num_layers: of the model, each with two caches.
    Raises:
        EngineError: another schema, or an input that is none.
    """
    check_schema(program, "program.json", PROGRAM_SCHEMA_VERSIONS)
    inputs = program.get("inputs")
    if not isinstance(program.get("name"), str) or not isinstance(inputs, list):
        raise EngineError("a program.json without name or inputs", "both", _DO)
    for place_, entry in enumerate(inputs):
        if not (isinstance(entry, Mapping) and _is_input(entry, num_layers)):
            raise EngineError(
                f"input {place_} of {program['name']} is {entry!r:.100}",
                "a weight, a constant, a cache of one of the layers, or an input of the runtime",
                _DO,
            )


def _is_input(entry: Mapping[str, Any], num_layers: int) -> bool:
    kind = entry.get("kind")
    if kind == "input":
        return True
    if kind == "cache":
        layer = entry.get("layer")
        return type(layer) is int and 0 <= layer < num_layers and entry.get("part") in ("k", "v")
    shapes = (entry.get("shape"), entry.get("blocks_of", []))
    has_shapes = all(isinstance(s, list) and all(type(n) is int for n in s) for s in shapes)
    is_named = all(isinstance(entry.get(name), str) for name in ("key", "dtype"))
    return kind in ("weight", "constant") and has_shapes and is_named


def check_schema(program: Mapping[str, Any], name: str, versions: Sequence[int]) -> None:
    """Raises EngineError: a program of another schema."""
    version = program.get("schema_version")
    if version not in versions:
        needed = " or ".join(map(str, versions))
        raise EngineError(f"{name} of schema {version}", f"schema {needed}", _DO)
