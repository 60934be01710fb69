"""Files of an engine that do not depend on its backend: graphs, weights, tokenizer, report."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from specc.artifact.engine_writer import EngineWriter
from specc.artifact.manifest_entries import PlanEntry
from specc.artifact.nonfinite import NonFinite, refuse
from specc.artifact.special_tokens import MAP_FILE
from specc.artifact.state_entry import StateGeometry
from specc.artifact.weights import write_weights
from specc.compiler.compiled_model import CompiledModel
from specc.compiler.model_entries import describe_unread
from specc.compiler.self_drafts import SelfDraftProgram
from specc.compiler.stages import staged, staged_specs
from specc.compiler.tokenizer import TokenizerFiles
from specc.config import CompileConfig
from specc.errors import EngineError
from specc.lora.target_adapters import NO_ADAPTERS, TargetAdapters
from specc.passes.pipeline import PassRecord
from specc.passes.program import constant_key
from specc.passes.program_json import program_to_json
from specc.passes.segments.cut_segments import segments_to_json
from specc.passes.step.fuse_step import fuse_step
from specc.sampling.generation_config import read_defaults
from specc.sharding.weight_pieces import rank_specs
from specc.speculation.plans import SpecPlan

# beside the tokenizer: patterns of their names
_TOKENIZER_FILES = (
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)


def step_file(plan: SpecPlan) -> str:
    """Where an engine has the step program of a plan."""
    return f"steps/{plan.name}.json"


def write_steps(
    writer: EngineWriter,
    plans: Sequence[SpecPlan],
    slabs: dict[str, int],
    is_padded: bool,
    block_size: int,
    is_cut: bool = False,
    windowed: Collection[str] = (),
    states: Sequence[StateGeometry] = (),
    draft_states: Mapping[str, Sequence[StateGeometry]] = MappingProxyType({}),
    adapters: TargetAdapters = NO_ADAPTERS,
) -> tuple[PlanEntry, ...]:
    """Fuse and write the step programs of each plan.

    Args:
        writer: of the engine.
        plans: of the engine.
        slabs: model name → number of its slabs.
        is_padded: the engine's programs take padded batches.
        block_size: rows of a block of its caches.
        is_cut: ranks have parts of the target, and can draw tokens without its logits.
        windowed: self-drafts whose programs see a part of the cache by themselves.
        states: slabs of the states that the target's layers keep.
        draft_states: draft model → the same of its layers, where they keep some.
        adapters: that the target takes for each token.
    Returns:
        what the manifest says of the plans.
    """
    fuse = functools.partial(
        fuse_step, windowed=windowed, states=states, draft_states=draft_states, adapters=adapters
    )
    entries = tuple(PlanEntry.of(plan, step_file(plan)) for plan in plans)
    for plan, entry in zip(plans, entries, strict=True):
        step = fuse(plan, slabs, is_padded, block_size)
        writer.write_json(entry.file, step.to_json())
        if is_cut and entry.winners_file != entry.file:
            step = fuse(plan, slabs, is_padded, block_size, reads_winners=True)
            writer.write_json(entry.winners_file, step.to_json())
    return entries


def write_programs(
    writer: EngineWriter,
    models: Sequence[CompiledModel],
    self_drafts: Sequence[SelfDraftProgram],
) -> None:
    """Write the graph of each model; of one that is cut the plan, and the whole graph, too.

    Of a quantized target the graph before that is written: it can be cut.

    Where a model is cut into segments, or into stages, they are written beside its graph.
    """
    for model in models:
        written = program_to_json(model.program)
        if model.stages:
            # files of stages do not say in which order that of the whole has them
            keys = [weight.key for weight in model.program.weights.values()]
            written["keys"] = [*keys, *map(constant_key, model.program.constants)]
        writer.write_json(model.entry.program_file, written)
        if model.program.shard is not None:
            writer.write_json(model.entry.shard_file, model.program.shard.to_json())
        if model.whole is not None:
            writer.write_json(model.entry.whole_file, model.whole)
        for stage, entry in staged(model):
            writer.write_json(entry.program_file, program_to_json(stage.program))
        if model.segments is not None:
            writer.write_json(model.entry.segments_file, segments_to_json(model.segments))
    for draft in self_drafts:
        writer.write_json(draft.entry.program_file, program_to_json(draft.program))
        if draft.whole is not None:
            writer.write_json(draft.entry.whole_file, draft.whole)


def write_configurations(
    writer: EngineWriter, models: Sequence[CompiledModel], tokens: TokenizerFiles
) -> None:
    """Copy the configurations of models that come from directories, and the tokenizer's files."""
    for model in models:
        if model.source.directory is not None:
            config = model.source.directory / "config.json"
            writer.copy_file(config, f"{model.entry.dir}/config.json")
    if tokens.file is not None:
        directory = tokens.file.parent
        writer.write_bytes(tokens.file.name, tokens.data)
        writer.write_json(MAP_FILE, tokens.special_tokens)
        for pattern in _TOKENIZER_FILES:
            for file in sorted(directory.glob(pattern)):
                if file.is_file():
                    writer.copy_file(file, file.relative_to(directory).as_posix())


def told_of_sampling(tokens: TokenizerFiles) -> list[str]:
    """What a checkpoint says of sampling that no request can have."""
    if tokens.file is None:
        return []
    try:
        read_defaults(tokens.file.parent)
    except EngineError as error:
        return [f"{error.found}; the engine loads with --generation-config vllm alone"]
    return []


def write_report(
    writer: EngineWriter,
    records: Sequence[PassRecord],
    seconds: Mapping[str, float],
    earlier: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write what each pass did, and how long each phase took.

    Args:
        writer: of the engine.
        records: of passes.
        seconds: of phases.
        earlier: records in JSON, of passes that another compilation ran.
    """
    report = {
        "passes": [*earlier, *(record.to_json() for record in records)],
        "phases": {name: round(value, 3) for name, value in seconds.items()},
    }
    writer.write_json("report.json", report)


# tensors with NaN that are named one by one
_MOST_NAMES = 3


def write_model_weights(
    writer: EngineWriter,
    model: CompiledModel,
    config: CompileConfig,
    advance: Callable[[int, int], None],
) -> list[str]:
    """Write the weights of a model and complete its entry.

    Args:
        writer: of the engine.
        model: after its last pass.
        config: options.
        advance: called with (bytes done, bytes in all).
    Returns:
        what the user should know.
    Raises:
        WeightError: a tensor is absent, does not fit, or is not finite.
        OutputError: the file cannot be written.
    """
    # a tensor that several ranks read is named once
    by_name: dict[str, NonFinite] = {}

    def keep(item: NonFinite) -> None:
        by_name.setdefault(item.name, item)

    report = keep if config.allow_nonfinite_weights else refuse
    specs = model.source.weight_specs(model.program, model.copies.values(), model.tables)
    if model.segments is not None:
        # weights of a segment lie together, so that one read takes them all
        order = {key: item.number for item in reversed(model.segments) for key in item.keys}
        specs = sorted(specs, key=lambda spec: order[spec.key])
    reader, plan = model.source.reader, model.program.shard
    files = {model.entry.weights_file: specs}
    if model.stages:
        files = staged_specs(model, specs)
    elif plan is not None:
        files = {
            model.entry.rank_file(rank): list(rank_specs(specs, plan, rank, reader))
            for rank in range(plan.num_ranks)
        }
    for place, (file, own) in enumerate(files.items()):

        def advance_all(done: int, total: int, place: int = place) -> None:
            advance(place * total + done, len(files) * total)

        entry = write_weights(own, reader, writer.path(file), None, advance_all, report)
        writer.record(file, entry)
    found = list(by_name.values())
    unread = model.source.unread_tensors
    model.entry = dataclasses.replace(
        model.entry,
        unread_tensors=unread,
        nonfinite_weights=sum(item.count for item in found),
    )
    warnings = [f"{model.name}: {item}" for item in found[:_MOST_NAMES]]
    if len(found) > _MOST_NAMES:
        warnings.append(f"{model.name}: and {len(found) - _MOST_NAMES} more such tensors")
    if unread:
        warnings.append(
            f"{model.name}: {describe_unread(unread)} of the checkpoint"
            f" {'is' if len(unread) == 1 else 'are'} not read by its graph"
        )
    return warnings
