"""Second programs of a target, for self-drafts: fewer layers, windows, or rounded weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from specc.artifact.model_entry import SelfDraftEntry
from specc.compiler.compiled_model import CompiledModel, KeptGraphs
from specc.compiler.context import CompileContext
from specc.compiler.phases import CUT, cut_phases, self_draft_phases
from specc.drafters.drafter import Drafter
from specc.errors import ConfigError
from specc.passes.lower.cpu.phases import CPU
from specc.passes.pipeline import PassError, PassRecord, Phases, Pipeline
from specc.passes.program import Program, Weight, constant_key
from specc.passes.quantize.quantize_linear import QUANTIZE
from specc.passes.residual import layer_regions
from specc.passes.rewrite.skip_layers import SkipLayers
from specc.sharding.shard_plan import RankConstant


@dataclass
class SelfDraftProgram:
    """A program after its last pass, and what the manifest says about it."""

    program: Program
    entry: SelfDraftEntry
    # the program before it was cut for ranks, or quantized
    whole: dict[str, Any] | None = None
    # it reads rounded weights, which the target's file gets for it
    is_rounded: bool = False


def self_draft_programs(
    context: CompileContext, target: CompiledModel
) -> tuple[list[SelfDraftProgram], list[PassRecord]]:
    """Derive the programs that self-drafts of some plans run beside the target's own.

    A draft has one if it leaves layers out, if its weights are quantized, or if a layer of it has a
    sliding window that sequences outgrow: such a window is counted in positions, and a short block
    table has not all rows. Quantized copies of weights become `target.copies`.

    Args:
        context: of the compilation.
        target: with the program that it had before fusion.
    Returns:
        programs that read the target's weights by their keys, and what each pass did.
    Raises:
        ConfigError: layers that the target does not have, or a draft that is the target.
        UnsupportedGraphError: the layers of the target cannot be told apart.
    """
    drafts = dict.fromkeys(draft for plan in context.plans for draft in plan.self_drafts)
    made, records = [], []
    for draft in drafts:
        assert target.unfused is not None
        kept = _kept(draft, target.unfused)
        entry = _entry_of(draft, target, context.limits.max_seq_len, kept)
        if entry is None:
            continue
        program = target.unfused.copy(draft.name)
        found = SelfDraftProgram(program, entry, is_rounded=draft.weights is not None)
        is_quantized = target.source.is_quantized
        first, last = self_draft_phases(context, draft, entry, is_quantized, kept)
        with context.timer.phase(f"rewrite {draft.name}"):
            records += cut_and_lower(context, found, target, first, last)
        made.append(found)
    return made, records


def cut_and_lower(
    context: CompileContext,
    draft: SelfDraftProgram,
    target: CompiledModel,
    first: Phases,
    last: Phases,
) -> list[PassRecord]:
    """Take a second program through its last phases: it is cut as the target is.

    Args:
        context: of the compilation.
        draft: whose program changes; where the target is cut or quantized, it gets what it was
            before that, too.
        target: after its last pass.
        first: phases before the cut.
        last: phases after it.
    Returns:
        what each pass did.
    Raises:
        PassError: passes have treated the two programs differently.
    """
    program, plan = draft.program, target.program.shard
    layout = (*first, *cut_phases(1 if plan is None else plan.num_ranks), *last)
    kept = KeptGraphs(program, layout, (CUT, CPU, QUANTIZE))
    records = Pipeline(layout, context.dump, kept.before).run(program)
    _share_weights(program, target, draft.is_rounded)
    draft.whole = None if kept.whole is None else kept.whole.to_json(program)
    return records


def _kept(draft: Drafter, program: Program) -> tuple[int, ...] | None:
    """Layers that a draft has, as `SkipLayers` counts them; None is all of them.

    Raises:
        ConfigError: all of them, or some that the target does not have.
    """
    if draft.layers is None:
        return None
    count = len(layer_regions(program)) if program.state_layers else len(program.layers)
    kept = draft.layers.kept(count)
    if len(kept) == count and draft.view is None and draft.weights is None:
        raise ConfigError(
            f"--draft {draft.option}, all {count} layers of the target",
            "fewer layers: a draft that is the target costs what the target costs",
            "leave some of them out, or let it see a part of the rows:"
            f" --draft {draft.option},window=512",
        )
    return kept


def _attending(program: Program, kept: Sequence[int]) -> tuple[int, ...]:
    """Which of the layers that attend are left, by their number among these."""
    if not program.state_layers:
        return tuple(kept)
    left = program.copy(program.name)
    SkipLayers(kept).run(left)
    return tuple(sorted({number for number, _ in left.caches.values()}))


def _entry_of(
    draft: Drafter, target: CompiledModel, max_seq_len: int, chosen: Sequence[int] | None
) -> SelfDraftEntry | None:
    """None of a draft that calls the target's own program over another block table."""
    layers, view = target.entry.layers, draft.view
    every = tuple(range(len(layers)))
    assert target.unfused is not None
    kept = every if chosen is None else _attending(target.unfused, chosen)
    windows = [layers[number].window or layers[number].chunk for number in kept]
    slides = [0 < window < max_seq_len for window in windows]
    has_slopes = any(layer.has_slopes for layer in target.program.layers)
    # over a table of a part of the blocks, distances would be other ones
    is_windowed = view is not None and (any(slides) or has_slopes)
    if view is not None and view.chosen and has_slopes:
        raise ConfigError(
            f"--draft {draft.option}, and scores that depend on how far a key is (ALiBi)",
            "a window alone: chosen blocks would lie side by side, at other distances",
            "leave out blocks",
        )
    if view is not None and view.chosen and (is_windowed or draft.layers is not None):
        raise ConfigError(
            f"--draft {draft.option}, a draft by a second program of the target",
            "a window alone: blocks are chosen for the target's own program",
            "leave out blocks" + ("" if draft.layers is None else ", or layers and skip"),
        )
    own_program = draft.weights is not None
    if (
        view is not None
        and kept == every
        and not own_program
        and not target.entry.state_layers
        and all(slides)
        and view.window >= max(windows)
    ):
        raise ConfigError(
            f"--draft {draft.option}; no layer of the target sees more than {max(windows)} rows",
            "a smaller window: a draft that sees all of them costs what the target costs",
            f"pass --draft self:window={max(1, max(windows) // 2)}, or skip layers",
        )
    if not draft.has_second_program and not is_windowed:
        return None
    return SelfDraftEntry(draft.name, draft.name.replace("_", "-"), kept, is_windowed)


def _share_weights(program: Program, model: CompiledModel, is_rounded: bool) -> None:
    """Find what a program reads in the target's weight file, which gets what is rounded for it.

    What the target has in blocks, because its head reads it, an embedding alone reads so, too.

    Raises:
        PassError: it is not there; passes have treated the two programs differently.
    """
    target = model.program
    stored = {weight.key: weight for weight in target.weights.values()}
    for name, weight in program.weights.items():
        if is_rounded and weight.quantized is not None and weight.key not in stored:
            _add_copy(program, model, weight)
            continue
        known = stored.get(weight.key)
        if known is not None and known.in_blocks:
            program.weights[name] = weight = replace(weight, in_blocks=True)
        if known != weight:
            raise PassError(
                f"{program.name} reads {weight}, the target has {stored.get(weight.key)}"
            )
    own, ranks = _of_ranks(program), _of_ranks(target)
    # with those of copies
    cuts = target.shard.by_key if target.shard else {}
    for cut in program.shard.weights if program.shard else ():
        if cuts.get(cut.key) != cut:
            raise PassError(f"{program.name} is cut as {cut}, the target as {cuts.get(cut.key)}")
    for name, value in program.constants.items():
        # what differs from rank to rank may be equal on rank 0, whose values these are
        same = [
            other
            for other, known in target.constants.items()
            if known.dtype == value.dtype
            and torch.equal(known, value)
            and own.get(name) == ranks.get(other)
        ]
        if not same:
            raise PassError(f"{program.name} reads a constant {name} that the target has not")
        # passes number what they make: among fewer layers the numbers are others
        found = name if name in same else same[0]
        program.constant_keys[name] = constant_key(found)


def _add_copy(program: Program, model: CompiledModel, weight: Weight) -> None:
    """A weight that is rounded for a draft, in the target's file and, where it is cut, its plan."""
    model.copies[weight.key] = weight
    plan = model.program.shard
    if plan is not None and program.shard is not None and weight.key not in plan.by_key:
        weights = (*plan.weights, program.shard.by_key[weight.key])
        model.program.shard = replace(plan, weights=weights)


def _of_ranks(program: Program) -> Mapping[str, RankConstant]:
    """Constants that differ from rank to rank, whatever they are called."""
    constants = program.shard.constants if program.shard else ()
    return {item.name: replace(item, name="") for item in constants}
