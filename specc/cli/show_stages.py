"""Stages of a pipeline in words: layers, bytes, and what goes from one to the next."""

from __future__ import annotations

import math
from typing import Any

import torch
from rich.table import Table

from specc.artifact.manifest import Manifest
from specc.artifact.manifest_entries import StageEntry
from specc.cli.render import make_table
from specc.system.files import format_bytes


def stages_to_json(manifest: Manifest) -> list[dict[str, Any]]:
    """Stages of an engine; bytes of weights and caches are those of each of their ranks."""
    return [
        {
            "ranks": list(_ranks(manifest, number)),
            "layers": list(stage.layers),
            "weights": stage.memory.weights,
            "cache": stage.memory.cache,
            "bytes_per_token": None if number == last else bytes_per_token(stage),
        }
        for last in [len(manifest.stages) - 1]
        for number, stage in enumerate(manifest.stages)
    ]


def stages_table(manifest: Manifest) -> Table:
    """A line for each stage."""
    columns = ("stage", "ranks", "layers", "weights a rank", "caches a rank", "hands on a token")
    table = make_table(columns, columns[3:])
    last = len(manifest.stages) - 1
    for number, stage in enumerate(manifest.stages):
        ranks = _ranks(manifest, number)
        table.add_row(
            str(number),
            _span(ranks[0], ranks[-1]),
            _span(stage.layers[0], stage.layers[-1]),
            format_bytes(stage.memory.weights),
            format_bytes(stage.memory.cache),
            "logits or tokens" if number == last else f"{bytes_per_token(stage)} bytes",
        )
    return table


def bytes_per_token(stage: StageEntry) -> int:
    """Of the value that a rank of a stage gives to one of the next."""
    sizes = [size for size in stage.shape if size is not None]
    return math.prod(sizes) * getattr(torch, stage.dtype).itemsize


def _ranks(manifest: Manifest, number: int) -> range:
    assert manifest.parallel is not None
    size = manifest.parallel.tensor_parallel_size
    return range(number * size, (number + 1) * size)


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} … {last}"
