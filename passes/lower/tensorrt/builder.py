"""The two lanes of a TensorRT build: parse, check, configure, build, list the layers.

The fast lane replaces attention and cache writes by TensorRT's own operators (see
`use_trt_attention`), the standard lane parses the file as it is. Networks are strongly typed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TextIO

from specc.errors import TensorRTError
from specc.passes.lower.onnx.operators import COLLECTIVE
from specc.passes.lower.tensorrt.check_network import ParsedAttention, check_trt_network
from specc.passes.lower.tensorrt.fast_attention import LENGTHS, OPERATORS, use_trt_attention
from specc.passes.lower.tensorrt.onnx_attention import DecoderForm
from specc.passes.lower.tensorrt.shape_profile import ShapeProfile, profile_shapes
from specc.system.file_cache import default_cache_dir
from specc.system.files import fsync_path
from specc.system.owned_directory import owned_directory
from specc.tensorrt import library as tensorrt
from specc.tensorrt.layers import LayerReport, layers_from_log, read_layers

if TYPE_CHECKING:
    import onnx

LOG_FILE = "builder.log"
STANDARD, FAST = "standard", "fast"

_MAX_ERRORS = 8
# said of every int64 input, and of machines without a GPU: no news
_NOISE = ("Make sure input", "cudaError 35")
_NOT_FUSED = ("is_decomposable", "not supported by a dedicated kernel")


@dataclass(frozen=True)
class BuildOptions:
    """How to build.

    Args:
        compute_capability: GPU to build for, `8.9`; None for all that TensorRT-RTX supports, or for
            the GPU present with full TensorRT.
        decomposable: an attention without a fused kernel may become several; fp32 has to.
        use_fast_lane: try TensorRT's own operators first.
        workspace_bytes: limit of the scratch memory of one layer; None for TensorRT's own.
        timing_cache: file to read and update, for full TensorRT.
        progress: called with (phase, units done, units in all) of every phase of the builder.
        prefix: what the names of the files beside the plan begin with.
    """

    compute_capability: str | None = None
    decomposable: bool = False
    use_fast_lane: bool = True
    workspace_bytes: int | None = None
    timing_cache: Path | None = None
    progress: Callable[[str, int, int], None] | None = None
    prefix: str = ""


@dataclass
class BuildListener:
    """Lines of one build: all go into the log file, some are kept.

    Args:
        errors: what went wrong, in order.
        told: warnings, each once.
        layers: the list of layers at the end of a build.
        sizes: totals in bytes, the largest profile's.
    """

    file: TextIO
    errors: list[str] = dataclasses.field(default_factory=list)
    told: list[str] = dataclasses.field(default_factory=list)
    layers: str = ""
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)

    def __call__(self, severity: str, message: str) -> None:
        print(f"{severity}: {message}", file=self.file)
        if any(noise in message for noise in _NOISE):
            return
        if severity in ("ERROR", "INTERNAL_ERROR"):
            self.errors.append(message)
        elif severity == "WARNING" and message not in self.told:
            self.told.append(message)
        elif message.startswith("Layers:"):
            self.layers = message
        elif message.startswith("Total ") and message.endswith(" bytes"):
            name, _, size = message.removesuffix(" bytes").rpartition(": ")
            self.sizes[name] = max(int(size), self.sizes.get(name, 0))


@dataclass
class Built:
    """What a lane built; `plan` is a buffer, not copied since it holds all weights."""

    lane: str
    plan: Any
    attentions: tuple[ParsedAttention, ...]
    layers: LayerReport
    listener: BuildListener
    timing_cache: str | None

    @property
    def num_apart(self) -> int:
        """Attentions that are several kernels, counted in every profile."""
        return len(self.layers.fell_apart)

    def warnings(self) -> list[str]:
        """What a user should know of this engine."""
        told = list(self.listener.told)
        if not self.layers.layers:
            told.append("the builder listed no layers: whether attention is fused is unknown")
        for apart in self.layers.fell_apart:
            told.append(
                f"{apart.node} fell apart in profile {apart.profile}: {len(apart.others)} layers"
            )
        if self.lane == FAST and self.layers.layers and not self.layers.reads(LENGTHS):
            told.append(f"no kernel reads {LENGTHS}: rows are skipped by the mask alone")
        if scaled := sum(attention.scales_keys for attention in self.attentions):
            told.append(f"the cache of keys is multiplied in {scaled} attentions")
        if decoded := self.layers.decoded:
            told.append(
                f"{len(decoded)} of the quantized weights become floats in every pass, by kernels"
                f" of their own: {', '.join(decoded[:3])}{', …' if len(decoded) > 3 else ''}"
            )
        return told


class Builder:
    """Both lanes of one engine."""

    def __init__(
        self,
        model: Path,
        proto: onnx.ModelProto,
        form: DecoderForm,
        profiles: Sequence[tuple[ShapeProfile, tuple[str, ...]]],
        options: BuildOptions,
        log: TextIO,
    ) -> None:
        self.trt: ModuleType = tensorrt.load()
        self.model, self.proto, self.form = model, proto, form
        self.profiles = [profile for profile, _ in profiles]
        self.options, self.log = options, log

    def any_lane(self) -> tuple[Built, str | None]:
        """The fast lane where it builds and no attention is better off in the standard one."""
        if not self.options.use_fast_lane:
            return self.lane(STANDARD), None
        try:
            fast = self.lane(FAST)
        except TensorRTError as error:
            reason = f"{error.found} (needed: {error.needed})"
        else:
            return self._better(fast)
        # outside of the handler, whose error keeps the failed network alive
        return self.lane(STANDARD), reason

    def _better(self, fast: Built) -> tuple[Built, str | None]:
        if not fast.num_apart:
            return fast, None
        standard = self.lane(STANDARD)
        if standard.num_apart < fast.num_apart:
            return standard, f"{fast.num_apart} attentions fell apart in the fast lane"
        return fast, None

    def lane(self, lane: str) -> Built:
        """Build one lane.

        Raises:
            TensorRTError: it cannot be parsed or built, or the network is not what it has to be.
        """
        print(f"=== {lane} lane ===", file=self.log)
        listener = BuildListener(self.log)
        with tensorrt.listening(listener):
            return self._build(lane, listener)

    def _build(self, lane: str, listener: BuildListener) -> Built:
        trt, logger = self.trt, tensorrt.logger()
        builder = trt.Builder(logger)
        flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
        network = builder.create_network(0 if flag is None else 1 << int(flag))
        parser = trt.OnnxParser(network, logger)
        self._parse(parser, lane)
        has_lengths = lane == FAST
        attentions = check_trt_network(trt, network, self.form, has_lengths)
        config = builder.create_builder_config()
        self._configure(builder, network, config, has_lengths)
        timing_cache = self._read_timing_cache(config)
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise _build_failed(listener.errors, self.form)
        if timing_cache == "used":
            write_timing_cache(config, self.options.timing_cache)
        names = [attention.node for attention in self.form.attentions]
        caches = [cache.output for cache in self.form.caches]
        weights = {weight.node: weight.readers for weight in self.form.weights}
        layers = read_layers(layers_from_log(listener.layers), names, caches, weights)
        return Built(lane, plan, attentions, layers, listener, timing_cache)

    def _parse(self, parser: Any, lane: str) -> None:
        proto = self.proto
        sums = {COLLECTIVE} if self.form.sums else set()
        if lane == FAST:
            tensorrt.require_operators(parser, sums | OPERATORS)
            proto = use_trt_attention(proto, self.form)
        else:
            tensorrt.require_operators(parser, sums | {"Attention", "TensorScatter"})
        if self.options.decomposable:
            proto = _decomposable(proto)
        # the path is where external weights are looked for
        if not parser.parse(proto.SerializeToString(), str(self.model)):
            raise _parse_failed(parser)

    def _configure(self, builder: Any, network: Any, config: Any, has_lengths: bool) -> None:
        trt, options = self.trt, self.options
        # the layers that the builder lists name their ONNX nodes only so
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        # fp32 is fp32
        config.clear_flag(trt.BuilderFlag.TF32)
        if options.workspace_bytes is not None:
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_bytes)
        if options.compute_capability is not None and hasattr(config, "num_compute_capabilities"):
            name = f"SM{options.compute_capability.replace('.', '')}"
            config.num_compute_capabilities = 1
            config.set_compute_capability(getattr(trt.ComputeCapability, name), 0)
        if options.progress is not None:
            # TensorRT keeps a reference without owning it
            self.monitor = make_monitor(trt, options.progress)
            config.progress_monitor = self.monitor
        dims = dict(self.form.dims)
        if has_lengths:
            dims[LENGTHS] = (self.form.dims[self.form.caches[0].input][0],)
        for profile in self.profiles:
            made = builder.create_optimization_profile()
            for name, shapes in profile_shapes(profile, dims).items():
                made.set_shape(name, *shapes)
            if config.add_optimization_profile(made) < 0:
                raise TensorRTError(
                    f"profile {profile.name}, which TensorRT takes for invalid",
                    "shapes that fit the network's inputs",
                    f"see {LOG_FILE}",
                )

    def _read_timing_cache(self, config: Any) -> str | None:
        if self.options.timing_cache is None:
            return None
        facts = tensorrt.facts()
        if not facts.has_timing_cache:
            return f"not used: {facts.title} measures nothing while it builds"
        read_timing_cache(config, self.options.timing_cache)
        return "used"


def timing_cache_file() -> Path:
    """Where the user's builds keep what they measured on a GPU."""
    return default_cache_dir() / "tensorrt.timing"


def read_timing_cache(config: Any, path: Path) -> None:
    """Start from the measurements of earlier builds, where there are any.

    Raises:
        TensorRTError: the file is not one of this TensorRT.
    """
    cache = config.create_timing_cache(path.read_bytes() if path.is_file() else b"")
    if cache is None or not config.set_timing_cache(cache, False):
        raise TensorRTError(
            f"{path}, which is no timing cache of {tensorrt.facts().title} on this GPU",
            "a file that the same version wrote on the same GPU",
            "remove it, or name another",
        )


def write_timing_cache(config: Any, path: Path | None) -> None:
    """Keep what was measured; a killed write leaves the old file."""
    cache = config.get_timing_cache()
    if path is None or cache is None:
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # another build may be writing it, too
    with owned_directory(path.parent, f".{path.name}.partial-") as directory:
        staged = directory / path.name
        staged.write_bytes(bytes(cache.serialize()))
        fsync_path(staged)
        staged.replace(path)
    fsync_path(path.parent)


def make_monitor(trt: ModuleType, progress: Callable[[str, int, int], None]) -> Any:
    """Progress of the builder's phases as calls of (phase, units done, units in all)."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.totals: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self.totals[phase_name] = num_steps
            progress(phase_name, 0, num_steps)

        def phase_finish(self, phase_name: str) -> None:
            total = self.totals.pop(phase_name, 0)
            progress(phase_name, total, total)

        def step_complete(self, phase_name: str, step: int) -> bool:
            progress(phase_name, step + 1, self.totals.get(phase_name, 0))
            return True

    return Monitor()


def _decomposable(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Allow every attention to become several kernels where none is fused."""
    import onnx

    result = onnx.ModelProto()
    result.CopyFrom(proto)
    for node in result.graph.node:
        if node.op_type in ("Attention", "TRT_Attention"):
            node.attribute.append(onnx.helper.make_attribute("TRT_decomposable", 1))
    return result


def _parse_failed(parser: Any) -> TensorRTError:
    errors = [parser.get_error(i) for i in range(parser.num_errors)]
    told = []
    for error in errors:
        lines = [line for line in error.desc().splitlines() if "cudaError 35" not in line]
        where = " ".join(x for x in (error.node_operator(), error.node_name()) if x)
        line = f"{where}: {' '.join(lines)}" if where else " ".join(lines)
        if line not in told:
            told.append(line)
    more = f" and {len(told) - _MAX_ERRORS} more" if len(told) > _MAX_ERRORS else ""
    return TensorRTError(
        f"{tensorrt.facts().title} cannot parse the program: {'; '.join(told[:_MAX_ERRORS])}{more}",
        "operators and forms that TensorRT has",
        "compile for another backend (--backend onnx runs this file), and report the model",
    )


def _build_failed(errors: list[str], form: DecoderForm) -> TensorRTError:
    if any(sign in error for error in errors for sign in _NOT_FUSED):
        sizes = sorted({cache.shape[2] for cache in form.caches})
        heads = " and ".join(str(size) for size in sizes)
        return no_kernel(f"{form.dtype} attention with heads of {heads}, for which none is fused")
    said = "; ".join(error.splitlines()[0] for error in errors[:_MAX_ERRORS]) or "no reason given"
    if any("workspace limit" in error for error in errors):
        return TensorRTError(
            f"a limit of scratch memory too low for some layer: {said}",
            "room for at least one kernel of each layer",
            "raise the limit, or set none",
        )
    return TensorRTError(
        f"{tensorrt.facts().title} cannot build the engine: {said}",
        "a network that it builds",
        f"see {LOG_FILE} beside the plan",
    )


def no_kernel(found: str) -> TensorRTError:
    """The error of an attention that is no single kernel."""
    return TensorRTError(
        found,
        "float16 or bfloat16, and a head size from 16 to 256 that is a multiple of 8",
        "compile with --dtype float16 or bfloat16, or allow attention in several kernels"
        " (--decomposable-attention), which is slower",
    )
