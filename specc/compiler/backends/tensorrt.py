"""The backend tensorrt: one TensorRT engine a model, from the ONNX file beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from specc.artifact.backends import facts_of
from specc.artifact.manifest import Manifest
from specc.artifact.manifest_entries import LimitsEntry, TensorRTEntry
from specc.artifact.model_entry import ModelEntry, rank_prefix
from specc.compiler.backends.base import Emitted, UnfinishedEngine
from specc.compiler.backends.onnx import PaddedCompiler
from specc.compiler.compiled_model import CompiledModel
from specc.config import CompileConfig
from specc.errors import ConfigError
from specc.passes.lower.cuda.pass_sizes import step_sizes
from specc.passes.lower.tensorrt.builder import BuildOptions, timing_cache_file
from specc.passes.lower.tensorrt.lower import BuildReport, build_engine
from specc.passes.lower.tensorrt.shape_profile import ShapeProfile
from specc.speculation.plans import SpecPlan
from specc.tensorrt import library as trt


class TensorRTCompiler(PaddedCompiler):
    """Builds each model's engine for the shapes that its passes have."""

    facts = facts_of("tensorrt")
    aliases = ("trt",)
    products = "rows"

    def check_config(self, config: CompileConfig, dtypes: Sequence[str]) -> None:
        """Whether the builder that is installed can build these engines.

        Raises:
            TensorRTError: no TensorRT, one that is too old, or one that cannot build for this GPU.
            ConfigError: a dtype without a fused attention kernel.
        """
        trt.facts()
        if config.quantize == "fp8":
            trt.require_fp8(config.compute_capability)
        if "float32" in dtypes and not config.decomposable_attention:
            raise ConfigError(
                "dtype float32 for TensorRT, which has no fused attention of it",
                "float16 or bfloat16",
                "pass --dtype float16, or --decomposable-attention for an attention of several"
                " kernels",
            )
        _builder_of(config)

    def emit(self, engine: UnfinishedEngine) -> Emitted:
        emitted = super().emit(engine)
        profiles = model_profiles(
            engine.context.plans, engine.context.limits, [model.entry for model in engine.models]
        )
        warnings = []
        for model, rank in [(m, rank) for m in engine.models for rank in m.ranks]:
            name = model.name if rank is None else f"{model.name} of rank {rank}"
            with engine.context.timer.phase(f"build {name} engine") as advance:
                options = BuildOptions(
                    compute_capability=engine.context.config.compute_capability,
                    decomposable=engine.context.config.decomposable_attention,
                    timing_cache=timing_cache_file(),
                    progress=lambda phase, done, total, advance=advance: advance(done, total),  # type: ignore[misc]
                    prefix=rank_prefix(rank),
                )
                report = self.build_model(engine, model, rank, profiles[model.name], options)
                # the layers are in a file of their own
                summary = {key: value for key, value in report.to_json().items() if key != "layers"}
                engine.writer.write_json(model.entry.part_of(model.entry.build_file, rank), summary)
            if not rank:
                # the others are built of the same text
                warnings += [f"{name}: {warning}" for warning in _warnings(report)]
        return dataclasses.replace(
            emitted, tensorrt=_builder_of(engine.context.config), warnings=warnings
        )

    def build_model(
        self,
        engine: UnfinishedEngine,
        model: CompiledModel,
        rank: int | None,
        profiles: Sequence[ShapeProfile],
        options: BuildOptions,
    ) -> BuildReport:
        """Build the TensorRT engine of one model, or of a rank of it; its ONNX file is written.

        Raises:
            TensorRTError: the builder refuses the model.
        """
        entry = model.entry
        files = (entry.part_of(file, rank) for file in (entry.onnx_file, entry.plan_file))
        onnx_file, plan = map(engine.writer.path, files)
        return build_engine(onnx_file, plan, profiles, options)

    def extended_nodes(self, manifest: Manifest, plans: Sequence[SpecPlan], max_nodes: int) -> int:
        """TensorRT engines run with the shapes alone that they were built for."""
        nodes = super().extended_nodes(manifest, plans, max_nodes)
        built = [entry.plan for entry in manifest.plans]
        if unknown := [plan.name for plan in plans if plan not in built]:
            raise ConfigError(
                f"plan {unknown[0]}, for which the TensorRT engines have no profile",
                f"one of {', '.join(plan.name for plan in built)}",
                "compile the engine again with this --tree",
            )
        return nodes


def model_profiles(
    plans: Sequence[SpecPlan], limits: LimitsEntry, models: Sequence[ModelEntry]
) -> dict[str, list[ShapeProfile]]:
    """Shapes that each model runs with: prompts, and every pass of a step of every plan.

    Args:
        models: the target first.
    """
    vocab_sizes = {model.name: model.vocab_size for model in models}
    # TensorRT-RTX 1.7 has no fused kernel where all queries of a key head are one and no profile
    # holds more: the range is then up to two nodes
    of_one = {m.name for m in models if any(layer.num_kv_heads == 1 for layer in m.layers)}
    batch = limits.max_batch_size
    chunk = min(limits.prefill_chunk, limits.max_seq_len)
    prefill = ShapeProfile("prefill", (1, 1, batch), (1, chunk, chunk), (1, 1, batch))
    profiles = {name: [prefill] for name in vocab_sizes}
    for plan in plans:
        sizes = step_sizes([plan], vocab_sizes, [1], 1, is_padded=True)
        for name, passes in sizes.items():
            for one in passes:
                nodes, rows = one.tokens, one.rows
                most = 2 if nodes == 1 and name in of_one else nodes
                profiles[name].append(
                    ShapeProfile(
                        f"{plan.name} × {nodes}",
                        (1, batch, batch),
                        (nodes, nodes, most),
                        (rows, rows * batch, rows * batch),
                    )
                )
    return profiles


def _builder_of(config: CompileConfig) -> TensorRTEntry:
    facts, capability = trt.facts(), config.compute_capability
    if capability is not None:
        capability = trt.parse_compute_capability(capability)
    return TensorRTEntry(facts.name, facts.version, capability)


def _warnings(report: BuildReport) -> list[str]:
    told = list(report.warnings)
    if report.fallback is not None:
        told.append(f"the standard form of attention is used: {report.fallback}")
    if report.layers.fell_apart:
        count = len(report.layers.fell_apart)
        told.append(f"{count} attention layers are several kernels (specc inspect lists them)")
    return told


BACKEND = TensorRTCompiler()
