"""Measure the CPU kernel of `specc::linear_q` against what else multiplies packed weights.

    OMP_NUM_THREADS=1 python tests/measure/linear_q.py --threads 1 2 --json linear_q.json

As `measure_linear.py`: a turn of a method multiplies one x by many distinct matrices of one shape,
400 MB of packed weights in all, the methods take turns, and each round also reads as many bytes as
fast as can be. GB/s are those of the bytes that a method itself stores, its scales included, which
differ a little: so what compares methods is the time, and what compares them with the memory is the
share of the bandwidth of reading.

Peers that are installed take part; what is not is said. `onnxruntime` is its MatMulNBits, float32
rows, blocks of 32, accuracy level 4 (rows become int8, which is faster and less exact) and 0 (as
floats); `openvino` a MatMul by weights that are decompressed, in its default precision; `ggml` a
mul_mat of Q4_0 or Q8_0, rows as Q8_0, from the shared libraries of llama.cpp in --ggml DIRECTORY.
specc's own rows have 24 bits, and as those of the others 8 (`specc-8`). Of ggml's formats
(`--kinds q4_k q6_k`) ggml alone is the peer.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import importlib.metadata
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from specc.artifact.block_formats import FORMATS, BlockFormat
from specc.artifact.quantized_layout import QuantizedLayout, dequantize, pack
from specc.artifact.rounding import quantize
from specc.kernels import native
from specc.system.machine import describe_machine

N, K, NUM_BYTES = 2048, 4096, 400_000_000
BLOCK = 32
# of specc's sums by the bits of its rows; numbers of others are drawn, and only their time counts
TOLERANCES = {24: 2e-5, 8: 2e-2}
Turn = Callable[[], list[Any]]
LAYOUTS = {"int4": "int4-g32", "int8": "int8-g32"} | {name: name for name in FORMATS}


@dataclass(frozen=True)
class Peer:
    """A method: `turn` multiplies x by all matrices, `stored` is the bytes of one matrix."""

    name: str
    stored: int
    turn: Turn


def of_specc(stored: list[Tensor], layout: QuantizedLayout, x: Tensor, row_bits: int) -> Peer:
    own = layout.bits, layout.group, layout.has_zeros, layout.is_float
    numbers = *own, row_bits, layout.format
    run = torch.ops.specc_cpu.linear_q
    name = "specc" if row_bits == 24 else f"specc-{row_bits}"
    return Peer(name, stored[0].nbytes, lambda: [run(x, w, None, N, *numbers) for w in stored])


def of_onnxruntime(bits: int, x: Tensor, count: int, threads: int, level: int) -> Peer:
    """MatMulNBits, one session with a node for each matrix."""
    import onnx
    import onnxruntime
    from onnx import TensorProto, helper

    rng = np.random.default_rng(0)
    blocks, bytes_of_block = K // BLOCK, BLOCK * bits // 8
    nodes, weights, outputs = [], [], []
    for i in range(count):
        packed = rng.integers(0, 256, (N, blocks, bytes_of_block), dtype=np.uint8)
        scales = (rng.random((N, blocks), dtype=np.float32) + 0.5) / 1000
        weights += [
            onnx.numpy_helper.from_array(packed, f"w{i}"),
            onnx.numpy_helper.from_array(scales, f"s{i}"),
        ]
        nodes.append(
            helper.make_node(
                "MatMulNBits", ["x", f"w{i}", f"s{i}"], [f"y{i}"], domain="com.microsoft",
                K=K, N=N, bits=bits, block_size=BLOCK, accuracy_level=level,
            )
        )  # fmt: skip
        outputs.append(helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, [x.shape[0], N]))
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, list(x.shape))]
    graph = helper.make_graph(nodes, "turn", inputs, outputs, weights)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    fed = {"x": x.numpy()}
    stored = N * blocks * (bytes_of_block + 4)
    return Peer(f"onnxruntime-{level}", stored, lambda: session.run(None, fed))


def of_openvino(bits: int, x: Tensor, count: int, threads: int) -> Peer:
    """One compiled model; weights as its compression leaves them: integer, scale, product."""
    import openvino
    from openvino import opset13 as op

    rng = np.random.default_rng(0)
    kind = openvino.Type.u4 if bits == 4 else openvino.Type.u8
    blocks, middle = K // BLOCK, 1 << (bits - 1)
    parameter = op.parameter(list(x.shape), np.float32)
    results = []
    for _ in range(count):
        shape = [N, blocks, BLOCK]
        packed = rng.integers(0, 256, N * K * bits // 8, dtype=np.uint8)
        weight = op.constant(openvino.Tensor(packed, openvino.Shape(shape), kind))
        half = op.convert(weight, np.float16)
        zero = op.convert(
            op.constant(openvino.Tensor(_same(middle, bits), openvino.Shape([1, 1, 1]), kind)),
            np.float16,
        )
        scale = (rng.random((N, blocks, 1)).astype(np.float16) + np.float16(0.5)) / np.float16(1000)
        value = op.multiply(op.subtract(half, zero), op.constant(scale))
        flat = op.convert(op.reshape(value, [N, K], False), np.float32)
        results.append(op.matmul(parameter, flat, False, True))
    model = openvino.Model(results, [parameter], "turn")
    settings = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY"}
    compiled = openvino.Core().compile_model(model, "CPU", settings)
    request = compiled.create_infer_request()
    fed = x.numpy()
    return Peer("openvino", N * blocks * (BLOCK * bits // 8 + 2), lambda: [request.infer([fed])])


def _same(value: int, bits: int) -> np.ndarray:
    return np.array([value * 17 if bits == 4 else value], dtype=np.uint8)


class Ggml:
    """The functions of ggml that one product needs, from shared libraries."""

    F32 = 0
    KINDS: ClassVar = {
        "int4": 2, "int8": 8, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "q2_k": 10,
        "q3_k": 11, "q4_k": 12, "q5_k": 13, "q6_k": 14, "iq4_nl": 20, "iq4_xs": 23,
    }  # fmt: skip

    class InitParams(ctypes.Structure):
        _fields_ = (
            ("mem_size", ctypes.c_size_t),
            ("mem_buffer", ctypes.c_void_p),
            ("no_alloc", ctypes.c_bool),
        )

    def __init__(self, directory: Path) -> None:
        self.base, self.cpu = (
            ctypes.CDLL(str(directory / f"libggml-{name}.so"), mode=ctypes.RTLD_GLOBAL)
            for name in ("base", "cpu")
        )
        pointer, i64 = ctypes.c_void_p, ctypes.c_int64
        for library, name, result, arguments in (
            (self.base, "ggml_init", pointer, (self.InitParams,)),
            (self.base, "ggml_new_tensor_2d", pointer, (pointer, ctypes.c_int, i64, i64)),
            (self.base, "ggml_get_data", pointer, (pointer,)),
            (self.base, "ggml_nbytes", ctypes.c_size_t, (pointer,)),
            (self.base, "ggml_mul_mat", pointer, (pointer, pointer, pointer)),
            (self.base, "ggml_new_graph", pointer, (pointer,)),
            (self.base, "ggml_build_forward_expand", None, (pointer, pointer)),
            (self.base, "ggml_quantize_chunk", ctypes.c_size_t,
             (ctypes.c_int, pointer, pointer, i64, i64, i64, pointer)),
            (self.cpu, "ggml_cpu_init", None, ()),
            (self.cpu, "ggml_graph_compute_with_ctx", ctypes.c_int,
             (pointer, pointer, ctypes.c_int)),
        ):  # fmt: skip
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        self.cpu.ggml_cpu_init()

    def peer(self, name: str, x: Tensor, count: int, threads: int) -> Peer:
        kind = self.KINDS[name]
        size = count * (N * K * 2 + (1 << 20)) + (1 << 28)
        context = self.base.ggml_init(self.InitParams(size, None, False))
        given = self.base.ggml_new_tensor_2d(context, self.F32, K, x.shape[0])
        ctypes.memmove(self.base.ggml_get_data(given), x.data_ptr(), x.nbytes)
        source = torch.randn(N, K) / 1000
        graph = self.base.ggml_new_graph(context)
        for _ in range(count):
            weight = self.base.ggml_new_tensor_2d(context, kind, K, N)
            place = self.base.ggml_get_data(weight)
            self.base.ggml_quantize_chunk(kind, source.data_ptr(), place, 0, N, K, None)
            product = self.base.ggml_mul_mat(context, weight, given)
            self.base.ggml_build_forward_expand(graph, product)
        stored = self.base.ggml_nbytes(weight)
        compute = self.cpu.ggml_graph_compute_with_ctx
        # a work area is taken from the context at each call: as many as there is room for
        return Peer("ggml", stored, lambda: [compute(context, graph, threads)])


def peers_of(
    kind: str, x: Tensor, count: int, threads: int, ggml: Ggml | None
) -> tuple[list[Peer], dict[str, str]]:
    """All methods that are there, and of the others why not."""
    made, missing, bits = [], {}, QuantizedLayout.named(LAYOUTS[kind]).bits
    for name, make in (
        ()
        if kind in FORMATS
        else (
            ("onnxruntime-4", lambda: of_onnxruntime(bits, x, count, threads, 4)),
            ("onnxruntime-0", lambda: of_onnxruntime(bits, x, count, threads, 0)),
            ("openvino", lambda: of_openvino(bits, x, count, threads)),
        )
    ):
        try:
            made.append(make())
        except Exception as error:  # of a library of somebody else: any
            missing[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
    if ggml is None:
        missing["ggml"] = "no --ggml DIRECTORY"
    else:
        made.append(ggml.peer(kind, x, count, threads))
    return made, missing


def drawn(own: BlockFormat) -> Tensor:
    """Random blocks [N, K] with scales of one size."""
    headers = torch.randint(0, 256, (N, K // own.columns, own.header_bytes)).to(torch.uint8)
    headers[..., :2] = torch.tensor([1e-3]).half().view(torch.uint8)
    if own.has_minimum:
        headers[..., 2:4] = torch.tensor([1e-2]).half().view(torch.uint8)
    levels = torch.randint(0, 1 << own.bits, (N, K), dtype=torch.uint8)
    return pack(levels, headers, None, QuantizedLayout.named(own.name))


def measure(kind: str, rows: int, threads: int, seconds: float, ggml: Ggml | None) -> dict:
    """Median microseconds of one product with each method, and the bandwidth of reading."""
    layout = QuantizedLayout.named(LAYOUTS[kind])
    count = NUM_BYTES * 8 // (N * K * layout.bits)
    x = torch.randn(rows, K)
    # distinct memory, equal numbers: what is measured does not depend on them
    own = layout.blocks
    one = quantize(torch.randn(N, K) / 1000, layout) if own is None else drawn(own)
    stored = [one.clone() for _ in range(count)]
    exact = x.double() @ dequantize(stored[0], (N, K), layout).double().T
    own, errors = [], {}
    for row_bits, tolerance in TOLERANCES.items():
        own.append(of_specc(stored, layout, x, row_bits))
        error = ((own[-1].turn()[0].double() - exact).abs().max() / exact.abs().max()).item()
        assert error < tolerance, error
        errors[own[-1].name] = error
    others, missing = peers_of(kind, x, count, threads, ggml)
    memory = torch.zeros(NUM_BYTES // 4)
    turns: dict[str, Callable[[], object]] = {"read": lambda: native.sum_floats(memory)}
    turns |= {peer.name: peer.turn for peer in (*own, *others)}
    sizes = {peer.name: peer.stored for peer in (*own, *others)}
    times: dict[str, list[float]] = {name: [] for name in turns}
    for run in turns.values():
        run()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["read"]) < 5:
        for name, run in turns.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in times.items()}
    read = memory.nbytes / medians.pop("read") / 1e9
    gb_s = {name: sizes[name] * count / value / 1e9 for name, value in medians.items()}
    return {
        "kind": kind,
        "layout": layout.name,
        "rows": rows,
        "threads": threads,
        "rounds": len(times["read"]),
        "matrices": count,
        "specc_errors": errors,
        "read_gb_s": round(read, 1),
        "us": {name: round(value / count * 1e6, 1) for name, value in medians.items()},
        "ns_byte": {
            name: round(value / count / sizes[name] * 1e9, 4) for name, value in medians.items()
        },
        "gb_s": {name: round(value, 1) for name, value in gb_s.items()},
        "share": {name: round(value / read, 3) for name, value in gb_s.items()},
        "missing": missing,
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    """Print tables, and write JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--kinds", nargs="+", choices=LAYOUTS, default=["int4", "int8"])
    parser.add_argument("--seconds", type=float, default=5.0, help="of one row of a table")
    parser.add_argument("--ggml", type=Path, help="directory of libggml-base.so, libggml-cpu.so")
    arguments = parser.parse_args()
    native.load()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    ggml = Ggml(arguments.ggml) if arguments.ggml else None
    results = []
    for kind in arguments.kinds:
        for threads in arguments.threads:
            torch.set_num_threads(threads)
            print(f"\n{kind}: [{N}, {K}], {threads} threads", flush=True)
            for rows in arguments.rows:
                row = measure(kind, rows, threads, arguments.seconds, ggml)
                results.append(row)
                cells = [f"{name} {us:.0f} us {row['gb_s'][name]:.1f} ({row['share'][name]:.0%})"
                         for name, us in row["us"].items()]  # fmt: skip
                print(f"{rows:3d} rows, read {row['read_gb_s']} GB/s: " + ", ".join(cells))
    for name, why in results[0]["missing"].items():
        print(f"{name}: not measured: {why}")
    if arguments.json:
        report = {
            "command": shlex.join(["python", *sys.argv]),
            "date": datetime.date.today().isoformat(),
            "machine": describe_machine(),
            "load_average": [round(value, 1) for value in os.getloadavg()],
            "versions": {
                name: _version(name) for name in ("torch", "onnxruntime", "openvino")
            },
            "shape": [N, K],
            "results": results,
        }  # fmt: skip
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
