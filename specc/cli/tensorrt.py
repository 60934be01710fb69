"""What `specc inspect` says of an engine's ONNX files and TensorRT engines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specc.cli import render
from specc.system.files import format_bytes
from specc.system.json_file import read_engine_json
from specc.tensorrt.layers import LAYERS_FILE, LayerReport

if TYPE_CHECKING:
    from rich.console import Console

    from specc.artifact.manifest import Manifest

_AGAIN = "compile or copy the engine again"


def read_builds(engine: Path, manifest: Manifest) -> dict[str, dict[str, Any]]:
    """Model, and rank of one that is cut → what the TensorRT builder said, with its layers.

    It is empty for other backends.

    Raises:
        EngineError: a report that is no JSON, or lacks what it should say.
    """
    if manifest.tensorrt is None:
        return {}
    builds = {}
    for model, rank in [(m, rank) for m in manifest.models for rank in manifest.ranks_of(m)]:
        build = _read(engine / model.part_of(model.build_file, rank))
        layers = _read(engine / model.part_of(f"{model.dir}/{LAYERS_FILE}", rank))
        if build and layers:
            name = model.name if rank is None else f"{model.name}, rank {rank}"
            builds[name] = build | {"layers": layers}
    return builds


def print_builds(
    console: Console, manifest: Manifest, builds: dict[str, dict[str, Any]], with_layers: bool
) -> None:
    """Rows of the caches; of TensorRT engines profiles, attention, memory and warnings.

    Args:
        builds: of `read_builds`.
        with_layers: every layer by name, too.
    """
    if manifest.rectangle is None:
        return
    rows = manifest.rectangle
    console.print(render.heading("\nONNX"))
    console.print(
        f"opset {rows.opset}; {rows.rows.total} cache rows a sequence: {rows.front} in front,"
        f" {rows.slots} of tokens, {rows.scratch} of scratch"
    )
    if manifest.tensorrt is not None:
        entry = manifest.tensorrt
        target = entry.compute_capability or "every GPU that it supports"
        console.print(render.heading("\nTensorRT"))
        console.print(f"{entry.name} {entry.version}, for compute capability {target}")
    for name, build in builds.items():
        layers = LayerReport.from_json(build["layers"])
        console.print(render.heading(f"\n{name}: {format_bytes(build['num_bytes'])}"))
        console.print(_summary(build), soft_wrap=True)
        console.print(_profiles(build, layers))
        for line in _warnings(build, layers):
            console.print(f"warning: {line}", style="yellow", soft_wrap=True)
        if with_layers:
            console.print(_layers(layers))


def _summary(build: dict[str, Any]) -> str:
    parts = [f"{build['lane']} lane of attention, {build['dtype']}"]
    if build["weights_bytes"] is not None:
        parts.append(f"weights {format_bytes(build['weights_bytes'])}")
    if build["activation_bytes"] is not None:
        parts.append(f"scratch {format_bytes(build['activation_bytes'])}")
    if build.get("num_sums"):
        parts.append(f"{build['num_sums']} sums over ranks")
    return ", ".join([*parts, f"built in {build['seconds']:.1f} s"])


def _profiles(build: dict[str, Any], layers: LayerReport) -> Any:
    table = render.make_table(
        ("profile", "sequences", "nodes", "rows of logits", "layers", "attention fused"),
        ("layers", "attention fused"),
    )
    for number, profile in enumerate(build["profiles"]):
        mine = [a for a in layers.attentions if a.profile == number]
        table.add_row(
            ", ".join(profile["names"]),
            *(_span(profile[key]) for key in ("batch", "nodes", "rows")),
            str(layers.count(number)),
            f"{sum(a.is_fused for a in mine)} of {len(mine)}",
        )
    return table


def _warnings(build: dict[str, Any], layers: LayerReport) -> list[str]:
    told = [*build["warnings"]]
    if build["fallback"] is not None:
        told.insert(0, f"not the fast lane: {build['fallback']}")
    for attention in layers.fell_apart:
        told.append(
            f"attention {attention.node} fell apart in profile {attention.profile}:"
            f" {len(attention.others)} layers compute it"
        )
    copies = {a.profile for a in layers.attentions if a.cache_reads}
    if copies:
        told.append(
            "keys and values are repeated for every query head, which reads whole caches, in"
            f" profiles {', '.join(map(str, sorted(copies)))}"
        )
    return told


def _layers(layers: LayerReport) -> Any:
    table = render.make_table(("profile", "layer", "type", "attention"), ("profile",))
    for layer in layers.layers:
        kind = "fused" if layer.is_attention else "part" if layer.attention else ""
        table.add_row(str(layer.profile), layer.name, layer.type, kind)
    return table


def _span(sizes: list[int]) -> str:
    low, tuned, high = sizes
    if low == high:
        return str(low)
    return f"{low} … {high}" + (f", tuned for {tuned}" if tuned not in (low, high) else "")


def _read(path: Path) -> dict[str, Any]:
    """Of a missing file, nothing: `specc inspect` names it at the end."""
    if not path.exists():
        return {}
    return read_engine_json(path, "a build report", _AGAIN)
