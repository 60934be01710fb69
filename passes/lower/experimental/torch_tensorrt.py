"""Build a TensorRT engine from a padded program by torch-tensorrt, without ONNX.

Experimental: no GPU has shown it. torch-tensorrt converts the operators of aten, `converters`
those of specc: caches are updated in place, and attention keeps the tree's mask. The engine has
the inputs and outputs of the one that is built from ONNX, so that the same runtime binds it.

It has one optimization profile, since torch-tensorrt makes one: it spans all passes and is tuned
for the first that a step makes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from specc.artifact.cache_rows import cache_output
from specc.errors import TensorRTError
from specc.kernels import ops
from specc.passes.lower.experimental.converters import register_converters
from specc.passes.lower.experimental.export_with_weights import export_with_weights, input_sizes
from specc.passes.lower.tensorrt.builder import no_kernel
from specc.passes.lower.tensorrt.check_network import ParsedAttention
from specc.passes.lower.tensorrt.lower import BuildReport
from specc.passes.lower.tensorrt.shape_profile import ShapeProfile, merge_profiles, profile_shapes
from specc.passes.program import Program, bind_args, upstream
from specc.tensorrt import library as tensorrt
from specc.tensorrt.layers import LAYERS_FILE, layers_from_inspector, read_layers

# set to the name of a backend, it lets the compiler do what no GPU has shown
EXPERIMENTAL = "SPECC_EXPERIMENTAL"
BACKEND = "torch-tensorrt"
# torch-tensorrt → the torch and the TensorRT that it goes with, as its packages require
VERSIONS = {"2.11": ("2.11", "10.15"), "2.13": ("2.13", "11.0")}


def check_machine() -> None:
    """Whether engines can be built here this way.

    Raises:
        TensorRTError: nobody asked for what is experimental, no GPU, no torch-tensorrt, or
            versions that do not go with each other.
    """
    if BACKEND not in os.environ.get(EXPERIMENTAL, "").split(","):
        raise TensorRTError(
            f"backend {BACKEND}, which no GPU has shown yet",
            f"{EXPERIMENTAL}={BACKEND} in the environment, to try it all the same",
            "set it, or compile with --backend tensorrt, which goes by ONNX",
        )
    if not torch.cuda.is_available():
        raise TensorRTError(
            f"backend {BACKEND} and no GPU that torch can use",
            "the GPU that will run the engine: torch-tensorrt cannot even be imported without one",
            "compile on a machine that has one, or with --backend tensorrt and TensorRT-RTX, which"
            " needs none",
        )
    try:
        found = importlib.metadata.version("torch-tensorrt")
    except importlib.metadata.PackageNotFoundError:
        found = None
    if found is None or importlib.util.find_spec("torch_tensorrt") is None:
        raise TensorRTError(
            f"backend {BACKEND} and no package torch_tensorrt",
            "torch-tensorrt, of the version that goes with the installed torch",
            f"pip install torch-tensorrt=={_release(torch.__version__)}.*",
        )
    _check_versions(found)


def _check_versions(found: str) -> None:
    release = _release(found)
    if release not in VERSIONS:
        raise TensorRTError(
            f"torch-tensorrt {found}",
            f"one that specc was written for: {', '.join(VERSIONS)}",
            "install one of those, with the torch that it goes with",
        )
    needs_torch, needs_trt = VERSIONS[release]
    if _release(torch.__version__) != needs_torch:
        raise TensorRTError(
            f"torch-tensorrt {found} and torch {torch.__version__}",
            f"torch {needs_torch}, which it goes with",
            f"pip install torch-tensorrt=={_release(torch.__version__)}.*, or torch {needs_torch}",
        )
    facts = tensorrt.facts()
    if facts.name != "tensorrt" or _release(facts.version) != needs_trt:
        raise TensorRTError(
            f"torch-tensorrt {found} and {facts.title}",
            f"TensorRT {needs_trt}, which it goes with",
            f"install it with its libraries, and set {tensorrt.ENV}=tensorrt",
        )


def widest_profile(profiles: Sequence[ShapeProfile], cache_rows: int) -> ShapeProfile:
    """One profile for all: the smallest and largest sizes, tuned for the first pass of a step.

    Args:
        profiles: of one model, that of prompts first.
        cache_rows: rows of a cache.
    Raises:
        TensorRTError: one of them has sizes that no pass can have.
    """
    merged = [profile for profile, _ in merge_profiles(profiles, cache_rows)]
    tuned = merged[1] if len(merged) > 1 else merged[0]

    def span(name: str) -> tuple[int, int, int]:
        ranges = [getattr(profile, name) for profile in merged]
        middle = getattr(tuned, name)[1]
        return min(low for low, _, _ in ranges), middle, max(high for _, _, high in ranges)

    return ShapeProfile("all passes", span("batch"), span("nodes"), span("rows"))


def build_engine(
    program: Program,
    weights: Mapping[str, Tensor],
    plan: Path,
    profiles: Sequence[ShapeProfile],
    *,
    decomposable: bool = False,
    timing_cache: Path | None = None,
) -> BuildReport:
    """Build `plan`, and write `layers.json` beside it.

    Args:
        program: padded, after its last phase; not changed.
        weights: key of each weight → tensor.
        plan: file to write.
        profiles: shapes that the engine has to run with, that of prompts first.
        decomposable: an attention without a fused kernel may become several.
        timing_cache: file that keeps what was measured.
    Raises:
        TensorRTError: see `check_machine`; an operator that is not converted, a dtype without a
            fused kernel, a failure of the builder, or an engine with other inputs and outputs.
        UnsupportedGraphError, WeightError: see `export_with_weights`.
    """
    check_machine()
    dtype = _cache_dtype(program)
    if dtype not in ("float16", "bfloat16") and not decomposable:
        raise no_kernel(f"{dtype} attention, for which TensorRT has no fused kernel")
    rows = min(program.placeholder(name).meta["val"].shape[2] for name in program.caches)
    profile = widest_profile(profiles, int(rows))
    begin = time.perf_counter()
    data = convert(program, weights, profile, decomposable=decomposable, timing_cache=timing_cache)
    seconds = time.perf_counter() - begin
    engine = _checked_engine(program, data)
    plan.write_bytes(data)
    listed = _layers(engine)
    attentions = program.calls(ops.masked_attention)
    caches = [cache_output(name) for name in program.caches]
    layers = read_layers(listed, [node.name for node in attentions], caches)
    layers_file = plan.with_name(LAYERS_FILE)
    layers_file.write_text(json.dumps(layers.to_json(), indent=1), encoding="utf-8")
    told = [] if listed else ["torch-tensorrt keeps no list of layers: fusion is unknown"]
    told += [f"{apart.node} fell apart: {len(apart.others)} layers" for apart in layers.fell_apart]
    return BuildReport(
        tensorrt=f"{tensorrt.facts().title} by torch-tensorrt"
        f" {importlib.metadata.version('torch-tensorrt')}",
        lane=BACKEND,
        fallback=None,
        compute_capability="{}.{}".format(*torch.cuda.get_device_capability()),
        dtype=dtype,
        profiles=({"names": tuple(item.name for item in profiles), **dataclasses.asdict(profile)},),
        attentions=tuple(
            ParsedAttention(node.name, _mask_input(program, node), False, False)
            for node in attentions
        ),
        caches=tuple(zip(program.caches, caches, strict=True)),
        inputs=tuple(input_sizes(program)),
        layers=layers,
        reads_lengths=None,
        num_bytes=len(data),
        weights_bytes=None,
        activation_bytes=int(engine.device_memory_size_v2),
        seconds=seconds,
        timing_cache=None if timing_cache is None else "used",
        warnings=tuple(told),
    )


def convert(
    program: Program,
    weights: Mapping[str, Tensor],
    profile: ShapeProfile,
    *,
    decomposable: bool = False,
    timing_cache: Path | None = None,
) -> bytes:
    """The engine as torch-tensorrt serializes it; see `build_engine`.

    Raises:
        TensorRTError: torch-tensorrt fails.
    """
    import torch_tensorrt

    exported = export_with_weights(program, weights)
    outputs = ("logits", *map(cache_output, program.caches))
    inputs = [
        torch_tensorrt.Input(
            min_shape=low, opt_shape=tuned, max_shape=high, dtype=_dtype(program, name), name=name
        )
        for name, (low, tuned, high) in profile_shapes(profile, input_sizes(program)).items()
    ]
    call = torch_tensorrt.dynamo.convert_exported_program_to_serialized_trt_engine
    options: dict[str, Any] = {
        # fp32 is fp32
        "disable_tf32": True,
        "require_full_compilation": True,
        "min_block_size": 1,
        "immutable_weights": True,
    }
    if timing_cache is not None:
        timing_cache.parent.mkdir(parents=True, exist_ok=True)
        options["timing_cache_path"] = str(timing_cache)
    register_converters(decomposable)
    with _errors() as told, _named_outputs(outputs, call):
        try:
            return bytes(call(exported, arg_inputs=inputs, **options))
        except TensorRTError:
            raise
        except Exception as error:
            # 2.11 logs why, and then fails over a variable that it did not set
            reason = told[0] if told else f"{type(error).__name__}: {error}"
            raise TensorRTError(
                f"torch-tensorrt cannot build {program.name}: {_first_lines(reason)}",
                "a program that it converts and TensorRT builds",
                "compile with --backend tensorrt, which goes by ONNX, and report the model",
            ) from error


@contextlib.contextmanager
def _named_outputs(names: Sequence[str], call: Any) -> Iterator[None]:
    """Give outputs the names that the runtime binds.

    torch-tensorrt up to 2.13 calls them output0, output1, …, and has no option for it.
    """
    from torch_tensorrt.dynamo.conversion import _conversion

    own = _conversion.TRTInterpreter

    class Named(own):  # type: ignore[misc, valid-type]
        def output(self, target: str, args: Any, kwargs: Any) -> list[Any]:
            made = super().output(target, args, kwargs)
            for tensor, name in zip(made, names, strict=True):
                tensor.name = name
            self._output_names[:] = names
            return made

    _conversion.TRTInterpreter = Named
    try:
        yield
    finally:
        _conversion.TRTInterpreter = own


class _Errors(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        cause = record.exc_info[1] if record.exc_info else None
        self.told.append(str(cause) if cause else record.getMessage())


@contextlib.contextmanager
def _errors() -> Iterator[list[str]]:
    """What torch-tensorrt logs as errors meanwhile."""
    handler, log = _Errors(), logging.getLogger("torch_tensorrt")
    log.addHandler(handler)
    try:
        yield handler.told
    finally:
        log.removeHandler(handler)


def _checked_engine(program: Program, data: bytes) -> Any:
    """Load the engine and compare it with what the runtime binds.

    Raises:
        TensorRTError: other inputs and outputs, or a cache that is copied.
    """
    trt = tensorrt.load()
    engine = trt.Runtime(tensorrt.logger()).deserialize_cuda_engine(data)
    if engine is None:
        raise _wrong(program, "an engine that does not load", "one that loads where it was built")
    found = {engine.get_tensor_name(i) for i in range(engine.num_io_tensors)}
    outputs = {cache_output(name) for name in program.caches}
    wanted = {*input_sizes(program), "logits", *outputs}
    if found != wanted:
        odd = ", ".join(sorted(found ^ wanted)[:4])
        raise _wrong(program, f"inputs and outputs {odd} too many or too few", "those of the model")
    for name in program.caches:
        alias = engine.get_aliased_input_tensor(cache_output(name))
        if alias != name:
            raise _wrong(
                program,
                f"{cache_output(name)} in the memory of {alias or 'no input'}",
                f"in that of {name}, so that the cache is updated in place",
            )
    return engine


def _layers(engine: Any) -> Sequence[Any]:
    trt = tensorrt.load()
    inspector = engine.create_engine_inspector()
    return layers_from_inspector(inspector.get_engine_information(trt.LayerInformationFormat.JSON))


def _mask_input(program: Program, attention: fx.Node) -> str:
    """The input that an attention masks with; it may be repeated for a group of heads."""
    names = {node.target for node in upstream(bind_args(attention)["mask"])}
    (name,) = names.intersection(program.runtime_inputs)
    return str(name)


def _cache_dtype(program: Program) -> str:
    (dtype,) = {program.placeholder(name).meta["val"].dtype for name in program.caches}
    return str(dtype).removeprefix("torch.")


def _dtype(program: Program, name: str) -> torch.dtype:
    return program.placeholder(name).meta["val"].dtype


def _release(version: str) -> str:
    """`2.13` of `2.13.0+cu130`."""
    return ".".join(version.split("+")[0].split(".")[:2])


def _first_lines(text: str) -> str:
    return " ".join(line.strip() for line in text.strip().splitlines()[:3]) or "no reason given"


def _wrong(program: Program, found: str, needed: str) -> TensorRTError:
    return TensorRTError(
        f"torch-tensorrt made of {program.name}: {found}",
        needed,
        "compile with --backend tensorrt, which goes by ONNX, and report both versions",
    )
