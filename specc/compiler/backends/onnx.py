"""The backend onnx, and what it shares with others whose programs take padded batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from specc.artifact.backends import facts_of
from specc.artifact.cache_rows import CacheRows
from specc.artifact.engine_writer import EngineWriter
from specc.artifact.manifest import Manifest
from specc.artifact.manifest_entries import CacheRowsEntry, LimitsEntry
from specc.compiler.backends.base import CompilerBackend, Emitted, UnfinishedEngine
from specc.compiler.compiled_model import CompiledModel
from specc.config import CompileConfig
from specc.errors import ConfigError
from specc.passes.lower.onnx import lower as lower_onnx
from specc.passes.lower.onnx.operators import OPSET
from specc.passes.lower.onnx.quantized import Products
from specc.passes.memory import ModelMemory
from specc.passes.rewrite.padded import padded_program
from specc.speculation.plans import SpecPlan


class PaddedCompiler(CompilerBackend):
    """Traces every model over [batch, nodes] tokens and writes it as ONNX.

    Attributes:
        products: type of products by quantized weights, as whoever runs the files wants them.
    """

    products: Products = "float32"

    def adapt(self, config: CompileConfig) -> CompileConfig:
        """A cache of one block a sequence: padded batches know no blocks."""
        lower_onnx.require_onnx()
        return dataclasses.replace(config, block_size=0)

    def model_memory(
        self, memory: ModelMemory, limits: LimitsEntry, plans: Sequence[SpecPlan]
    ) -> ModelMemory:
        """Caches have rows around those that hold tokens."""
        entry = cache_rows_of(limits, plans)
        cache = memory.cache * entry.rows.total // entry.slots
        return dataclasses.replace(memory, cache=cache)

    def emit(self, engine: UnfinishedEngine) -> Emitted:
        entry = cache_rows_of(engine.context.limits, engine.context.plans)
        records = []
        for model in engine.models:
            with engine.context.timer.phase(f"trace {model.name} padded"):
                source = model.source
                sizes = (entry.rows.total, engine.context.dump, source.rope_length)
                program, done = padded_program(
                    source.module, model.program, *sizes, model.whole_layers, source.vocabulary
                )
                records += [dataclasses.replace(r, phase=f"padded {r.phase}") for r in done]
                model.padded = program
            with engine.context.timer.phase(f"write {model.name} onnx"):
                write_onnx(engine.writer, model, self.products)
        return Emitted(rectangle=entry, records=records)

    def probe_refusal(self, manifest: Manifest) -> str | None:
        if manifest.parallel is not None:
            return f"sums over ranks are not run by the backend {self.name}, only written for it"
        return super().probe_refusal(manifest)

    def extended_nodes(self, manifest: Manifest, plans: Sequence[SpecPlan], max_nodes: int) -> int:
        """The rows are what they are."""
        rectangle, limits = manifest.rectangle, manifest.limits
        assert rectangle is not None, "the manifest is valid"
        catch_up = max(plan.catch_up if plan.models else 1 for plan in plans)
        if max_nodes > limits.max_nodes or catch_up - 1 > rectangle.front:
            raise ConfigError(
                f"a tree of {max_nodes} nodes, whose drafts read back {catch_up} tokens",
                f"at most {limits.max_nodes} nodes and {rectangle.front + 1} tokens: the caches of"
                " this engine's ONNX files have a fixed number of rows",
                "compile the engine again with the largest --tree that it is to run",
            )
        return limits.max_nodes


def write_onnx(writer: EngineWriter, model: CompiledModel, products: Products) -> None:
    """Write the padded program of a model: a file, or one of each rank that has a part of it."""
    program, entry = model.padded, model.entry
    assert program is not None, "it was traced"
    files = [
        (
            writer.path(entry.part_of(entry.onnx_file, rank)),
            writer.path(entry.part_of(entry.weights_file, rank)),
        )
        for rank in model.ranks
    ]
    if program.shard is None:
        lower_onnx.lower_onnx(program, *files[0], products)
    else:
        lower_onnx.lower_ranks(program, files)


def cache_rows_of(limits: LimitsEntry, plans: Sequence[SpecPlan]) -> CacheRowsEntry:
    """Rows of the caches of an engine."""
    catch_up = max((plan.catch_up for plan in plans if plan.models), default=1)
    rows = CacheRows.of(limits.max_seq_len, limits.max_nodes, catch_up)
    return CacheRowsEntry(OPSET, rows.front, rows.slots, rows.scratch)


class OnnxCompiler(PaddedCompiler):
    """ONNX files for onnxruntime; the step's own operators are those of specc's library."""

    facts = facts_of("onnx")
    aliases = ("onnxruntime",)

    def probe_refusal(self, manifest: Manifest) -> str | None:
        if any(model.dtype in self.facts.unrun_dtypes for model in manifest.models):
            return (
                "onnxruntime's CPU provider does not compute in bfloat16, so that"
                " specc run needs --backend eager; the ONNX files are for other readers"
            )
        return super().probe_refusal(manifest)


BACKEND = OnnxCompiler()
