"""`specc inspect --sharding`: what each rank of an engine holds, and where the ranks meet."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.table import Table

from specc.artifact.directory import read_manifest
from specc.cli.render import heading, make_console, make_table
from specc.cli.show_stages import stages_table, stages_to_json
from specc.errors import ConfigError, EngineError
from specc.sharding.shard_plan import ShardPlan, WeightCut
from specc.sharding.words import NUMBER, short_name, words_of
from specc.system.files import format_bytes
from specc.system.json_file import read_json

_AGAIN = "compile or copy the engine again"


@dataclass
class _Row:
    """Weights of all layers that are cut alike."""

    name: str
    weight: WeightCut
    count: int = 0


def show_sharding(engine: Path, as_json: bool, svg: Path | None = None) -> None:
    """Print or draw how the models of an engine are cut.

    Args:
        engine: the directory.
        as_json: print the plans as JSON instead of tables.
        svg: file that gets a picture of the target instead.
    Raises:
        EngineError: it is no engine, or a plan is malformed.
        ConfigError: its models are whole.
    """
    manifest = read_manifest(engine)
    cut = [model for model in manifest.models if manifest.is_cut(model)]
    if not cut:
        raise ConfigError(
            f"{engine}, an engine of one rank",
            "an engine whose target is cut for several",
            "compile it with --tensor-parallel-size or --pipeline-parallel-size",
        )
    is_cut = manifest.tensor_parallel_size > 1
    plans = {m.name: ShardPlan.read(engine / m.shard_file) for m in cut if is_cut}
    if as_json:
        data = {name: plan.to_json() for name, plan in plans.items()}
        if manifest.stages:
            data.setdefault(cut[0].name, {})["stages"] = stages_to_json(manifest)
        typer.echo(json.dumps(data, indent=1))
        return
    console = make_console()
    if svg is not None and not is_cut:
        raise ConfigError(
            f"--svg, and {engine}, whose stages have one rank each",
            "an engine whose weights are cut for several ranks",
            "leave out --svg, or compile it with --tensor-parallel-size",
        )
    if svg is not None:
        from specc.draw.sharding import sharding_svg
        from specc.draw.sharding_items import sections

        (model,) = cut
        program = read_json(engine / model.program_file, EngineError, "a program", _AGAIN)
        plan = plans[model.name]
        title = f"{model.architecture} on {plan.num_ranks} ranks"
        heads = [(layer.num_heads, layer.num_kv_heads) for layer in model.layers]
        sharding_svg(plan, sections(program, plan, heads), title, svg)
        console.print(f"{svg}: {model.name}, {plan.num_ranks} ranks", soft_wrap=True)
        return
    if manifest.stages:
        console.print(heading(f"{cut[0].name}: {len(manifest.stages)} stages"))
        console.print(stages_table(manifest))
        console.print()
    for name, plan in plans.items():
        console.print(heading(f"{name}: {plan.num_ranks} ranks"))
        console.print(_weights_table(plan))
        console.print()
        console.print(_sums_table(plan))
        console.print()
        for line in _totals(plan):
            console.print(line)


def _weights_table(plan: ShardPlan) -> Table:
    table = make_table(
        ("weights", "number", "shape", "on each rank", "bytes a rank"), ("number", "bytes a rank")
    )
    for row in _rows(plan.weights):
        table.add_row(
            row.name,
            str(row.count),
            " × ".join(map(str, row.weight.shape)),
            words_of(row.weight),
            format_bytes(row.count * row.weight.local_bytes),
        )
    return table


def _rows(weights: Iterable[WeightCut]) -> list[_Row]:
    rows: dict[object, _Row] = {}
    for weight in weights:
        name = short_name(NUMBER.sub("*", weight.key))
        key = (name, weight.shape, weight.cuts, weight.is_first_only)
        rows.setdefault(key, _Row(name, weight)).count += 1
    return list(rows.values())


def _sums_table(plan: ShardPlan) -> Table:
    table = make_table(("sum over ranks", "number", "bytes a token"), ("number", "bytes a token"))
    kinds: dict[tuple[str, int], int] = {}
    for item in plan.collectives:
        where = "after the embedding" if item.layer == 0 else "in a layer"
        key = (where, item.bytes_per_token)
        kinds[key] = kinds.get(key, 0) + 1
    for (where, size), count in kinds.items():
        table.add_row(f"{where}: {plan.collectives[0].kind}", str(count), str(size * count))
    return table


def _totals(plan: ShardPlan) -> list[str]:
    share = plan.local_bytes * plan.num_ranks / plan.whole_bytes
    lines = [
        f"a rank holds {format_bytes(plan.local_bytes)} of {format_bytes(plan.whole_bytes)}:"
        f" {share:.3f} of its share",
        f"a pass sums {plan.bytes_per_token} bytes a token in {len(plan.collectives)} collectives",
    ]
    if plan.cuts_vocabulary:
        lines.append(
            f"logits: {plan.local_vocab_size} of {plan.vocab_size} columns a rank; of a row,"
            " a score and a token cross, or all columns to rank 0"
        )
    return lines
