"""Measure how fast the CPU kernel of `specc::tree_attention` reads a cache that lies in memory.

    OMP_NUM_THREADS=1 python examples/measure_cached_attention.py --threads 1 2 --json FILE
    OMP_NUM_THREADS=1 python examples/measure_cached_attention.py --before OLD/kernels/cpu

A case is one sequence of L committed rows and a chain of T tokens. As many layers' caches take
turns as are needed so that none is left in a processor's caches when its turn comes again. A figure
is the bytes of K and V over the seconds of a call, and beside it stands what the machine can read:
`sum_floats` of bandwidth.cpp, which takes its turn in the same rounds with as many threads. The
median over the rounds of the ratio of both counts, since neighbors on the machine slow down both.

`bound` is what the products alone allow, whatever is read: each element of K and V is multiplied
once for each query row that shares its KV head, in float32, or, where the machine has products of
pairs of bfloat16 and K is such, half as many for K. The rates are measured in registers, as many
times one thread's as there are threads. Softmax, transposes and loads come on top of that.

`--own-seconds` counts the seconds that the thread ran instead of those that passed, for a machine
whose cores other jobs share; of one thread only. What the others read still counts.

`--before` names the kernel sources of another commit, built with the same flags; with
`--small-pages` they read a slab in pages of 4 KB, as slabs were allocated once. torch's SDPA gets
contiguous K and V of each head without paging, and either repeats rows (enable_gqa) or has the
query rows that share a KV head packed into one matrix. OpenVINO, where it can be imported, gets the
latter through its operator ScaledDotProductAttention.

`int8` and `int8-bf16` are caches of int8, a scale in each row, under queries in float32 and bf16.
Neither torch nor OpenVINO takes such rows here: compare milliseconds of a call with theirs over
rows of the queries' type.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from attention_kernels import STRUCTS, Kernels
from product_rates import Products
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from specc.artifact.kv_rows import AUTO, INT8, stored_row
from specc.kernels import native
from specc.kernels.reference.kv_rows import read_rows, store_rows
from specc.runtime.scheduling.kv_cache import zeroed_slab

BLOCK_SIZE = 16
# of queries; those that begin with int8 have other rows
DTYPES = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.float32,
    "int8-bf16": torch.bfloat16,
}  # fmt: skip
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "int8": 2e-4, "int8-bf16": 2e-2}


@dataclass(frozen=True)
class Case:
    """T tokens of a sequence with `length` committed rows."""

    dtype: str
    heads: int
    kv_heads: int
    dim: int
    length: int
    num_tokens: int
    layers: int = 0  # 0: enough for `cold_bytes`

    @property
    def layer_bytes(self) -> int:
        """Of the rows of K and V that one call reads."""
        rows = self.length + self.num_tokens
        return 2 * rows * self.kv_heads * self.columns * self.stored.itemsize

    @property
    def holds_int8(self) -> bool:
        return self.dtype.startswith(INT8)

    @property
    def columns(self) -> int:
        """Elements of a row in the cache."""
        return self._row[0]

    @property
    def stored(self) -> torch.dtype:
        """Of a row in the cache."""
        return self._row[1]

    @property
    def _row(self) -> tuple[int, torch.dtype]:
        return stored_row(self.dim, DTYPES[self.dtype], INT8 if self.holds_int8 else AUTO)


class Problem:
    """The caches of a case, as specc and as torch take them."""

    def __init__(self, case: Case, cold_bytes: int, keep_plain: bool) -> None:
        self.case, dtype = case, DTYPES[case.dtype]
        count, size = case.num_tokens, case.length + case.num_tokens
        self.layers = case.layers or max(2, -(-cold_bytes // case.layer_bytes))
        blocks = -(-size // BLOCK_SIZE)
        shape = (self.layers, 2, blocks, BLOCK_SIZE, case.kv_heads)
        self.slab = zeroed_slab((*shape, case.columns), case.stored)
        self.slab[:] = store_rows(torch.randn(*shape[2:], case.dim), case.stored)
        self.plain = self.slab.clone() if keep_plain else self.slab
        self.table = torch.randperm(blocks).int()
        self.q = torch.randn(count, case.heads, case.dim).to(dtype)
        self.kv = torch.randn(2, count, case.kv_heads, case.dim).to(dtype)
        self.out = torch.empty(count, case.heads, case.dim, dtype=dtype)
        self.slots = torch.arange(case.length, size)
        self.words = torch.tensor([(1 << node + 1) - 1 for node in range(count)])
        self.numbers = [
            torch.tensor([0, count], dtype=torch.int32),
            self.slots,
            self.slots.int(),
            torch.tensor([case.length], dtype=torch.int32),
            self.words,
        ]
        self.dense: list[Tensor] = []

    def _arguments(self, layer: Tensor, num_later: int) -> ctypes.Structure:
        case, count = self.case, self.case.num_tokens
        row = case.kv_heads * case.columns
        strides = (BLOCK_SIZE * row, row, case.columns)
        k_cache, v_cache = (part.data_ptr() for part in layer)
        k, v = (part.data_ptr() for part in self.kv)
        token = case.kv_heads * case.dim
        later = [0] * num_later
        return STRUCTS[num_later](
            int(DTYPES[case.dtype] == torch.bfloat16), case.holds_int8,
            case.heads, case.kv_heads, count, case.dim, case.dim, 1,
            self.q.data_ptr(), case.dim, case.heads * case.dim,
            k, case.dim, token, v, case.dim, token,
            k_cache, *strides, v_cache, *strides,
            self.slab.shape[2], BLOCK_SIZE, *(x.data_ptr() for x in self.numbers), 1,
            self.table.data_ptr(), len(self.table), case.dim**-0.5, 0, 0,
            None, 0, None, False, *later, self.out.data_ptr(), case.dim, case.heads * case.dim,
        )  # fmt: skip

    def call(self, kernels: Kernels, threads: int, plain: bool) -> Callable[[int], None]:
        slab = self.plain if plain else self.slab
        arguments = [self._arguments(layer, kernels.num_later) for layer in slab]
        return lambda layer: kernels.attend(ctypes.byref(arguments[layer]), threads)

    def torch_calls(self) -> dict[str, Callable[[int], None]]:
        """SDPA with repeated heads and with packed rows, on K and V that are contiguous by head."""
        case, size = self.case, self.case.length + self.case.num_tokens
        rows = self.slab[:, :, self.table.long()].flatten(2, 3)[:, :, :size]
        self.dense = [layer.transpose(1, 2).contiguous() for layer in rows]  # [2, HK, L, D]
        mask = torch.full((case.num_tokens, size), float("-inf")).triu(case.length + 1)
        mask = mask.to(self.q.dtype)
        q = self.q.transpose(0, 1)[None].contiguous()
        group = case.heads // case.kv_heads
        self.packed_mask = mask.repeat(group, 1)
        self.packed_q = q.view(1, case.kv_heads, -1, case.dim)

        def gqa(layer: int) -> None:
            k, v = self.dense[layer][:, None]
            self.result = sdpa(q, k, v, attn_mask=mask, enable_gqa=group > 1)

        def packed(layer: int) -> None:
            k, v = self.dense[layer][:, None]
            self.result = sdpa(self.packed_q, k, v, attn_mask=self.packed_mask)

        self.packed_call = packed
        return {"SDPA": gqa, "packed SDPA": packed}

    def openvino_calls(self, threads: int) -> dict[str, Callable[[int], None]]:
        """The packed rows in OpenVINO's operator, on the same K and V; none without OpenVINO."""
        try:
            import openvino
            from openvino import opset13
        except ImportError:
            return {}
        case, mask = self.case, self.packed_mask[None, None]
        kind = {"fp32": openvino.Type.f32, "bf16": openvino.Type.bf16}[case.dtype]

        def shared(x: Tensor) -> openvino.Tensor:
            bits = x.view(torch.int16 if case.dtype == "bf16" else torch.int32)
            return openvino.Tensor(bits.numpy(), openvino.Shape(list(x.shape)), kind)

        first = (self.packed_q, *self.dense[0][:, None], mask)
        inputs = [opset13.parameter(list(x.shape), kind) for x in first]
        model = openvino.Model([opset13.scaled_dot_product_attention(*inputs)], inputs)
        options = {
            "INFERENCE_PRECISION_HINT": "bf16" if case.dtype == "bf16" else "f32",
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": 1,
        }
        request = openvino.Core().compile_model(model, "CPU", options).create_infer_request()
        layers = [
            [shared(x) for x in (self.packed_q, *layer[:, None], mask)] for layer in self.dense
        ]

        def infer(layer: int) -> None:
            for i, tensor in enumerate(layers[layer]):
                request.set_input_tensor(i, tensor)
            request.infer()

        infer(0)
        shape = self.packed_q.shape
        found = request.get_output_tensor(0).data.view("i2" if case.dtype == "bf16" else "i4")
        self.packed_call(0)
        got = torch.from_numpy(found.copy()).view(self.q.dtype).view(shape)
        tolerance = TOLERANCE[case.dtype]
        torch.testing.assert_close(got, self.result, rtol=tolerance, atol=tolerance)
        return {"OpenVINO": infer}

    def check(self, call: Callable[[int], None]) -> None:
        """A claim of speed needs equal numbers."""
        call(0)
        rows = read_rows(self.slab[0][:, self.table.long()].flatten(1, 2))
        k, v = (part[: self.case.length + self.case.num_tokens].transpose(0, 1) for part in rows)
        mask = torch.full((self.case.num_tokens, k.shape[1]), float("-inf"))
        expected = sdpa(
            self.q.transpose(0, 1).float(), k, v,
            attn_mask=mask.triu(self.case.length + 1), enable_gqa=True,
        )  # fmt: skip
        tolerance = TOLERANCE[self.case.dtype]
        torch.testing.assert_close(
            self.out.transpose(0, 1).float(), expected, rtol=tolerance, atol=tolerance
        )


def measure(
    calls: dict[str, Callable[[int], None]],
    problem: Problem,
    read: Callable[[], float],
    seconds: float,
    clock: Callable[[], float],
) -> dict[str, dict[str, float]]:
    """Of each call, medians of the rounds: GB/s of rows, that over what is read, ms a layer.

    Args:
        calls: by name; each computes one layer.
        problem: whose caches they read.
        read: GB/s of the machine, measured now.
        seconds: that all rounds take, at least three.
        clock: by which calls are timed.
    """
    rates: dict[str, list[float]] = {name: [] for name in calls}
    times: dict[str, list[float]] = {name: [] for name in calls}
    machine, layers = [], problem.layers
    for call in calls.values():
        call(0)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(machine) < 3:
        machine.append(read())
        for name, call in calls.items():
            start = clock()
            for layer in range(layers):
                call(layer)
            taken = clock() - start
            times[name].append(1000 * taken / layers)
            rates[name].append(problem.case.layer_bytes * layers / taken / 1e9)
    result = {"read": {"GB/s": round(statistics.median(machine), 2)}}
    for name, values in rates.items():
        ratios = [rate / most for rate, most in zip(values, machine, strict=True)]
        result[name] = {
            "GB/s": round(statistics.median(values), 2),
            "ms": round(statistics.median(times[name]), 4),
            "of read": round(statistics.median(ratios), 3),
        }
    return result


def reader(
    kernels: Kernels, num_bytes: int, threads: int, clock: Callable[[], float]
) -> Callable[[], float]:
    data = torch.zeros(num_bytes // 4)

    def read() -> float:
        start = clock()
        kernels.sum(data.data_ptr(), data.numel(), threads)
        return data.nbytes / (clock() - start) / 1e9

    return read


def main() -> None:
    """Print a table, and write JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--before", type=Path, help="kernels/cpu of another commit")
    parser.add_argument("--small-pages", action="store_true", help="a slab so for --before")
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=DTYPES)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[8, 4, 2, 1])
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384, 32768])
    parser.add_argument("--tokens", type=int, nargs="+", default=list(range(1, 9)))
    parser.add_argument("--layers", type=int, default=0, help="0: as many as --megabytes takes")
    parser.add_argument("--megabytes", type=int, default=256, help="read by a turn at least")
    parser.add_argument("--seconds", type=float, default=0.5, help="of one case")
    parser.add_argument("--no-torch", action="store_true", help="without SDPA and OpenVINO")
    parser.add_argument("--own-seconds", action="store_true", help="of the thread; one thread")
    arguments = parser.parse_args()
    if arguments.own_seconds and arguments.threads != [1]:
        parser.error("--own-seconds: other threads' seconds are not counted; use --threads 1")
    clock = time.thread_time if arguments.own_seconds else time.perf_counter
    torch.manual_seed(0)
    results, cold_bytes = [], arguments.megabytes << 20
    with tempfile.TemporaryDirectory() as scratch:
        kernels = {"specc": Kernels(native.SOURCE_DIR, Path(scratch))}
        if arguments.before:
            if any(name.startswith(INT8) for name in arguments.dtypes):
                parser.error("--before: earlier kernels have no rows of int8")
            kernels["before"] = Kernels(arguments.before, Path(scratch))
        products = Products(native.SOURCE_DIR, Path(scratch))
        print(f"billions of products a second: {products.floats:.1f}, pairs {products.pairs:.1f}")
        print("GB/s of K and V, and that over what the machine reads")
        for threads in arguments.threads:
            torch.set_num_threads(threads)
            read = reader(kernels["specc"], cold_bytes, threads, clock)
            for case in (
                Case(dtype, arguments.heads, kv_heads, dim, length, count, arguments.layers)
                for dtype in arguments.dtypes
                for dim in arguments.dims
                for kv_heads in arguments.kv_heads
                for length in arguments.lengths
                for count in arguments.tokens
            ):
                problem = Problem(case, cold_bytes, arguments.small_pages)
                calls = {
                    name: problem.call(one, threads, name == "before")
                    for name, one in kernels.items()
                }
                for call in calls.values():
                    problem.check(call)
                if not arguments.no_torch and not case.holds_int8:
                    calls |= problem.torch_calls()
                    calls |= problem.openvino_calls(threads)
                found = measure(calls, problem, read, arguments.seconds, clock)
                if not case.holds_int8:
                    rows = case.num_tokens * case.heads // case.kv_heads
                    bound = products.bound(rows, case.stored, threads)
                    share = bound / found["read"]["GB/s"]
                    found["bound"] = {"GB/s": round(bound, 2), "of read": round(share, 3)}
                cells = [
                    f"{name} {x['GB/s']:5.1f} {x.get('of read', 1):5.2f} {x.get('ms', 0):7.3f} ms"
                    for name, x in found.items()
                ]
                shape = f"H {case.heads}/{case.kv_heads} D {case.dim} L {case.length}"
                print(f"{threads} {case.dtype} {shape} T {case.num_tokens} | {' | '.join(cells)}",
                      flush=True)  # fmt: skip
                results.append({"threads": threads, **vars(case), "found": found})
    if arguments.json:
        report = {
            "date": datetime.date.today().isoformat(),
            "command": "python examples/measure_cached_attention.py",
            "machine": {"processor": platform.machine(), "cores": os.cpu_count()},
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "products": {"floats": round(products.floats, 1), "pairs": round(products.pairs, 1)},
            "results": results,
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
