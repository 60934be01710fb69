"""Measure the CPU kernel of `specc::linear` against what torch offers, rows × method.

    OMP_NUM_THREADS=2 python tests/measure/linear.py --json linear.json

A turn of a method multiplies one x by many distinct matrices of one shape, one after the other:
400 MB of them come from memory, 27 MB from the last level of the caches. The methods take turns,
each round also reads the matrices as fast as can be, and medians over the rounds count. A share is
the bandwidth at which a method reads weights over that of this reading.

`inductor` is torch.compile with freezing and max-autotune, restricted to the C++ GEMM template: the
other choices that it has are the columns beside it. One compiled function has all matrices of a
turn, so that it pays the least for being called.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

from specc.artifact.weight_layout import to_blocks
from specc.kernels import native

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
METHODS = ("specc", "F.linear", "onednn", "mkl", "inductor")
Turn = Callable[[Tensor], list[Tensor]]


@dataclass(frozen=True)
class Size:
    """Matrices [n, k] of so many bytes in all."""

    name: str
    n: int
    k: int
    num_bytes: int


SIZES = (
    Size("memory", 2048, 4096, 400_000_000),
    Size("memory-wide", 11008, 4096, 400_000_000),
    Size("memory-768", 2304, 768, 400_000_000),
    Size("cache", 1536, 256, 27_000_000),
    Size("cache-128", 384, 128, 27_000_000),
)


def make_turn(method: str, weights: list[Tensor], x: Tensor) -> Turn | None:
    """All products of x with one method; None where torch has no such method for the dtype."""
    if method == "specc":
        # in one piece, as the engine's file holds them
        blocks = torch.stack([to_blocks(w) for w in weights])
        n = weights[0].shape[0]
        return lambda x: [torch.ops.specc_cpu.linear(x, w, None, n) for w in blocks]
    if method == "F.linear":
        return lambda x: [linear(x, w) for w in weights]
    if method == "onednn":
        packed = [torch.ops.mkldnn._reorder_linear_weight(w, x.shape[0]) for w in weights]
        project = torch.ops.mkldnn._linear_pointwise
        return lambda x: [project(x, w, None, "none", [], "") for w in packed]
    if method == "mkl":
        if x.dtype != torch.float32 or not torch.backends.mkl.is_available():
            return None
        rows = x.shape[0]
        packed = [torch.ops.mkl._mkl_reorder_linear_weight(w, rows) for w in weights]
        project = torch.ops.mkl._mkl_linear
        pairs = list(zip(packed, weights, strict=True))
        return lambda x: [project(x, p, w, None, rows) for p, w in pairs]
    return compile_turn(weights, x)


def compile_turn(weights: list[Tensor], x: Tensor) -> Turn | None:
    """A function of the C++ GEMM template; None where Inductor has none for the shape."""
    import torch._inductor.config as inductor_config
    import torch._inductor.select_algorithm as select_algorithm
    from torch._dynamo.utils import counters

    class Projections(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # clones: of views of one storage, the compiled function takes the first for all
            self.weights = torch.nn.ParameterList(
                torch.nn.Parameter(w.clone(), requires_grad=False) for w in weights
            )

        def forward(self, x: Tensor) -> list[Tensor]:
            return [linear(x, w) for w in self.weights]

    select_algorithm.PRINT_AUTOTUNE = False
    torch._dynamo.reset()
    counters.clear()
    # no cache of graphs: what comes out of it counts no templates
    options = {"freezing": True, "max_autotune": True, "max_autotune_gemm_backends": "CPP"}
    with inductor_config.patch(options | {"fx_graph_cache": False}):
        compiled = torch.compile(Projections().eval(), dynamic=False)
        compiled(x)
    num_templates = counters["inductor"]["cpp_templated_kernel_counter"]
    assert num_templates in (0, len(weights)), f"{num_templates} of {len(weights)} templates"
    return compiled if num_templates else None


def measure(size: Size, dtype: str, rows: int, methods: list[str], seconds: float) -> dict:
    """Median microseconds of one product with each method, and the bandwidth of reading."""
    count = max(1, size.num_bytes // (size.n * size.k * DTYPES[dtype].itemsize))
    memory = torch.randn(count, size.n, size.k).to(DTYPES[dtype])
    weights = list(memory)
    x = torch.randn(rows, size.k).to(DTYPES[dtype])
    expected = [linear(x, weight).float() for weight in weights]
    turns: dict[str, Callable[[], object]] = {}
    # the bits of two neighboring bfloat16 are a float like any other
    as_floats = memory.view(torch.float32)
    turns["read"] = lambda: native.sum_floats(as_floats)
    for method in methods:
        turn = make_turn(method, weights, x)
        if turn is not None:
            # a claim of speed needs equal numbers, of every matrix
            for product, right in zip(turn(x), expected, strict=True):
                error = (product.float() - right).abs().max() / right.abs().max()
                assert error < TOLERANCE[dtype], f"{method}: {error}"
            turns[method] = lambda turn=turn: turn(x)

    times: dict[str, list[float]] = {name: [] for name in turns}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["read"]) < 5:
        for name, run in turns.items():
            # what ran before has left its own data in the caches
            if size.num_bytes < 100_000_000:
                run()
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) / count)
    medians = {name: statistics.median(values) for name, values in times.items()}
    weight_bytes = memory.nbytes / count
    read = medians.pop("read")
    return {
        "size": size.name,
        "n": size.n,
        "k": size.k,
        "dtype": dtype,
        "rows": rows,
        "threads": torch.get_num_threads(),
        "rounds": len(times["read"]),
        "read_gb_s": round(weight_bytes / read / 1e9, 1),
        "us": {name: round(value * 1e6, 1) for name, value in medians.items()},
        "gb_s": {name: round(weight_bytes / value / 1e9, 1) for name, value in medians.items()},
        "share": {name: round(read / value, 3) for name, value in medians.items()},
    }


def main() -> None:
    """Print tables, and write JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--sizes", nargs="+", default=["memory", "cache"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seconds", type=float, default=3.0, help="of one row of a table")
    arguments = parser.parse_args()
    native.load()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    results = []
    for size in (size for size in SIZES if size.name in arguments.sizes):
        for dtype in arguments.dtypes:
            for threads in arguments.threads:
                torch.set_num_threads(threads)
                print(f"\n{size.name}: [{size.n}, {size.k}] {dtype}, {threads} threads")
                cells = [f"{method:>22s}" for method in arguments.methods]
                print(" | ".join(("rows", "read GB/s", *cells)), flush=True)
                for rows in arguments.rows:
                    row = measure(size, dtype, rows, arguments.methods, arguments.seconds)
                    results.append(row)
                    print(table_row(row, arguments.methods), flush=True)
    if arguments.json:
        report = {
            "date": datetime.date.today().isoformat(),
            "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
            "torch": torch.__version__,
            "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
            "results": results,
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def table_row(row: dict, methods: list[str]) -> str:
    cells = [f"{row['rows']:4d}", f"{row['read_gb_s']:9.1f}"]
    for method in methods:
        if method in row["us"]:
            us, gb_s, share = (row[key][method] for key in ("us", "gb_s", "share"))
            cells.append(f"{us:8.1f} us {gb_s:5.1f} {share:4.0%}".rjust(22))
        else:
            cells.append("-".rjust(22))
    return " | ".join(cells)


if __name__ == "__main__":
    main()
