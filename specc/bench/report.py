"""What a benchmark has found, as one JSON document."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import torch

from specc.artifact.manifest import Manifest
from specc.bench.conversations import TalkMeasurement, category_figures, find_talk_differences
from specc.bench.engine import add_margins
from specc.bench.peers.installed import versions_of
from specc.bench.questions import Question
from specc.bench.rounds import (
    OFF,
    SPECULATIVE,
    Contender,
    Difference,
    Measurement,
    Rounds,
    Spread,
    equal_token_share,
    find_differences,
    identity,
    run_name,
    summarize,
    uneven_rounds,
)
from specc.bench.step_bytes import mean_context, step_bytes
from specc.cost.acceptance import expected_tokens
from specc.runtime.engine import Engine
from specc.system.machine import describe_machine

SCHEMA_VERSION = 1


@dataclass
class Settings:
    """What was asked for; all of it is in the report.

    Args:
        tokens: output tokens of each prompt.
        prompts: file of prompts, or `built-in`.
        dataset: the same file, where it holds conversations; `tokens` is then the most of a turn.
        synthetic_acceptance: probabilities by sibling rank; None is real acceptance.
        assisted: setting of transformers' assisted generation that was kept.
        against: peers that were to be measured, too.
        peers: run of a peer → the setting that was kept, with its name.
    """

    rounds: int
    warmup: int
    tokens: int
    batch_size: int
    prompts: str
    dataset: str | None = None
    num_prompts: int = 0
    num_prompt_tokens: int = 0
    threads: int = 0
    synthetic_acceptance: list[float] | None = None
    assisted: dict[str, Any] | None = None
    against: list[str] = field(default_factory=list)
    peers: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass
class Bench:
    """A finished benchmark, before it is turned into figures.

    Args:
        prompts: token ids.
        rounds: of what ran, `off` among them.
        bandwidth: as `measure_read_bandwidth` returns it.
        notes: what a reader has to know about a run that is absent or special.
        questions: of a data set, by place; none where prompts are asked once each.
        not_available: `{"name": run, "reason": …}` of what peers cannot do.
    """

    directory: Path
    engine: Engine
    settings: Settings
    prompts: list[list[int]]
    rounds: Rounds
    bandwidth: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    questions: Sequence[Question] = ()
    not_available: Sequence[dict[str, str]] = ()

    @property
    def manifest(self) -> Manifest:
        assert self.engine.manifest is not None, "an engine that was loaded has a manifest"
        return self.engine.manifest


def make_report(bench: Bench, command: str) -> dict[str, Any]:
    """All figures of a benchmark, ready for JSON; the schema is in docs/guide/bench.md."""
    manifest = bench.manifest
    return report_head(command, bench.settings.against) | {
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
        "runs": [_run(bench, contender, measured) for contender, measured in bench.rounds],
        "not_available": list(bench.not_available),
        "notes": [*bench.notes, *_short_runs(bench), *uneven_runs(bench.rounds)],
    }


def report_head(command: str, peers: Sequence[str] = ()) -> dict[str, Any]:
    """What every report begins with; versions are also of what these peers are made of."""
    return {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": versions() | versions_of(peers),
    }


def _run(bench: Bench, contender: Contender, measured: list[Measurement]) -> dict[str, Any]:
    plan = bench.engine.plans[contender.plan] if contender.plan else None
    off = bench.rounds.of(OFF)
    figures = summarize(measured, off, off if plan else bench.rounds.plain_of(contender.name))
    probabilities = bench.settings.synthetic_acceptance
    synthetic = None
    if contender.name == SPECULATIVE and probabilities is not None and plan is not None:
        synthetic = {
            "probabilities": probabilities,
            "expected_acceptance_length": expected_tokens(plan.tree, [probabilities]),
        }
    own: dict[str, Any] = {
        "name": contender.name,
        "plan": contender.plan,
        "widths": list(plan.widths) if plan else None,
        "synthetic_acceptance": synthetic,
    }
    own["categories"] = {}
    if bench.questions:
        talks, plain = _talks(measured), _talks(off)
        plain = talks if measured is off else plain
        own["categories"] = category_figures(talks, plain)
        same = _compare_talks(bench, talks, plain[0])
    else:
        reference = None if synthetic else off[0].outputs
        same = compare_outputs(bench.engine, bench.prompts, reference, measured)
    return own | figures | same | _bytes(bench, plan, figures)


def _talks(measured: Sequence[Measurement]) -> list[TalkMeasurement]:
    return [cast(TalkMeasurement, measurement) for measurement in measured]


def _compare_talks(
    bench: Bench, measured: Sequence[TalkMeasurement], reference: TalkMeasurement
) -> dict[str, Any]:
    """As `compare_outputs`, conversation by conversation; differences name question and turn."""
    differences = add_margins(
        bench.engine,
        reference.prompts,
        reference.outputs,
        find_talk_differences(reference, measured),
    )
    # conversations none of whose turns fitted were not compared
    found = identity(differences, len({question for question, _ in reference.turns}))
    for item in found["differences"]:
        question, turn = reference.turns[item["prompt"]]
        item |= {"question_id": bench.questions[question].question_id, "turn": turn}
    return found


def compare_outputs(
    engine: Engine,
    prompts: Sequence[list[int]],
    reference: Sequence[list[int]] | None,
    measured: Sequence[Measurement],
) -> dict[str, Any]:
    """Whether the outputs are plain decoding's own, for JSON.

    Args:
        engine: that ran, to tell near ties.
        prompts: token ids.
        reference: outputs of plain decoding; None where dice accepted, so nothing is to be equal.
    """
    if reference is None:
        return dict.fromkeys(identity([], 1)) | {"equal_token_share": None, "differences": []}
    differences: Sequence[Difference] = find_differences(reference, measured)
    differences = add_margins(engine, prompts, reference, differences)
    return identity(differences, len(prompts)) | {
        "equal_token_share": equal_token_share(reference, differences)
    }


def _bytes(bench: Bench, plan: Any, figures: dict[str, Any]) -> dict[str, Any]:
    names = ("bytes_per_step", "bytes_per_step_parts", "read_bandwidth_share")
    if plan is None or not figures["num_steps"]:
        return dict.fromkeys(names)
    num_tokens = bench.settings.tokens
    if bench.questions:  # answers end where the model ends them
        num_tokens = figures["num_output_tokens"] // max(len(bench.prompts), 1)
    context = mean_context([len(ids) for ids in bench.prompts], num_tokens)
    parts = step_bytes(
        bench.directory, bench.manifest, plan, context, figures["sequences_per_step"]
    )
    gb_s = parts.total / 1e6 / figures["ms_per_step"]
    share = gb_s / bench.bandwidth["gb_s"]
    return dict(zip(names, (parts.total, asdict(parts), share), strict=True))


def _short_runs(bench: Bench) -> list[str]:
    """Runs that did not emit what was asked for: their times do not compare."""
    wanted = len(bench.prompts) * bench.settings.tokens
    if bench.questions:
        return []
    return [
        f"{run_name(contender.name, contender.plan)} emitted"
        f" {measured[0].num_output_tokens} tokens instead of {wanted}"
        for contender, measured in bench.rounds
        if measured[0].num_output_tokens != wanted
    ]


def uneven_runs(rounds: Rounds) -> list[str]:
    """A note on runs whose rounds differ much."""
    spreads = {
        run_name(contender.name, contender.plan): Spread.of([m.tokens_per_s for m in measured])
        for contender, measured in rounds
    }
    return uneven_rounds(spreads, "repeat this on a machine without other work")


def versions() -> dict[str, str | None]:
    """What a figure depends on, for JSON."""
    from specc.version import __version__

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
