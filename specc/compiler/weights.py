"""The weights part of a compilation: written, and what is wrong with them said."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from specc.artifact.engine_writer import EngineWriter
from specc.artifact.nonfinite import NonFinite, refuse
from specc.artifact.weights import write_weights
from specc.compiler.compiled_model import CompiledModel
from specc.compiler.model_entries import describe_unread
from specc.compiler.stages import staged_specs
from specc.config import CompileConfig
from specc.sharding.weight_pieces import rank_specs

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
