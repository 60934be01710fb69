"""The TensorRT part of a compilation: one engine a model, from the ONNX file beside it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from specc.artifact.directory import EngineWriter
from specc.artifact.manifest import LimitsEntry, ModelEntry, TensorRTEntry
from specc.config import CompileConfig
from specc.errors import ConfigError
from specc.passes.lower.cuda.pass_sizes import step_sizes
from specc.passes.lower.tensorrt import torch_tensorrt_engine as lower_torch_tensorrt
from specc.passes.lower.tensorrt.builder import BuildOptions, timing_cache_file
from specc.passes.lower.tensorrt.export_with_weights import read_weights
from specc.passes.lower.tensorrt.lower import BuildReport, build_engine
from specc.passes.lower.tensorrt.shape_profile import ShapeProfile
from specc.progress import Phases
from specc.speculation.plans import SpecPlan
from specc.tensorrt import library as trt

if TYPE_CHECKING:
    from specc.compiler.build import CompiledModel


def check_tensorrt(config: CompileConfig, dtypes: Sequence[str]) -> TensorRTEntry:
    """What will build the engines; asked before anything is traced.

    Raises:
        TensorRTError: no TensorRT, one that is too old, or one that cannot build for this GPU.
        ConfigError: a dtype without a fused attention kernel.
    """
    facts = trt.facts()
    if "float32" in dtypes and not config.decomposable_attention:
        raise ConfigError(
            "dtype float32 for TensorRT, which has no fused attention of it",
            "float16 or bfloat16",
            "pass --dtype float16, or --decomposable-attention for an attention of several kernels",
        )
    capability = config.compute_capability
    if capability is not None:
        capability = trt.parse_compute_capability(capability)
    return TensorRTEntry(facts.name, facts.version, capability)


def model_profiles(
    plans: Sequence[SpecPlan], limits: LimitsEntry, models: Sequence[ModelEntry]
) -> dict[str, list[ShapeProfile]]:
    """Shapes that each model runs with: prompts, and every pass of a step of every plan.

    Args:
        plans: of the engine.
        limits: of the engine.
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
        sizes = step_sizes([plan], vocab_sizes, [1], 1, is_rectangular=True)
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


def build_engines(
    writer: EngineWriter,
    models: Sequence[CompiledModel],
    plans: Sequence[SpecPlan],
    limits: LimitsEntry,
    config: CompileConfig,
    phases: Phases,
    by_torch: bool = False,
) -> list[str]:
    """Build the TensorRT engine of every model; their ONNX files are written.

    Args:
        writer: of the engine.
        models: with their entries and, for torch-tensorrt, their rectangular programs.
        plans: of the engine.
        limits: of the engine.
        config: options.
        phases: progress.
        by_torch: torch-tensorrt builds them, from the rectangular programs, not the parser.
    Returns:
        what the user should know.
    Raises:
        TensorRTError: the builder refuses a model.
    """
    profiles = model_profiles(plans, limits, [model.entry for model in models])
    warnings = []
    for model in models:
        with phases.phase(f"build {model.name} engine") as advance:
            build = partial(_build_by_torch if by_torch else _build_from_onnx, writer, model)
            report = build(
                profiles[model.name],
                BuildOptions(
                    compute_capability=config.compute_capability,
                    decomposable=config.decomposable_attention,
                    timing_cache=timing_cache_file(),
                    progress=lambda phase, done, total, advance=advance: advance(done, total),  # type: ignore[misc]
                ),
            )
            # the layers are in a file of their own
            summary = {key: value for key, value in report.to_json().items() if key != "layers"}
            writer.write_json(model.entry.build_file, summary)
        warnings += [f"{model.name}: {warning}" for warning in _warnings(report)]
    return warnings


def _build_from_onnx(
    writer: EngineWriter,
    model: CompiledModel,
    profiles: Sequence[ShapeProfile],
    options: BuildOptions,
) -> BuildReport:
    onnx_file, plan = (writer.path(x) for x in (model.entry.onnx_file, model.entry.plan_file))
    return build_engine(onnx_file, plan, profiles, options)


def _build_by_torch(
    writer: EngineWriter,
    model: CompiledModel,
    profiles: Sequence[ShapeProfile],
    options: BuildOptions,
) -> BuildReport:
    program = model.rectangular
    assert program is not None, "it was traced for the ONNX file"
    return lower_torch_tensorrt.build_engine(
        program,
        read_weights(program, writer.path(model.entry.weights_file)),
        writer.path(model.entry.plan_file),
        profiles,
        decomposable=options.decomposable,
        timing_cache=options.timing_cache,
    )


def _warnings(report: BuildReport) -> list[str]:
    told = list(report.warnings)
    if report.fallback is not None:
        told.append(f"the standard form of attention is used: {report.fallback}")
    if report.layers.fell_apart:
        count = len(report.layers.fell_apart)
        told.append(f"{count} attention layers are several kernels (specc inspect lists them)")
    return told
