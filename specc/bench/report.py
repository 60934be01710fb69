"""What a benchmark has found, as one JSON document."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from specc.artifact.manifest import Manifest
from specc.bench.baseline import PLAIN
from specc.bench.dice import expected_length
from specc.bench.engine import add_margins
from specc.bench.rounds import (
    OFF,
    SPECULATIVE,
    Contender,
    Difference,
    Measurement,
    find_differences,
    identity,
    summarize,
)
from specc.bench.step_bytes import mean_context, step_bytes
from specc.runtime.engine import Engine
from specc.system.machine import describe_machine

SCHEMA_VERSION = 1
# greatest over least tokens/s of a run's rounds, beyond which a note warns
_UNEVEN = 1.25


@dataclass
class Settings:
    """What was asked for; all of it is in the report.

    Args:
        tokens: output tokens of each prompt.
        prompts: file of prompts, or `built-in`.
        synthetic_acceptance: probabilities by sibling rank; None is real acceptance.
        assisted: setting of transformers' assisted generation that was kept.
    """

    rounds: int
    warmup: int
    tokens: int
    batch_size: int
    prompts: str
    num_prompts: int = 0
    num_prompt_tokens: int = 0
    threads: int = 0
    synthetic_acceptance: list[float] | None = None
    assisted: dict[str, Any] | None = None


@dataclass
class Bench:
    """A finished benchmark, before it is turned into figures.

    Args:
        directory: of the engine.
        prompts: token ids.
        contenders: what ran, `off` among them.
        measured: of each contender, one measurement a round.
        bandwidth: as `measure_read_bandwidth` returns it.
        notes: what a reader has to know about a run that is absent or special.
    """

    directory: Path
    engine: Engine
    settings: Settings
    prompts: list[list[int]]
    contenders: Sequence[Contender]
    measured: list[list[Measurement]]
    bandwidth: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    @property
    def off(self) -> list[Measurement]:
        return self.measurements_of(OFF)

    def measurements_of(self, name: str) -> list[Measurement]:
        """Of the first contender of this name."""
        return self.measured[[contender.name for contender in self.contenders].index(name)]

    @property
    def manifest(self) -> Manifest:
        assert self.engine.manifest is not None, "an engine that was loaded has a manifest"
        return self.engine.manifest


def make_report(bench: Bench, command: str) -> dict[str, Any]:
    """All figures of a benchmark, ready for JSON; the schema is in docs/bench.md."""
    manifest = bench.manifest
    return {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": versions(),
        "engine": {
            "path": str(bench.directory),
            "backend": manifest.backend,
            "device": manifest.device,
            "dtype": manifest.dtype,
            "plans": [plan.name for plan in manifest.plans],
            "default_plan": manifest.default_plan,
            "models": [
                {"name": m.name, "source": m.source, "num_parameters": m.num_parameters}
                for m in manifest.models
            ],
        },
        "settings": asdict(bench.settings),
        "read_bandwidth_gb_s": bench.bandwidth["gb_s"],
        "read_bandwidth": bench.bandwidth,
        "runs": [
            _run(bench, contender, measured)
            for contender, measured in zip(bench.contenders, bench.measured, strict=True)
        ],
        "notes": [
            *bench.notes,
            *_short_runs(bench),
            *uneven_runs(bench.contenders, bench.measured),
        ],
    }


def _run(bench: Bench, contender: Contender, measured: list[Measurement]) -> dict[str, Any]:
    plan = bench.engine.plans[contender.plan] if contender.plan else None
    plain = bench.off if plan else bench.measurements_of(PLAIN)
    figures = summarize(measured, bench.off, plain)
    probabilities = bench.settings.synthetic_acceptance
    synthetic = None
    if contender.name == SPECULATIVE and probabilities is not None and plan is not None:
        synthetic = {
            "probabilities": probabilities,
            "expected_acceptance_length": expected_length(probabilities, plan.tree),
        }
    own: dict[str, Any] = {
        "name": contender.name,
        "plan": contender.plan,
        "widths": list(plan.widths) if plan else None,
        "synthetic_acceptance": synthetic,
    }
    return own | figures | _identity(bench, measured, synthetic) | _bytes(bench, plan, figures)


def _identity(bench: Bench, measured: list[Measurement], synthetic: Any) -> dict[str, Any]:
    if synthetic is not None:
        empty = identity([], len(bench.prompts))
        return dict.fromkeys(empty) | {"differences": []}
    reference = bench.off[0].outputs
    differences: Sequence[Difference] = find_differences(reference, measured)
    differences = add_margins(bench.engine, bench.prompts, reference, differences)
    return identity(differences, len(bench.prompts))


def _bytes(bench: Bench, plan: Any, figures: dict[str, Any]) -> dict[str, Any]:
    names = ("bytes_per_step", "bytes_per_step_parts", "read_bandwidth_share")
    if plan is None or not figures["num_steps"]:
        return dict.fromkeys(names)
    context = mean_context([len(ids) for ids in bench.prompts], bench.settings.tokens)
    parts = step_bytes(
        bench.directory, bench.manifest, plan, context, figures["sequences_per_step"]
    )
    gb_s = parts.total / 1e6 / figures["ms_per_step"]
    share = gb_s / bench.bandwidth["gb_s"]
    return dict(zip(names, (parts.total, asdict(parts), share), strict=True))


def _short_runs(bench: Bench) -> list[str]:
    """Runs that did not emit what was asked for: their times do not compare."""
    wanted = len(bench.prompts) * bench.settings.tokens
    return [
        f"{_label(contender)} emitted {measured[0].num_output_tokens} tokens instead of {wanted}"
        for contender, measured in zip(bench.contenders, bench.measured, strict=True)
        if measured[0].num_output_tokens != wanted
    ]


def uneven_runs(
    contenders: Sequence[Contender], measured_runs: Sequence[Sequence[Measurement]]
) -> list[str]:
    """Runs whose rounds differ so much that something else must have used the machine."""
    uneven = []
    for contender, measured in zip(contenders, measured_runs, strict=True):
        rates = [m.tokens_per_s for m in measured]
        if (ratio := max(rates) / min(rates)) > _UNEVEN:
            uneven.append(f"{_label(contender)} by {ratio - 1:.0%}")
    if not uneven:
        return []
    return [f"rounds differ: {', '.join(uneven)}; repeat this on a machine without other work"]


def _label(contender: Contender) -> str:
    return f"{contender.name} {contender.plan}" if contender.name == SPECULATIVE else contender.name


def versions() -> dict[str, str | None]:
    """What a figure depends on, for JSON."""
    from specc import __version__

    versions: dict[str, str | None] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "specc": __version__,
    }
    try:
        versions["transformers"] = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        versions["transformers"] = None
    return versions
