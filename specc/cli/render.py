"""What the commands draw in a terminal: tables, lines about engines, figures of runs."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specc.artifact.kv_rows import AUTO
from specc.drafters.registry import drafter_of
from specc.speculation.metrics import SpecStats
from specc.system.files import format_bytes

if TYPE_CHECKING:
    from specc.artifact.manifest import Manifest
    from specc.artifact.model_entry import LayerEntry, ModelEntry
    from specc.bench.plain_speed import PlainSpeed

_FILE_WIDTH = 100  # columns where the output is no terminal


def make_console(stderr: bool = False) -> Console:
    """A console that never interprets text as markup."""
    stream = sys.stderr if stderr else sys.stdout
    # rich asks the terminal, or the variable
    asks = stream.isatty() or os.environ.get("COLUMNS", "").isdigit()
    width = None if asks else _FILE_WIDTH
    return Console(file=stream, width=width, markup=False, highlight=False, emoji=False)


def heading(text: str) -> Text:
    return Text(text, style="bold")


def make_table(columns: Sequence[str], numeric: Iterable[str] = ()) -> Table:
    """A table without frame; the columns in `numeric` are aligned to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    numbers = set(numeric)
    for column in columns:
        table.add_column(
            column,
            justify="right" if column in numbers else "left",
            no_wrap=column in numbers,
            overflow="fold",
        )
    return table


def format_count(number: int) -> str:
    """Format for people: `7.2 M`, `812`."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**4, "k")):
        if number >= size:
            value = number / (10**3 if unit == "k" else size)
            return f"{value:.1f} {unit}"
    return str(number)


def models_table(manifest: Manifest) -> Table:
    table = make_table(
        ("model", "architecture", "parameters", "dtype", "vocabulary", "positions"),
        ("parameters", "vocabulary", "positions"),
    )
    for model in manifest.models:
        table.add_row(
            model.name,
            model.architecture,
            format_count(model.num_parameters),
            model.dtype,
            str(model.vocab_size),
            str(model.max_position),
        )
    return table


def source_lines(manifest: Manifest) -> list[str]:
    """Where each model came from; paths are too long for a column."""
    return [f"{model.name} from {model.source}" for model in manifest.models]


def self_draft_lines(manifest: Manifest) -> list[str]:
    """Second programs of the target: their layers, and what they have of their own."""
    target, lines = manifest.models[0], []
    of = f"of {len(target.layers)} layers of the target"
    of += " that attend" if target.state_layers else ""
    for entry in manifest.self_drafts:
        layout = drafter_of(entry.name).quantization
        weights = f"copies of its weights in {layout} and its caches" if layout else ""
        lines.append(
            f"{entry.name} runs {len(entry.layers)} {of} ({format_ranges(entry.layers)})"
            f" on {weights or 'its weights and caches'}"
        )
    return lines


def adapter_lines(manifest: Manifest) -> list[str]:
    """Low-rank adapters of the target."""
    return [
        f"adapter {entry.name}: terms of rank {entry.rank} or less beside {entry.num_modules}"
        " projections of the target"
        for entry in manifest.adapters
    ]


def vocabulary_lines(manifest: Manifest) -> list[str]:
    """Drafts whose tokens are other ones than the target's."""
    return [
        f"{model.name} has other tokens than the target: it proposes"
        f" {found.num_proposed} of {found.num_target} target ids, and reads {found.num_unread} as"
        " another token (--prompts says how much of a text these are)"
        for model in manifest.models
        if (found := model.vocabulary) is not None
    ]


def head_lines(manifest: Manifest) -> list[str]:
    """Drafts that read hidden states of the target, or propose more than a level at a time: what
    they are, and what was assumed.
    """
    lines, taps = [], manifest.models[0].taps
    for model in manifest.models:
        drafters = (plan.plan.drafter(model.name) for plan in manifest.plans)
        said = {x.describe() for x in drafters if x is not None} - {""}
        told = sorted(f"{model.name}: {text}" for text in said)
        if (head := model.head) is None or taps is None:
            lines += told
            continue
        places = ", ".join(map(str, taps.boundaries))
        last = ", the last after the final norm" if taps.is_last_normed else ""
        shared = " and ".join(head.shared) or "none"
        trained = f", and was trained for {head.trained_length} positions"
        trained = trained if head.trained_length else ""
        lines.append(
            f"{model.name} is a {head.facts.called} ({head.kind}, files of {head.layout}): it reads"
            f" the target at boundaries {places}{last}{trained}; weights of the target: {shared}"
        )
        lines += told
        lines += [f"{model.name}: {text}" for text in head.assumed]
    return lines


def rotary_lines(manifest: Manifest) -> list[str]:
    """Models whose rotary frequencies are not what transformers has in every pass."""
    return [
        f"{model.name} rotates every position as transformers does in a pass of"
        f" {model.rope_length} tokens (--rope-length)"
        for model in manifest.models
        if model.rope_length
    ]


def weight_lines(manifest: Manifest) -> list[str]:
    """What is unusual about the weights: such that are not finite, and tensors nobody reads."""
    lines = []
    if manifest.batch_invariant:
        lines.append("logits have the same bits with any plan, batch and chunks of prompts")
    if (bits := manifest.activation_bits) is not None:
        lines.append(f"weights in int8 and int4 are multiplied with values of {bits} bits")
    for model in manifest.models:
        if model.quantization:
            size = format_bytes(manifest.memory_plan[model.name].weights)
            table = f", the embedding in {model.embedding}" if model.embedding else ""
            lines.append(
                f"{model.name} has weights of projections in {model.quantization}{table}, the rest"
                f" in {model.dtype}: {size}"
            )
        if model.checkpoint_scheme:
            lines.append(f"{model.name} has a quantized checkpoint: {model.checkpoint_scheme}")
        if model.nonfinite_weights:
            lines.append(
                f"{model.name} holds {model.nonfinite_weights} weights that are not finite"
            )
        if model.unread_tensors:
            names = ", ".join(model.unread_tensors)
            lines.append(f"{model.name} does not read these tensors of its checkpoint: {names}")
    return lines


def layers_table(models: Iterable[ModelEntry]) -> Table:
    """Attention layers; those that are alike share a row, wherever they are in the model."""
    table = make_table(
        ("model", "layers", "heads", "kv heads", "head dim", "attention", "which"),
        ("layers", "heads", "kv heads", "head dim"),
    )
    for model in models:
        groups: dict[tuple[int, int, int, int, int, str], list[int]] = {}
        for number, layer in enumerate(model.layers):
            sees = (layer.window, layer.sink, _chunks_of(layer) + _values_of(layer))
            key = (layer.num_heads, layer.num_kv_heads, layer.head_dim, *sees)
            groups.setdefault(key, []).append(number)
        for (num_heads, num_kv_heads, head_dim, window, sink, values), numbers in groups.items():
            rows = f"causal, window {window}" if window else "causal"
            table.add_row(
                model.name,
                str(len(numbers)),
                str(num_heads),
                str(num_kv_heads),
                str(head_dim),
                (f"{rows}, sink {sink}" if sink else rows) + values,
                format_ranges(numbers),
            )
    return table


def _chunks_of(layer: LayerEntry) -> str:
    return f", in chunks of {layer.chunk}" if layer.chunk else ""


def _values_of(layer: LayerEntry) -> str:
    """What a layer's values are, where they are not as wide as its keys."""
    if layer.values_in_keys:
        return f", a value is the first {layer.value_dim} columns of its key"
    return f", values of {layer.value_dim}" if layer.value_dim else ""


def format_ranges(numbers: Sequence[int]) -> str:
    """Format ascending numbers: `0-4, 6-10, 12`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)


def passes_table(passes: Sequence[dict[str, Any]]) -> Table:
    """One row a pass and program, from report.json."""
    table = make_table(
        ("phase", "pass", "program", "rewrites", "declined", "seconds"),
        ("rewrites", "declined", "seconds"),
    )
    for item in passes:
        table.add_row(
            item["phase"],
            item["pass"],
            item["program"],
            str(item["rewrites"]),
            str(len(item["declined"])) if item["declined"] else "",
            f"{item['seconds']:.2f}",
        )
    return table


def rewrite_lines(passes: Sequence[dict[str, Any]]) -> list[str]:
    """What passes did to each model, in one line, and below it what they declined, with reasons."""
    lines = []
    for program in dict.fromkeys(item["program"] for item in passes):
        own = [item for item in passes if item["program"] == program]
        rewrites = sum(item["rewrites"] for item in own)
        declined = sum(len(item["declined"]) for item in own)
        names = len({item["pass"] for item in own})
        text = f"{program}: {rewrites} rewrites by {names} passes"
        lines.append(f"{text}, {declined} declined" if declined else text)
        lines += [f"  {line}" for line in declined_lines(own, why=False)]
    return lines


def declined_lines(passes: Sequence[dict[str, Any]], why: bool) -> list[str]:
    """Why passes left nodes alone: reasons with counts, or every node."""
    lines = []
    for item in passes:
        name = f"{item['pass']} on {item['program']}"
        if why:
            lines += [f"{name}: {x['node']}: {x['reason']}" for x in item["declined"]]
            continue
        reasons = Counter(x["reason"] for x in item["declined"])
        lines += [f"{name}: {count} × {reason}" for reason, count in reasons.most_common()]
    return lines


def memory_table(manifest: Manifest) -> Table:
    entries = manifest.memory_plan.values()
    keys = ["weights", "cache", "logits", "workspace", "total"]
    # of models whose layers keep states
    keys[2:2] = [key for key in ("states", "checkpoints") if any(getattr(x, key) for x in entries)]
    columns = [{"cache": "caches"}.get(key, key) for key in keys]
    table = make_table(("model", *columns), columns)
    for name, memory in manifest.memory_plan.items():
        table.add_row(name, *(format_bytes(getattr(memory, key)) for key in keys))
    sums = (format_bytes(sum(getattr(x, key) for x in entries)) for key in keys)
    table.add_row("total", *sums, style="bold")
    return table


def cache_room(manifest: Manifest) -> str:
    """What the caches hold, where that is less than the longest sequences can need together, and
    how, where it is not in the type of the model.
    """
    limits = manifest.limits
    rows = "" if manifest.kv_cache_dtype == AUTO else f"; rows of {manifest.kv_cache_dtype}"
    if limits.kv_cache_tokens is None:
        return rows
    return f"{rows}; caches hold {limits.cache_rows()} tokens of all sequences together"


def probe_line(probe: dict[str, Any]) -> str:
    """What the compiler measured on its built-in prompts, in one line."""
    text = f"{probe['num_tokens']} tokens"
    if not probe["num_spec_steps"]:
        return f"{text}, plain decoding"
    depths = " ".join(f"{share:.0%}" for share in probe["accepted_per_depth"])
    return (
        f"{text}, mean acceptance length {probe['mean_acceptance_length']:.2f},"
        f" accepted per depth {depths or 'none'}"
    )


def stats_rows(stats: SpecStats, speed: PlainSpeed | None = None) -> list[tuple[str, str]]:
    """Names and formatted values, in the order in which they are read.

    Args:
        speed: of plain decoding; None is not measured.
    """
    # a request's first token comes from its prompt; plain decoding takes a pass for each other one
    plain = stats.num_output_tokens - stats.num_first_tokens
    saved = plain - stats.num_steps
    share = f" ({saved / plain:.0%})" if plain else ""
    depths = "  ".join(f"{x:.1%}" for x in stats.accepted_per_depth)
    rows = [
        ("output tokens", str(stats.num_output_tokens)),
        ("tokens/s", f"{stats.tokens_per_s:.1f}"),
        *speed_rows(stats, speed),
        ("time to first token", f"{1000 * stats.time_to_first_token:.0f} ms"),
    ]
    if 0 < stats.num_spec_steps < stats.num_steps:
        rows.append(
            ("steps that drafted", f"{stats.num_spec_steps} of {stats.num_steps}, the rest are off")
        )
    if stats.num_spec_steps:
        rows += [
            (
                "mean acceptance length",
                f"{stats.mean_acceptance_length:.2f} (bonus token included)",
            ),
            ("acceptance rate", f"{stats.acceptance_rate:.1%}"),
            ("accepted per depth", depths or "none"),
        ]
    if covered := stats.accepted_prediction_tokens + stats.rejected_prediction_tokens:
        rows.append(
            (
                "of the prediction",
                f"{stats.accepted_prediction_tokens} of {covered} tokens came;"
                f" {stats.num_prediction_accepted_tokens} of {stats.num_prediction_draft_tokens}"
                " that it drafted were accepted",
            )
        )
    rows += [
        ("target passes", f"{stats.num_steps} for {plain} tokens, and prefill"),
        ("target passes saved", f"{saved}{share}"),
        (
            "ms per step",
            f"{stats.ms_per_step:.1f}, one graph"
            if stats.whole_s
            else f"{stats.ms_per_step:.1f} = draft {stats.draft_ms_per_step:.1f}"
            f" + verify {stats.verify_ms_per_step:.1f}"
            f" + accept and commit {stats.commit_ms_per_step:.1f}",
        ),
    ]
    return rows


def speed_rows(stats: SpecStats, plain: PlainSpeed | None) -> list[tuple[str, str]]:
    """What plain decoding does on this machine, and what the plan gains or loses against it."""
    ratio = None if plain is None else plain.ratio(stats)
    if plain is None or ratio is None:
        return []
    batch = "" if plain.batch_size == 1 else f", {plain.batch_size} sequences"
    return [
        (
            "plain decoding",
            f"{plain.tokens_per_s:.1f} tokens/s on this machine, prompts left out"
            f" ({plain.num_steps} steps after the run{batch})",
        ),
        (
            "speed-up",
            f"{ratio:.2f} times plain decoding"
            + (": this is slower, --plan off decodes faster here" if ratio < 0.97 else ""),
        ),
    ]


def print_stats(stats: SpecStats, plain: PlainSpeed | None = None) -> None:
    table = make_table(("", ""))
    table.show_header = False
    for name, value in stats_rows(stats, plain):
        table.add_row(name, value)
    console = make_console(stderr=True)
    console.print()
    console.print(table)
