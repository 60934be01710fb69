"""`specc inspect --sharding`: what each rank of an engine holds, and where the ranks meet."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from rich.table import Table

from specc.artifact.directory import read_manifest
from specc.artifact.manifest import Manifest
from specc.artifact.manifest_entries import StageEntry
from specc.cli.render import heading, make_console, make_table
from specc.errors import ConfigError
from specc.sharding.shard_plan import ShardPlan, WeightCut
from specc.sharding.words import NUMBER, short_name, words_of
from specc.system.files import format_bytes
from specc.system.json_file import read_engine_json

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
            data.setdefault(cut[0].name, {})["stages"] = _stages_to_json(manifest)
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
        program = read_engine_json(engine / model.program_file, "a program", _AGAIN)
        plan = plans[model.name]
        title = f"{model.architecture} on {plan.num_ranks} ranks"
        heads = [(layer.num_heads, layer.num_kv_heads) for layer in model.layers]
        sharding_svg(plan, sections(program, plan, heads), title, svg)
        console.print(f"{svg}: {model.name}, {plan.num_ranks} ranks", soft_wrap=True)
        return
    if manifest.stages:
        console.print(heading(f"{cut[0].name}: {len(manifest.stages)} stages"))
        console.print(_stages_table(manifest))
        console.print()
    for name, plan in plans.items():
        console.print(heading(f"{name}: {plan.num_ranks} ranks"))
        console.print(_weights_table(plan))
        console.print()
        console.print(_sums_table(plan))
        console.print()
        for line in _totals(plan):
            console.print(line)


def _stages_to_json(manifest: Manifest) -> list[dict[str, Any]]:
    """Stages of an engine; bytes of weights and caches are those of each of their ranks."""
    return [
        {
            "ranks": list(_ranks(manifest, number)),
            "layers": list(stage.layers),
            **({"state_layers": list(stage.state_layers)} if stage.state_layers else {}),
            "weights": stage.memory.weights,
            "cache": stage.memory.cache,
            "bytes_per_token": None if number == last else _bytes_per_token(stage),
        }
        for last in [len(manifest.stages) - 1]
        for number, stage in enumerate(manifest.stages)
    ]


def _stages_table(manifest: Manifest) -> Table:
    """A line for each stage: layers, bytes, and what goes from one to the next."""
    sizes = ("weights a rank", "caches a rank", "hands on a token")
    kept = ("keep states",) if any(stage.state_layers for stage in manifest.stages) else ()
    table = make_table(("stage", "ranks", "layers", *kept, *sizes), sizes)
    last = len(manifest.stages) - 1
    for number, stage in enumerate(manifest.stages):
        ranks = _ranks(manifest, number)
        table.add_row(
            str(number),
            _span(ranks[0], ranks[-1]),
            _numbers(stage.layers),
            *(_numbers(stage.state_layers) for _ in kept),
            format_bytes(stage.memory.weights),
            format_bytes(stage.memory.cache),
            "logits or tokens" if number == last else f"{_bytes_per_token(stage)} bytes",
        )
    return table


def _bytes_per_token(stage: StageEntry) -> int:
    """Of the value that a rank of a stage gives to one of the next."""
    sizes = [size for size in stage.shape if size is not None]
    return math.prod(sizes) * getattr(torch, stage.dtype).itemsize


def _ranks(manifest: Manifest, number: int) -> range:
    assert manifest.parallel is not None
    size = manifest.parallel.tensor_parallel_size
    return range(number * size, (number + 1) * size)


def _numbers(layers: Sequence[int]) -> str:
    return _span(layers[0], layers[-1]) if layers else "none"


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} … {last}"


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
