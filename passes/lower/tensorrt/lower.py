"""Build a TensorRT engine from a decoder's ONNX file, and say what came out.

Dtypes are the file's. Two lanes, see `builder`: where the fast one fails, the standard one is
built, and the report says why. With TensorRT-RTX none of this needs a GPU.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specc.errors import WeightError
from specc.passes.lower.tensorrt.builder import FAST, LOG_FILE, Builder, BuildOptions, no_kernel
from specc.passes.lower.tensorrt.check_network import ParsedAttention
from specc.passes.lower.tensorrt.fast_attention import LENGTHS
from specc.passes.lower.tensorrt.onnx_attention import read_form
from specc.passes.lower.tensorrt.shape_profile import ShapeProfile, loosen_batch, merge_profiles
from specc.tensorrt import library as tensorrt
from specc.tensorrt.layers import LAYERS_FILE, LayerReport

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True)
class BuildReport:
    """What was built; `to_json` is what an engine keeps.

    Args:
        tensorrt: title and version.
        lane: `fast` or `standard`.
        fallback: why not the fast lane, else None.
        compute_capability: as asked, or None.
        profiles: ranges of batch, nodes and rows, with the names of those that were equal.
        caches: (input, output) pairs to be bound to one address.
        inputs: names that the engine reads, caches included.
        layers: of every profile; empty where the builder told none.
        reads_lengths: a kernel reads `kv_lengths`; None in the standard lane.
        weights_bytes, activation_bytes: device memory as the builder states it, the largest
            profile's; None where it does not.
        seconds: building, both lanes where both were built.
        timing_cache: what became of it, in words; None where none was asked for.
        num_sums: over ranks, of the network as parsed.
    """

    tensorrt: str
    lane: str
    fallback: str | None
    compute_capability: str | None
    dtype: str
    profiles: tuple[dict[str, Any], ...]
    attentions: tuple[ParsedAttention, ...]
    caches: tuple[tuple[str, str], ...]
    inputs: tuple[str, ...]
    layers: LayerReport
    reads_lengths: bool | None
    num_bytes: int
    weights_bytes: int | None
    activation_bytes: int | None
    seconds: float
    timing_cache: str | None
    warnings: tuple[str, ...]
    num_sums: int = 0

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def build_engine(
    model: Path,
    plan: Path,
    profiles: Sequence[ShapeProfile],
    options: BuildOptions | None = None,
) -> BuildReport:
    """Build `plan`, and write `builder.log` and `layers.json` beside it.

    Args:
        model: ONNX file; its external weights beside it.
        profiles: shapes that the engine has to run with, one optimization profile each; equal ones
            are merged. Their order is the order of the engine's profiles.
        options: by default the fast lane first, for every GPU that the builder has.
    Raises:
        TensorRTError: no TensorRT, a form or dtype that it cannot run as one kernel, a GPU that it
            does not build for, shapes that do not fit the caches, or a failure of the builder.
        WeightError: external weights are not there.
    """
    import onnx

    options = options or BuildOptions()
    facts = tensorrt.facts()
    if options.compute_capability is not None:
        capability = tensorrt.parse_compute_capability(options.compute_capability)
        options = dataclasses.replace(options, compute_capability=capability)
    proto = onnx.load(str(model), load_external_data=False)
    check_external_weights(proto, model.parent)
    form = read_form(proto)
    if any(weight.is_fp8 for weight in form.weights):
        tensorrt.require_fp8(options.compute_capability)
    if form.dtype not in ("float16", "bfloat16") and not options.decomposable:
        raise no_kernel(f"{form.dtype} attention, for which TensorRT has no fused kernel")
    is_rtx = facts.name == "tensorrt_rtx"
    wanted = [loosen_batch(x) for x in profiles] if is_rtx else list(profiles)
    loosened = [
        f"profile {new.name} is built for up to {new.batch[2]} sequences: TensorRT-RTX fails on a"
        " fixed batch"
        for old, new in zip(profiles, wanted, strict=True)
        if old != new
    ]
    merged = merge_profiles(wanted, form.rows)
    begin = time.perf_counter()
    with open(plan.with_name(options.prefix + LOG_FILE), "w", encoding="utf-8") as log:
        build = Builder(model, proto, form, merged, options, log)
        built, fallback = build.any_lane()
    seconds = time.perf_counter() - begin
    plan.write_bytes(memoryview(built.plan))
    layers_file = plan.with_name(options.prefix + LAYERS_FILE)
    layers_file.write_text(json.dumps(built.layers.to_json(), indent=1), encoding="utf-8")
    return BuildReport(
        tensorrt=facts.title,
        lane=built.lane,
        fallback=fallback,
        compute_capability=options.compute_capability,
        dtype=form.dtype,
        profiles=tuple(
            {"names": names, **dataclasses.asdict(profile)} for profile, names in merged
        ),
        attentions=built.attentions,
        caches=tuple((cache.input, cache.output) for cache in form.caches),
        inputs=tuple(form.dims) + ((LENGTHS,) if built.lane == FAST else ()),
        layers=built.layers,
        reads_lengths=built.layers.reads(LENGTHS) if built.lane == FAST else None,
        num_bytes=built.plan.nbytes,
        weights_bytes=built.listener.sizes.get("Total Weights Memory"),
        activation_bytes=built.listener.sizes.get("Total Activation Memory"),
        seconds=seconds,
        timing_cache=built.timing_cache,
        warnings=(*loosened, *built.warnings()),
        num_sums=len(form.sums),
    )


def check_external_weights(model: onnx.ModelProto, directory: Path) -> None:
    """Refuse a file whose weights cannot be read; TensorRT would name one of them, and no reason.

    Args:
        model: without its external weights.
    Raises:
        WeightError: a file is absent, too short, or outside of the directory.
    """
    ends: dict[str, int] = {}
    for tensor in model.graph.initializer:
        place = {entry.key: entry.value for entry in tensor.external_data}
        if location := place.get("location"):
            end = int(place.get("offset", 0)) + int(place.get("length", 0))
            ends[location] = max(end, ends.get(location, 0))
    for location, end in ends.items():
        path = directory / location
        if not path.resolve().is_relative_to(directory.resolve()):
            raise WeightError(
                f"weights in {location}", f"a file in {directory}", "compile the model again"
            )
        size = path.stat().st_size if path.is_file() else None
        if size is None or size < end:
            raise WeightError(
                f"no file {path}" if size is None else f"{path} of {size} bytes",
                f"the weights of the ONNX file beside it, {end} bytes at least",
                "compile the model again, or copy the whole directory",
            )
