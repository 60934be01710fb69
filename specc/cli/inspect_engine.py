"""`specc inspect`: what an engine holds, from its manifest and its pass report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specc.artifact.backends import facts_of
from specc.artifact.directory import read_manifest, torch_version
from specc.artifact.manifest import INSTRUCTIONS_VERSION, PROFILE_FILE
from specc.artifact.offload import least_budget, read_pieces
from specc.artifact.segments import SegmentedModel
from specc.cli import render, render_plans, render_states
from specc.cli.print_table import print_lines
from specc.cli.tensorrt import print_builds, read_builds
from specc.close_name import advice
from specc.cost.critical_length import CriticalLength
from specc.errors import ConfigError, EngineError, SpeccError
from specc.sampling.generation_config import read_defaults
from specc.system.files import format_bytes, hash_file
from specc.system.json_file import read_engine_json
from specc.version import __version__

if TYPE_CHECKING:
    from rich.console import Console

    from specc.artifact.manifest import Manifest

REPORT_FILE = "report.json"


def run_inspect(engine: Path, *, only: str | None, why: bool, verify: bool, as_json: bool) -> None:
    """Print what an engine holds.

    Args:
        engine: its directory.
        only: name of one pass; nothing else is printed then.
        why: each declined node, not counts by reason; of TensorRT engines, each layer.
        verify: hash all files.
        as_json: one JSON object.
    Raises:
        EngineError: no engine, or a file is missing or altered; what is known is printed first.
        ConfigError: no pass has this name.
    """
    manifest = read_manifest(engine)
    report = _read_report(engine, manifest)
    passes = _select(report["passes"], only)
    builds = read_builds(engine, manifest)
    errors = check_files(engine, manifest, verify)
    if as_json:
        data = {
            "manifest": manifest.to_json(),
            "report": report | {"passes": passes},
            "builds": builds,
            "verified": verify,
            "errors": [error.found for error in errors],
        }
        print(json.dumps(data, ensure_ascii=False, indent=1))
    else:
        console = render.make_console()
        if only is None:
            _print_manifest(console, engine, manifest)
            print_builds(console, manifest, builds, with_layers=why)
            _print_limits(console, engine, manifest)
            _print_profile(console, engine, manifest)
            _print_files(console, manifest, verify and not errors)
        # last: who wants to know them asks for them
        _print_passes(console, passes, why, shows_all=why or only is not None)
    if errors:
        raise errors[0]


def check_files(engine: Path, manifest: Manifest, verify: bool) -> list[EngineError]:
    """Files that are missing or differ from the manifest; bytes are read only to verify."""
    errors = []
    again = "compile or copy the engine again"
    for name, entry in manifest.files.items():
        path = engine / name
        needed = f"{entry.bytes} bytes, as the manifest says"
        if not path.is_file():
            errors.append(EngineError(f"{path} is missing", needed, again))
        elif (size := path.stat().st_size) != entry.bytes:
            errors.append(EngineError(f"{path} has {size} bytes", needed, again))
        elif verify and (sha256 := hash_file(path)) != entry.sha256:
            needed = f"sha256 {entry.sha256}, as the manifest says"
            errors.append(EngineError(f"{path} has sha256 {sha256}", needed, again))
    return errors


def _read_report(engine: Path, manifest: Manifest) -> dict[str, Any]:
    """The pass report; an engine whose report is gone can be shown without it."""
    if REPORT_FILE not in manifest.files:
        return {"passes": [], "phases": {}}
    path = engine / REPORT_FILE
    if not path.exists():
        return {"passes": [], "phases": {}}
    return read_engine_json(path, "a pass report", "compile or copy the engine again")


def _select(passes: list[dict[str, Any]], only: str | None) -> list[dict[str, Any]]:
    if only is None:
        return passes
    selected = [item for item in passes if item["pass"] == only]
    if not selected:
        names = list(dict.fromkeys(item["pass"] for item in passes))
        needed = f"one of {', '.join(names) or '(no passes)'}"
        raise ConfigError(f"--pass {only}", needed, advice(only, names, "choose one of them"))
    return selected


def _print_manifest(console: Console, engine: Path, manifest: Manifest) -> None:
    console.print(render.heading(str(engine)), soft_wrap=True)
    said = [
        f"specc {manifest.specc_version}, torch {manifest.torch_version}, backend"
        f" {manifest.backend} on {manifest.device}, {manifest.dtype}",
        f"created {manifest.created}",
    ]
    is_data = facts_of(manifest.backend).is_data
    if manifest.instructions != INSTRUCTIONS_VERSION:
        said.append(f"specc run refuses it: this specc has instructions {INSTRUCTIONS_VERSION}")
    if manifest.specc_version != __version__ and not is_data:
        said.append(f"specc run refuses it: this is specc {__version__}")
    if manifest.torch_version != torch_version() and not is_data:
        said.append(f"specc run refuses it: this installation has torch {torch_version()}")
    print_lines(console, said)
    console.print()
    console.print(render.models_table(manifest))
    lines = (
        render.source_lines,
        render.self_draft_lines,
        render.adapter_lines,
        render.vocabulary_lines,
        render.head_lines,
        render.rotary_lines,
        render.weight_lines,
    )
    print_lines(console, (line for describe in lines for line in describe(manifest)))
    console.print()
    console.print(render.layers_table(manifest.models))
    if any(model.state_layers for model in manifest.models):
        console.print(render_states.states_table(manifest.models))
    print_lines(console, _kernel_lines(engine, manifest))
    tokenizer = manifest.tokenizer
    eos = ", ".join(map(str, tokenizer.eos_token_ids)) or "none"
    if tokenizer.tokenizer_eos:
        alone = ", ".join(map(str, tokenizer.tokenizer_eos))
        eos += f" ({alone} by the tokenizer alone: not in generation_config.json or config.json)"
    file = tokenizer.file or "none, token ids only"
    print_lines(console, ["", f"tokenizer: {file}; EOS ids: {eos}", _sampling_line(engine)])
    for plan in manifest.plans:
        default = " (default)" if plan.name == manifest.default_plan else ""
        console.print(render.heading(f"\nplan {plan.name}{default}"))
        console.print(render_plans.describe_plan(plan.plan), soft_wrap=True)
        if plan.plan.speculates and plan.plan.dynamic is None:
            console.print(render_plans.draw_tree(plan.plan.largest_tree))


def _kernel_lines(engine: Path, manifest: Manifest) -> list[str]:
    """What the library of the CPU has no kernel for, which torch runs."""
    facts = facts_of(manifest.backend)
    if facts.runs_all or not facts.is_data:
        return []
    # it reads the graphs as torch's, which takes a second
    from specc.runtime.backends.cpu.missing_kernels import missing_kernels

    try:
        found = missing_kernels(engine, manifest)
    except SpeccError as error:
        return ["", f"kernels: {error.found}"]
    if not found:
        return ["", "every operator has a kernel"]
    named = ", ".join(f"{name} × {count}" for name, count in found.most_common())
    return ["", f"{found.total()} instructions without a kernel, which torch runs: {named}"]


def _sampling_line(engine: Path) -> str:
    try:
        told = read_defaults(engine).told()
    except EngineError as error:
        told = f"sampling defaults that no request can have: {error.found}"
    return told or "sampling defaults: none of the checkpoint's own"


def _print_passes(
    console: Console, passes: list[dict[str, Any]], why: bool, shows_all: bool
) -> None:
    console.print(render.heading("\npasses"))
    idle = [] if shows_all else [p for p in passes if not p["rewrites"] and not p["declined"]]
    console.print(render.passes_table([item for item in passes if item not in idle]))
    if idle:
        console.print(f"{len(idle)} more had nothing to do (--why shows them)")
    lines = render.declined_lines(passes, why)
    if lines:
        console.print(render.heading("\ndeclined" + ("" if why else " (--why names the nodes)")))
        print_lines(console, lines)


def _print_limits(console: Console, engine: Path, manifest: Manifest) -> None:
    limits = manifest.limits
    blocks = f"blocks of {limits.block_size} rows" if limits.block_size else "dense rows"
    console.print(render.heading("\nmemory"))
    console.print(render.memory_table(manifest))
    probe = render.probe_line(manifest.probe) if manifest.probe else "none"
    lines = [
        f"for {limits.max_batch_size} sequences of {limits.max_seq_len} tokens, caches in"
        f" {blocks}, prefill in chunks of {limits.prefill_chunk}" + render.cache_room(manifest),
        *render_states.state_lines(manifest),
        *_segment_lines(manifest, engine),
        *_overlap_lines(manifest),
        "",
        f"probe: {probe}",
    ]
    print_lines(console, lines)


def _segment_lines(manifest: Manifest, engine: Path) -> list[str]:
    """The segments of a target, and the least that `--offload-weights` takes; none of others."""
    if manifest.segments is None:
        return []
    lines = [
        f"target: {manifest.segments.num_segments} segments of {manifest.segments.num_kinds} kinds"
    ]
    target = manifest.models[0]
    file = engine / manifest.weights_file(target)
    if facts_of(manifest.backend).offloads_weights != "segments" or not file.is_file():
        return lines
    pieces, _ = read_pieces(SegmentedModel.read(engine / target.segments_file), file)
    least = least_budget(pieces)
    total, largest = sum(p.span for p in pieces), max(p.span for p in pieces)
    lines.append(
        f"--offload-weights: {format_bytes(least)} or more of the {format_bytes(total)} that layers"
        f" and head take{' on each rank' if manifest.num_ranks > 1 else ''}; the largest segment"
        f" has {format_bytes(largest)}"
    )
    return lines


def _overlap_lines(manifest: Manifest) -> list[str]:
    """Which plans `--overlap` runs in halves, and why it leaves others whole; none if refused."""
    if not facts_of(manifest.backend).overlaps:
        return []
    from specc.runtime.backends.captured.overlapped_step import FEWEST, whole_reason
    from specc.runtime.backends.overlap import check_overlap

    try:
        check_overlap(manifest, manifest.backend)
    except ConfigError:
        return []
    reasons = {entry.plan.name: whole_reason(entry.plan) for entry in manifest.plans}
    halves = ", ".join(name for name, reason in reasons.items() if not reason)
    whole = ", ".join(f"{name} ({reason})" for name, reason in reasons.items() if reason)
    return [f"--overlap: {halves} in halves from {FEWEST} sequences on; whole: {whole}"]


def _print_profile(console: Console, engine: Path, manifest: Manifest) -> None:
    """From which context on self-drafts pay, where `specc tune` has found that out."""
    path = engine / PROFILE_FILE
    if PROFILE_FILE not in manifest.files or not path.is_file():
        return
    profile = read_engine_json(path, "a profile", "run specc tune again")
    try:
        lengths = [CriticalLength.from_json(one) for one in profile.get("critical_lengths", [])]
    except (KeyError, TypeError, AttributeError) as error:
        raise EngineError(
            f"{path} with a critical length without {error}",
            "batch_size, draft, num_draft_tokens, expected_tokens, rows",
            "run specc tune again",
        ) from error
    if lengths:
        console.print(render.heading("\ncontext from which on self-drafts pay (specc tune)"))
        console.print(render_plans.critical_table(lengths))


def _print_files(console: Console, manifest: Manifest, verified: bool) -> None:
    table = render.make_table(("file", "size", "sha256"), ("size",))
    for name, entry in manifest.files.items():
        table.add_row(name, format_bytes(entry.bytes), entry.sha256[:16])
    console.print(render.heading("\nfiles"))
    console.print(table)
    state = "all hashes agree" if verified else "hashes not compared (--verify does)"
    console.print(state)
