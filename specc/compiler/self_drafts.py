"""Second programs of a target, for self-drafts: fewer layers, or windows in the operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from specc.artifact.engine_writer import EngineWriter
from specc.artifact.kv_rows import AUTO
from specc.artifact.manifest_entries import SelfDraftEntry
from specc.compiler.compiled_model import CompiledModel, cache_phases
from specc.errors import ConfigError
from specc.passes.base import Pass
from specc.passes.pipeline import FUSE, PHASES, PassError, PassRecord, Phases, Pipeline
from specc.passes.program import Program, constant_key, program_to_json
from specc.passes.rewrite.skip_layers import SkipLayers
from specc.passes.rewrite.window_attention import WindowAttention
from specc.progress import PhaseTimer
from specc.speculation.kv_window import KVWindow
from specc.speculation.plans import SpecPlan
from specc.speculation.self_drafts import SelfDraft


@dataclass
class SelfDraftProgram:
    """A program after its last pass, and what the manifest says about it."""

    program: Program
    entry: SelfDraftEntry


def self_draft_programs(
    target: CompiledModel,
    plans: Sequence[SpecPlan],
    max_seq_len: int,
    lowering: Phases,
    phases: PhaseTimer,
    dump: Path | None = None,
    kv_cache_dtype: str = AUTO,
) -> tuple[list[SelfDraftProgram], list[PassRecord]]:
    """Derive the programs that self-drafts of some plans run beside the target's own.

    A draft has one if it leaves layers out, or if a layer of it has a sliding window that sequences
    outgrow: such a window is counted in positions, and a short block table has not all rows.

    Args:
        target: with the program that it had before fusion.
        plans: of the engine.
        max_seq_len: tokens of the longest sequence.
        lowering: phases of the backend.
        phases: tells the listener how far this is.
        dump: directory that gets each program's graph after each phase, or None.
        kv_cache_dtype: of the target's caches.
    Returns:
        programs that read the target's weights by their keys, and what each pass did.
    Raises:
        ConfigError: layers that the target does not have, or a draft that is the target.
        UnsupportedGraphError: the layers of the target cannot be told apart.
    """
    drafts = dict.fromkeys(draft for plan in plans for draft in plan.self_drafts)
    made, records = [], []
    for draft in drafts:
        entry = _entry_of(draft, target, max_seq_len)
        if entry is None:
            continue
        check_uncut([entry.name], target.program.shard.num_ranks if target.program.shard else 1)
        assert target.unfused is not None
        program = target.unfused.copy(draft.name)
        chosen: list[Callable[[], Pass]] = [partial(SkipLayers, entry.layers)]
        if entry.is_windowed and draft.view is not None:
            rows = KVWindow(draft.view.window, draft.view.sink)
            chosen.append(partial(WindowAttention, rows))
        rest = PHASES[[name for name, _ in PHASES].index(FUSE) :]
        with phases.phase(f"rewrite {draft.name}"):
            layout: Phases = (
                ("derive", tuple(chosen)),
                *rest,
                *cache_phases(kv_cache_dtype),
                *lowering,
            )
            records += Pipeline(layout, dump).run(program)
        _share_weights(program, target.program)
        made.append(SelfDraftProgram(program, entry))
    return made, records


def check_uncut(drafts: Sequence[str], num_ranks: int) -> None:
    """Whether ranks that share a target can run second programs of it.

    Raises:
        ConfigError: there are such programs, and ranks.
    """
    if drafts and num_ranks > 1:
        own = SelfDraft.named(drafts[0])
        raise ConfigError(
            f"--draft {own.option if own else drafts[0]} and --tensor-parallel-size {num_ranks}",
            "one rank: a second program of the target is not cut",
            "leave out one of the two",
        )


def write_self_drafts(writer: EngineWriter, drafts: Sequence[SelfDraftProgram]) -> None:
    """Write the graph of each."""
    for draft in drafts:
        writer.write_json(draft.entry.program_file, program_to_json(draft.program))


def _entry_of(draft: SelfDraft, target: CompiledModel, max_seq_len: int) -> SelfDraftEntry | None:
    """None of a draft that calls the target's own program over another block table."""
    layers, view = target.entry.layers, draft.view
    every = tuple(range(len(layers)))
    kept = every if draft.layers is None else draft.layers.kept(len(layers))
    windows = [layers[number].window for number in kept]
    slides = [0 < window < max_seq_len for window in windows]
    is_windowed = view is not None and any(slides)
    if view is not None and view.chosen and (is_windowed or draft.layers is not None):
        raise ConfigError(
            f"--draft {draft.option}, a draft by a second program of the target",
            "a window alone: blocks are chosen for the target's own program",
            "leave out blocks" + ("" if draft.layers is None else ", or layers and skip"),
        )
    if kept == every and view is None:
        raise ConfigError(
            f"--draft {draft.option}, all {len(layers)} layers of the target",
            "fewer layers: a draft that is the target costs what the target costs",
            "leave some of them out, or let it see a part of the rows:"
            f" --draft {draft.option},window=512",
        )
    if view is not None and kept == every and all(slides) and view.window >= max(windows):
        raise ConfigError(
            f"--draft {draft.option}; no layer of the target sees more than {max(windows)} rows",
            "a smaller window: a draft that sees all of them costs what the target costs",
            f"pass --draft self:window={max(1, max(windows) // 2)}, or skip layers",
        )
    if draft.layers is None and not is_windowed:
        return None
    return SelfDraftEntry(draft.name, draft.name.replace("_", "-"), kept, is_windowed)


def _share_weights(program: Program, target: Program) -> None:
    """Find what a program reads in the target's weight file.

    Raises:
        PassError: it is not there; passes have treated the two programs differently.
    """
    stored = {weight.key: weight for weight in target.weights.values()}
    for weight in program.weights.values():
        if stored.get(weight.key) != weight:
            raise PassError(
                f"{program.name} reads {weight}, the target has {stored.get(weight.key)}"
            )
    for name, value in program.constants.items():
        same = [
            other
            for other, known in target.constants.items()
            if known.dtype == value.dtype and torch.equal(known, value)
        ]
        if not same:
            raise PassError(f"{program.name} reads a constant {name} that the target has not")
        # passes number what they make: among fewer layers the numbers are others
        found = name if name in same else same[0]
        program.constant_keys[name] = constant_key(found)
