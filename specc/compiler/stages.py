"""Stages of a pipeline: the target in parts of some layers each, as equal in bytes as can be."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from specc.artifact.manifest_entries import MemoryEntry, StageEntry
from specc.artifact.model_entry import ModelEntry
from specc.artifact.weight_spec import WeightSpec
from specc.compiler.context import plan_model_memory
from specc.errors import ConfigError
from specc.passes.pipeline import PassRecord, Pipeline
from specc.passes.program import Program, constant_key
from specc.passes.segments.cut_segments import Segment, cut_segments
from specc.passes.segments.places import stage_places
from specc.sharding.weight_pieces import rank_specs

if TYPE_CHECKING:
    from specc.compiler.compiled_model import CompiledModel
    from specc.compiler.context import CompileContext


def check_num_stages(num_stages: int, num_layers: int) -> None:
    """Compare the stages of a target with its layers, before anything is traced.

    Args:
        num_stages: that were asked for.
        num_layers: of the target.
    Raises:
        ConfigError: a stage would have no layer.
    """
    if num_stages > num_layers:
        raise ConfigError(
            f"--pipeline-parallel-size {num_stages}, and a target of {num_layers} layers",
            f"a layer or more in each stage: at most {num_layers}",
            "choose a smaller --pipeline-parallel-size",
        )


def cut_stages(program: Program, num_stages: int) -> tuple[Segment, ...]:
    """The parts of a program, after its last phase.

    Args:
        program: of the target, or of a rank's part of it.
        num_stages: 2 or more.
    Raises:
        ConfigError: a stage would have no layer, also where other weights are so large that the
            most equal stages have none.
    """
    num_layers = len(program.layers) + len(program.state_layers)
    check_num_stages(num_stages, num_layers)
    stages = tuple(cut_segments(program, stage_places(program, num_stages)))
    if empty := [x.number for x in stages if not (x.layers or x.state_layers)]:
        raise ConfigError(
            f"--pipeline-parallel-size {num_stages}, and a target of {num_layers} layers:"
            f" stages as equal in bytes as can be leave none of them to stage {empty[0]}",
            "a layer or more in each stage",
            "choose a smaller --pipeline-parallel-size",
        )
    return stages


def make_stages(context: CompileContext, model: CompiledModel) -> list[PassRecord]:
    """Cut a model into stages; each goes through phases that the whole was not to go through yet.

    Returns:
        what each pass did to them.
    Raises:
        ConfigError: see `cut_stages`.
        SpeccError: a stage that the backend cannot run.
    """
    num_stages = context.config.pipeline_parallel_size
    if model.unlowered is None:
        model.stages = cut_stages(model.program, num_stages)
        return []
    stages, records = cut_stages(model.unlowered, num_stages), []
    for stage in stages:
        phases = context.backend.phases(context.positions)
        records += Pipeline(phases, context.dump).run(stage.program)
        weights = dict.fromkeys(weight.key for weight in stage.program.weights.values())
        stage.keys = (*weights, *constants_of(stage.program))
    model.stages = stages
    return records


def constants_of(program: Program) -> dict[str, Tensor]:
    """Key in the engine's weight file → constant of a program."""
    keys = program.constant_keys
    return {keys.get(n, constant_key(n)): value for n, value in program.constants.items()}


def staged(model: CompiledModel) -> Iterator[tuple[Segment, ModelEntry]]:
    """Stages of a model, and what the manifest says of each; none where it has one alone."""
    for stage in model.stages:
        yield stage, model.entry.stage(stage.number, stage.layers, stage.state_layers)


def staged_specs(model: CompiledModel, specs: Sequence[WeightSpec]) -> dict[str, list[WeightSpec]]:
    """Weight file of each rank → what to write there: weights that its stage reads.

    Args:
        model: with stages.
        specs: of its whole weights.
    """
    plan, reader = model.program.shard, model.source.reader
    size = plan.num_ranks if plan is not None else 1
    files = {}
    for stage, entry in staged(model):
        own = [spec for spec in specs if spec.key in set(stage.keys)]
        own = _with_constants(own, constants_of(stage.program))
        for place in range(size):
            file = entry.rank_file(stage.number * size + place)
            files[file] = own
            if plan is not None:
                files[file] = list(rank_specs(own, plan, place, reader))
    return files


def _with_constants(
    specs: Sequence[WeightSpec], constants: Mapping[str, Tensor]
) -> list[WeightSpec]:
    """A stage's own constants: tables that its phases have made may be others than the whole's."""
    own = {key: WeightSpec.from_tensor(key, value) for key, value in constants.items()}
    return [*(own.pop(spec.key, spec) for spec in specs), *own.values()]


def stage_entries(context: CompileContext, target: CompiledModel) -> tuple[StageEntry, ...]:
    """What the manifest says of the stages of the target; nothing where it has one.

    Logits are the last stage's, and rank 0's, which gets them.
    """
    if not target.stages:
        return ()
    sizes = (context.limits, target.source.dtype, context.plans, context.facts)
    logits = plan_model_memory(target.program, *sizes).logits
    entries = []
    for stage in target.stages:
        # plans ask for the target's rows by its name
        program = dataclasses.replace(stage.program, name=target.name)
        memory = plan_model_memory(program, *sizes)
        has_logits = stage.is_first or stage.is_last
        memory = dataclasses.replace(memory, logits=logits if has_logits else 0)
        (output,) = stage.program.graph.find_nodes(op="output")
        value = output.args[0].meta["val"]
        entries.append(
            StageEntry(
                stage.layers,
                str(value.dtype).removeprefix("torch."),
                tuple(size if isinstance(size, int) else None for size in value.shape),
                MemoryEntry(**memory.to_json()),
                stage.state_layers,
            )
        )
    return tuple(entries)
