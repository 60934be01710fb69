"""The rectangular part of a compilation: ONNX files beside the flat programs of an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specc.artifact.directory import EngineWriter
from specc.artifact.manifest import LimitsEntry, NativeEntry, RectangleEntry
from specc.artifact.rectangle import CacheRows
from specc.config import CompileConfig
from specc.passes.lower.cpu import lower as lower_cpu
from specc.passes.lower.onnx import lower as lower_onnx
from specc.passes.lower.onnx.operators import OPSET
from specc.passes.memory import ModelMemory
from specc.passes.pipeline import PassRecord
from specc.passes.rewrite.rectangular import rectangular_program
from specc.progress import Phases
from specc.speculation.plans import SpecPlan

if TYPE_CHECKING:
    from specc.compiler.build import CompiledModel


def dense(config: CompileConfig) -> CompileConfig:
    """The same options with a cache of one block a sequence: rectangles know no blocks.

    Raises:
        ConfigError: packages are missing that write ONNX files.
    """
    lower_onnx.require_onnx()
    return dataclasses.replace(config, block_size=0)


def rectangle_of(limits: LimitsEntry, plans: Sequence[SpecPlan]) -> RectangleEntry:
    """Rows of the caches of an engine."""
    catch_up = max((plan.catch_up for plan in plans if plan.models), default=1)
    rows = CacheRows.of(limits.max_seq_len, limits.max_nodes, catch_up)
    return RectangleEntry(OPSET, rows.front, rows.slots, rows.scratch)


def with_rim(memory: ModelMemory, rectangle: RectangleEntry) -> ModelMemory:
    """Memory of a model whose caches have the rows of a rectangle."""
    cache = memory.cache * rectangle.rows.total // rectangle.slots
    return dataclasses.replace(memory, cache=cache)


def lower_rectangular(
    writer: EngineWriter,
    models: Sequence[CompiledModel],
    rectangle: RectangleEntry,
    dump: Path | None,
    phases: Phases,
) -> list[PassRecord]:
    """Trace every model over rectangles and write it as ONNX; the weights are written.

    Raises:
        SpeccError: a model that ONNX cannot express.
    """
    records = []
    for model in models:
        with phases.phase(f"trace {model.name} rectangular"):
            program, done = rectangular_program(
                model.source.module, model.program, rectangle.rows.total, dump
            )
            records += [dataclasses.replace(r, phase=f"rectangular {r.phase}") for r in done]
            model.rectangular = program
        with phases.phase(f"write {model.name} onnx"):
            lower_onnx.lower_onnx(
                program,
                writer.path(model.entry.onnx_file),
                writer.path(model.entry.weights_file),
            )
    return records


def native_operators(writer: EngineWriter) -> NativeEntry | None:
    """Compiled operators of a step, where there is a compiler; without them the oracles run."""
    if lower_cpu.missing_compiler() is not None:
        return None
    isa_flags = lower_cpu.copy_operators(writer.path(lower_cpu.LIBRARY_FILE))
    return NativeEntry(lower_cpu.LIBRARY_FILE, isa_flags)
