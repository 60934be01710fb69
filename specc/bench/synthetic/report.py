"""What a benchmark with random weights has found, as one JSON document."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

import torch

from specc.artifact.in_memory import BenchPrograms
from specc.bench.baseline import ASSISTED
from specc.bench.device import describe_device
from specc.bench.report import compare_outputs, report_head, uneven_runs, versions
from specc.bench.rounds import OFF, Contender, Measurement, Rounds, summarize
from specc.bench.step_bytes import ModelShape, StepBytes, count_step_bytes
from specc.bench.steps import SAMPLED, StepFigures
from specc.cost.acceptance import expected_tokens
from specc.runtime.engine import Engine

# beyond this share, a note tells that dice gave another length than expected
_NOTED_DEVIATION = 0.02


@dataclass
class ShapesSettings:
    """What was asked for; all of it is in the report.

    Args:
        draft: a self-draft, or a head by name; None where the draft is a shape, or none.
        context: tokens of each prompt.
        tokens: output tokens of each prompt.
        batch_size: prompts, which are decoded together.
        synthetic_acceptance: probabilities by sibling rank; None is real acceptance.
        against: `transformers`, or None.
        quantize: name of the layout of projections' weights, but a head's; None is none.
        draft_quantize: that of the draft, or `off`; None is as the target's, and a head's none.
    """

    synthetic: str
    draft: str | None
    context: int
    tokens: int
    batch_size: int
    rounds: int
    warmup: int
    threads: int
    synthetic_acceptance: list[float] | None
    against: str | None
    quantize: str | None = None
    draft_quantize: str | None = None
    weight_fragments: bool = False


@dataclass
class ShapesBench:
    """A benchmark before it is turned into figures; `rounds` come when steps are measured.

    Args:
        prompts: token ids.
        rounds: of what ran, `off` first.
        steps: plan → what was found of its steps.
        bandwidth: as `measure_copy_bandwidth` returns it.
        compile_s: seconds of tracing and rewriting.
        notes: what a reader has to know about a run that is absent or special.
    """

    programs: BenchPrograms
    engine: Engine
    settings: ShapesSettings
    prompts: list[list[int]]
    bandwidth: dict[str, Any]
    compile_s: float
    rounds: Rounds = field(default_factory=Rounds)
    steps: dict[str, StepFigures] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def make_shapes_report(bench: ShapesBench, command: str) -> dict[str, Any]:
    """All figures of a benchmark, ready for JSON; the schema is in docs/design/synthetic.md."""
    programs = bench.programs
    device = bench.engine.cache.device
    settings = asdict(bench.settings)
    runs = [_run(bench, contender, measured) for contender, measured in bench.rounds]
    return report_head(command) | {
        "device": describe_device(device),
        "versions": _versions(),
        "engine": {
            "path": None,
            "backend": bench.engine.backend,
            "device": device.type,
            "dtype": programs.dtype,
            "plans": [plan.name for plan in programs.plans],
            "default_plan": programs.plans[0].name,
            "models": [
                {
                    "name": model.entry.name,
                    "source": model.entry.source,
                    "num_parameters": model.entry.num_parameters,
                    "quantization": model.entry.quantization,
                    "memory": asdict(model.memory),
                    "weight_bytes": weight_bytes(model.program),
                }
                for model in programs.models
            ],
            "compile_s": bench.compile_s,
        },
        "settings": settings | {"num_prompts": len(bench.prompts)},
        "copy_bandwidth_gb_s": bench.bandwidth["gb_s"],
        "copy_bandwidth": bench.bandwidth,
        "runs": runs,
        "notes": [
            *bench.notes,
            *_deviations(runs),
            *_assisted_note(bench),
            *uneven_runs(bench.rounds),
        ],
    }


def weight_bytes(program: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of a program's weights by how they lie in memory: dtype, or layout of integers.

    Args:
        program: content of `program.json`.
    """
    found: dict[str, dict[str, int]] = {}
    for item in program["inputs"]:
        if item["kind"] == "weight":
            name = item.get("layout", item["dtype"]).removeprefix("blocks-")
            num_bytes = math.prod(item["shape"]) * getattr(torch, item["dtype"]).itemsize
            # tied weights are one tensor
            found.setdefault(name, {})[item["key"]] = num_bytes
    return {name: sum(sizes.values()) for name, sizes in found.items()}


def _run(bench: ShapesBench, contender: Contender, measured: list[Measurement]) -> dict[str, Any]:
    plan = bench.engine.plans[contender.plan] if contender.plan else None
    off = bench.rounds.of(OFF)
    figures = summarize(measured, off, off if plan else bench.rounds.plain_of(contender.name))
    synthetic: dict[str, Any] | None = None
    expected = _expected_length(bench, contender.plan) if contender.plan else None
    if expected is not None:
        synthetic = {
            "probabilities": bench.settings.synthetic_acceptance,
            "expected_acceptance_length": expected,
            "drawn_acceptance_length": figures["mean_acceptance_length"],
        }
    own: dict[str, Any] = {
        "name": contender.name,
        "plan": contender.plan,
        "widths": list(plan.widths) if plan else None,
        "synthetic_acceptance": synthetic,
    }
    step = None
    if contender.plan:
        step = step_report(bench, contender.plan, figures["ms_per_step"])
    reference = None if synthetic else off[0].outputs
    same = compare_outputs(bench.engine, bench.prompts, reference, measured)
    return own | figures | same | {"step": step}


def step_report(bench: ShapesBench, plan: str, generate_ms: float = 0.0) -> dict[str, Any]:
    """A plan's steps by themselves, beside what memory allows.

    Args:
        bench: with the steps of this plan, and of off.
        generate_ms: of a step of the rounds; 0 before them.
    """
    found, expected = bench.steps[plan], _expected_length(bench, plan)
    read = _bytes(bench, plan, found.context)
    floor_ms = read.total / 1e6 / bench.bandwidth["gb_s"]
    off = bench.steps[OFF]
    break_even = found.step_ms.median / off.step_ms.median
    return {
        "ms": found.step_ms.median,
        "ms_min": found.step_ms.min,
        "ms_max": found.step_ms.max,
        "num_steps": found.num_steps,
        "gap_share": found.gap_share,
        # what generating takes beyond the step itself
        "host_share": 1 - found.step_ms.median / generate_ms if generate_ms else None,
        "stage_ms": found.stage_ms,
        "kernels": found.kernels,
        "kernel_us": found.kernel_us,
        "kernels_counted": (
            "profiler" if bench.engine.cache.device.type == "cuda" else "operators that write"
        ),
        "is_captured": found.is_captured,
        "acceptance_length": found.acceptance_length,
        "expected_acceptance_length": expected,
        "context": found.context,
        "bytes": read.total,
        "bytes_parts": asdict(read),
        "floor_ms": floor_ms,
        "floor_ratio": found.step_ms.median / floor_ms,
        "speedup_over_off": found.acceptance_length / break_even if plan != OFF else None,
        "speedup_at_expected_length": None if expected is None else expected / break_even,
        "break_even_acceptance_length": break_even if plan != OFF else None,
        "sampled": _sampled(found, floor_ms),
    }


def _sampled(found: StepFigures, floor_ms: float) -> dict[str, Any] | None:
    """Of requests that draw their tokens: the same graph, and the same floor."""
    if found.sampled_ms is None:
        return None
    return {
        "temperature": SAMPLED.temperature,
        "top_p": SAMPLED.top_p,
        "ms": found.sampled_ms.median,
        "ms_min": found.sampled_ms.min,
        "ms_max": found.sampled_ms.max,
        "acceptance_length": found.sampled_length,
        "floor_ratio": found.sampled_ms.median / floor_ms,
        "over_greedy": found.sampled_ms.median / found.step_ms.median,
    }


def _expected_length(bench: ShapesBench, plan: str) -> float | None:
    """Acceptance length that dice lead to; None without dice."""
    probabilities, tree = bench.settings.synthetic_acceptance, bench.engine.plans[plan]
    if probabilities is None or not tree.speculates:
        return None
    return expected_tokens(tree.tree, [probabilities])


def _bytes(bench: ShapesBench, plan: str, context: float) -> StepBytes:
    programs = bench.programs
    models = {
        model.entry.name: ModelShape(
            model.program, model.entry.layers, model.entry.dtype, copies=model.copies
        )
        for model in programs.models
    }
    return count_step_bytes(
        programs.steps[plan],
        models,
        bench.engine.plans[plan],
        context,
        bench.settings.batch_size,
    )


def _deviations(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where dice gave another length than their probabilities lead to: speedups carry that."""
    notes = []
    for run in runs:
        if (synthetic := run["synthetic_acceptance"]) is None:
            continue
        expected = synthetic["expected_acceptance_length"]
        drawn = (synthetic["drawn_acceptance_length"], run["step"]["acceptance_length"])
        shares = [length / expected - 1 for length in drawn]
        if max(map(abs, shares)) > _NOTED_DEVIATION:
            notes.append(
                f"{run['name']} ({run['plan']}): the dice gave a length of {drawn[0]:.2f} in the"
                f" rounds ({shares[0]:+.1%}) and of {drawn[1]:.2f} in queued steps"
                f" ({shares[1]:+.1%}), where {expected:.2f} is expected; so do the speedups differ"
            )
    return notes


def _assisted_note(bench: ShapesBench) -> list[str]:
    """Random weights decide what assisted generation accepts; dice cannot be put there."""
    for contender, measured in bench.rounds:
        if contender.name == ASSISTED:
            length = measured[0].mean_acceptance_length
            return [
                f"{ASSISTED} has the real acceptance of random weights, a length of {length:.2f}:"
                " what it would gain with a trained draft does not show"
            ]
    return []


def _versions() -> dict[str, str | None]:
    found = versions() | {"cuda": torch.version.cuda, "triton": None}
    with contextlib.suppress(metadata.PackageNotFoundError):
        found["triton"] = metadata.version("triton")
    return found
