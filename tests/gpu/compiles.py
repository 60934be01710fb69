"""Which binaries of Triton some work needs, counted without a GPU.

    make gpu-compiles                           # by part of command A
    make gpu-compiles ARGS=--seconds            # and how long that takes here, for sm_90
    make gpu-compiles ARGS="--file test_rows"   # of a file of kernel tests, interpreted

Triton compiles a kernel for each combination of types, constexprs and options, and of what it
takes for granted about other arguments: pointers at multiples of 16 bytes, integers that equal 1
or are multiples of 16. Up to Triton 3.6 it has a C compiler make a launcher, too, for each list of
argument types. Launches are recorded; those of command A are on tensors without data, those that
measure which product is the fastest among them, and steps with each tile that may be found so.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import itertools
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.gpu.pair import ROOT, pair_engine

ALIGNMENT = 16
# of command A: steps and replays of the shapes; replays and output of the demo pair, by its type
PARTS = ("8b-1b", "float32", "bfloat16")


@dataclass(frozen=True)
class Binary:
    """One compilation: a kernel, what is known of each argument, and the options."""

    kernel: str
    arguments: tuple[tuple[str, str], ...]
    options: tuple[tuple[str, Any], ...]


@dataclass
class Launches:
    """What was launched; `binaries` counts the launches of each."""

    binaries: Counter[Binary] = field(default_factory=Counter)
    # of a binary: its kernel, and values of constexprs
    sources: dict[Binary, tuple[Any, dict[str, Any]]] = field(default_factory=dict)

    @property
    def launchers(self) -> set[tuple[str, ...]]:
        """Types of arguments, as a launcher is made for them; nothing for constants."""
        return {
            tuple("" if name in constants else _c_type(known) for name, known in binary.arguments)
            for binary, (_, constants) in self.sources.items()
        }

    @property
    def by_kernel(self) -> dict[str, int]:
        """Binaries of each kernel."""
        return dict(sorted(Counter(binary.kernel for binary in self.binaries).items()))


@contextlib.contextmanager
def recorded(is_run: bool = True) -> Iterator[Launches]:
    """Record the launches of this process.

    Args:
        is_run: run them, too, which takes a GPU or Triton's interpreter; otherwise what they
            would have written stays as it is.
    """
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    kind: Any = InterpretedFunction if is_interpreted else JITFunction
    found, run = Launches(), kind.run

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
        binary, constants = binary_of(kernel, args, options)
        found.binaries[binary] += 1
        found.sources[binary] = kernel, constants
        return run(kernel, *args, grid=grid, warmup=warmup, **options) if is_run else None

    kind.run = record
    try:
        yield found
    finally:
        kind.run = run


def binary_of(
    kernel: Any, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Binary, dict[str, Any]]:
    """What a launch compiles, and the values of its constexprs.

    Args:
        kernel: compiled or interpreted.
        options: arguments by name, and options of the launch.
    """
    parameters = inspect.signature(kernel.fn).parameters
    given = dict(zip(parameters, args, strict=False))
    given |= {name: value for name, value in options.items() if name in parameters}
    decorated = getattr(kernel, "kwargs", None) or vars(kernel)
    fixed = decorated.get("do_not_specialize") or ()
    arguments, constants = [], {}
    for name, value in given.items():
        is_constant = "constexpr" in str(parameters[name].annotation)
        known = repr(value) if is_constant else _known(value, name not in fixed)
        arguments.append((name, known))
        if is_constant or known in ("None", "1"):
            constants[name] = value
    rest = {name: value for name, value in options.items() if name not in parameters}
    binary = Binary(kernel.fn.__name__, tuple(arguments), tuple(sorted(rest.items())))
    return binary, constants


def compile_seconds(binary: Binary, kernel: Any, constants: dict[str, Any]) -> float:
    """Compile for sm_90; needs a process that does not interpret, and a cache of its own."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, attrs = {}, {}
    for place, (name, known) in enumerate(binary.arguments):
        kind, _, rest = known.partition(":")
        if name in constants:
            signature[name] = "constexpr"
            continue
        if kind.startswith("*"):
            kind = "*" + _TYPES[kind[1:]]
        signature[name] = "i1" if kind == "bool" else kind
        if rest:
            attrs[place,] = [["tt.divisibility", ALIGNMENT]]
    names = {"num_warps", "num_stages", "num_ctas", "enable_fp_fusion"}
    options = {name: value for name, value in binary.options if name in names}
    begin = time.perf_counter()
    source = ASTSource(kernel, signature, constants, attrs)
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return time.perf_counter() - begin


_TYPES = {
    "torch.float32": "fp32",
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.int64": "i64",
    "torch.int32": "i32",
    "torch.int16": "i16",
    "torch.int8": "i8",
    "torch.uint8": "u8",
    "torch.bool": "i1",
}


def _c_type(known: str) -> str:
    """Of an argument that is no constant: all pointers are one type."""
    return "*" if known.startswith("*") else known.partition(":")[0]


def _known(value: Any, is_specialized: bool) -> str:
    """What Triton knows of an argument when it compiles."""
    if value is None:
        return "None"
    if isinstance(value, torch.Tensor):
        # on the meta device all tensors begin at 0
        place = value.data_ptr() or value.storage_offset() * value.element_size()
        return f"*{value.dtype}" + (":16" if is_specialized and place % ALIGNMENT == 0 else "")
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, float):
        return "fp32"
    kind = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
    if is_specialized and value == 1:
        return "1"
    return kind + (":16" if is_specialized and value % ALIGNMENT == 0 else "")


class MetaGraphs:
    """A `GraphDevice` of tensors without data: work is done once, and nothing is computed."""

    def __init__(self) -> None:
        self.device = torch.device("meta")

    def active(self) -> contextlib.AbstractContextManager[object]:
        return _Launching()

    def capture(self, run: Any) -> Any:
        run()
        return self

    def replay(self) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self) -> Any:
        return self

    def replayed_event(self) -> Any:
        return self

    def stream_handle(self) -> int:
        return 0

    def copy_stream(self) -> Any:
        return None

    def side_stream(self) -> Any:
        return None

    def host_buffer(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype)

    def free_bytes(self) -> int:
        return 1 << 40


class _Launching(TorchDispatchMode):
    """Operators of `specc::` launch, as they do on a GPU; the others know shapes of results."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        from specc.kernels.cuda.register import kernels

        kernel = kernels().get(func.overloadpacket.__name__) if func.namespace == "specc" else None
        return (kernel or func)(*args, **(kwargs or {}))


def of_command_a(parts: Sequence[str] = PARTS) -> dict[str, Launches]:
    """What these parts of command A compile on an H200 that has compiled nothing."""
    from specc.bench.synthetic import engine as bench_shapes_engine
    from specc.kernels.cuda import attend, attend_config, few_rows
    from specc.runtime.backends.capture_limits import CaptureLimits
    from specc.runtime.backends.captured import backend as captured_backend
    from specc.runtime.backends.cuda import backend as cuda_backend
    from tests.gpu import replay

    for module in (attend, attend_config, few_rows):
        vars(module)["machine"] = lambda device: (90, 132)
    graphs = MetaGraphs()
    captured_backend.cuda_device = lambda: graphs  # type: ignore[assignment,return-value]
    # engines for CUDA are not loaded where there is none
    torch.cuda.is_available = lambda: True
    # as on a GPU, where it is measured
    cuda_backend.choose_on_gpu = _choose  # type: ignore[assignment]
    bench_shapes_engine.choose_on_gpu = _choose  # type: ignore[assignment]
    found = {}
    for part in parts:
        with tempfile.TemporaryDirectory() as scratch, recorded(is_run=False) as launches:
            if part == "8b-1b":
                _walk(_shapes_engine(replay, graphs), [(replay.CONTEXT // 2,)], (False, True))
            else:
                # prompts of the output, all at once and as they come
                engine = pair_engine(Path(scratch) / part, part, CaptureLimits.lazy())
                _walk(engine, [(25,) * 8, (25,), (9, 30, 17)])
        found[part] = launches
    return found


def _shapes_engine(replay: Any, graphs: MetaGraphs) -> Any:
    from specc.bench.synthetic.engine import make_engine

    programs = replay.compile_8b()
    weights = {model.entry.name: _weights(model) for model in programs.models}
    return make_engine(programs, weights, graphs, "cuda")


def _weights(model: Any) -> dict[str, torch.Tensor]:
    found = {key: value.to("meta") for key, value in model.constants.items()}
    for item in model.program["inputs"]:
        if item["kind"] == "weight":
            dtype = getattr(torch, item["dtype"])
            found[item["key"]] = torch.empty(item["shape"], dtype=dtype, device="meta")
    return found


def _choose(models: Any, graphs: MetaGraphs, rows: Any) -> list[dict[str, Any]]:
    """Launch what would be measured."""
    from specc.runtime.backends.cuda import product_candidates
    from specc.runtime.backends.cuda.choose_products import choose_products

    # tensors without data have no results to compare
    vars(product_candidates)["_check_result"] = lambda found, wanted: None

    def seconds(run: Any, best: float) -> float:
        run()
        # each tile is among the fastest
        return 1.0

    with _Launching():
        return choose_products(models, graphs, seconds, rows, can_depend=True)


def _walk(
    engine: Any, prompts: Sequence[tuple[int, ...]], launches: Sequence[bool] = (False,)
) -> None:
    """Capture every step for every batch size, and pass prompts of these lengths.

    All of that with the library's products, and with each tile that kernels for few rows have.
    Launches are ordinary, or dependent: these are measured where steps are captured at load.
    """
    from specc.kernels.cuda import few_rows, few_rows_tiles

    tables = (few_rows_tiles.TILES, few_rows_tiles.LINEAR_TILES)
    most = max(
        max(Counter(tile.block_m for tile in tiles).values())
        for table in tables
        for tiles in table.values()
    )
    for number in (None, *range(most)):
        for step in engine.steps.values():
            for bucket, early in itertools.product(step.buckets, launches):
                with few_rows.forced(number):
                    step._captured.clear()
                    step.launches_dependent = early
                    step.capture(bucket)
    _pass(engine, prompts)


def _pass(engine: Any, prompts: Sequence[tuple[int, ...]]) -> None:
    meta: dict[str, Any] = {"device": "meta"}
    for lengths in prompts:
        num_tokens, batch = sum(lengths), len(lengths)
        i32 = {"dtype": torch.int32} | meta
        inputs = (
            torch.zeros(num_tokens, dtype=torch.int64, **meta),
            torch.zeros(num_tokens, dtype=torch.int64, **meta),
            torch.zeros(batch + 1, **i32),
            torch.zeros(num_tokens, **i32),
            torch.zeros(batch, **i32),
            None,
            torch.zeros(batch, engine.cache.shape.blocks_per_sequence, **i32),
            torch.zeros(batch, dtype=torch.int64, **meta),
        )
        for model in (engine.target, *engine.drafts):
            with _Launching(), torch.inference_mode():
                model(*inputs)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--file", help="of tests/kernels/cuda, such as test_rows")
    parser.add_argument("--seconds", action="store_true", help="compile them, for sm_90")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS, help="of command A")
    options = parser.parse_args()
    if options.seconds:
        os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="specc-compiles-")
    if options.file is None:
        found = of_command_a(options.part)
    else:
        # before anything imports Triton's kernels
        os.environ["TRITON_INTERPRET"] = "1"
        import pytest

        path = str(ROOT / f"tests/kernels/cuda/{options.file}.py")
        with recorded() as launches:
            pytest.main(["-q", "-p", "no:cacheprovider", path])
        found = {options.file: launches}
    both: set[Binary] = set()
    made: set[tuple[str, ...]] = set()
    for name, launches in found.items():
        new = set(launches.binaries) - both
        both |= new
        print(
            f"{name}: {len(launches.binaries)} binaries, {len(new)} of them new;"
            f" {len(launches.launchers)} launchers, {len(launches.launchers - made)} new"
        )
        made |= launches.launchers
        if options.seconds:
            times = {b: compile_seconds(b, *launches.sources[b]) for b in new}
            slowest = max(times, key=lambda b: times[b])
            print(f"  {sum(times.values()):.0f} s; {slowest.kernel} {times[slowest]:.1f} s")
        for kernel, count in launches.by_kernel.items():
            print(f"  {kernel}: {count}")
    print(f"in all: {len(both)} binaries, {len(made)} launchers")


if __name__ == "__main__":
    main()
