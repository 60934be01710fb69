"""Tiny decoders as ONNX files, made by hand, in the form that the emitter writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from specc.passes.lower.onnx.operators import COLLECTIVE, DOMAIN, SUM

TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
DTYPES = {"fp32": TensorProto.FLOAT, "fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}


@dataclass(frozen=True)
class TinyShape:
    """Sizes of a decoder: `window` adds a second mask that odd layers read."""

    dtype: str = "fp16"
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    cache_len: int = 128
    vocab_size: int = 96
    window: int = 0

    @property
    def hidden_size(self) -> int:
        return self.num_heads * self.head_dim


class TinyDecoder:
    """Writes nodes one after another; every method returns the name of what it computed.

    Args:
        options: attributes of every Attention (`softcap=30.0`, …), or `nonpad=True`,
            `cache_mode="circular"`, `dynamic_cache=True`, `hidden_cache=True` (caches that are not
            outputs), `no_mask=True`: what the builder has to refuse. `ranks=2` puts sums over
            ranks after both branches of a layer, with the attributes of `sum` instead of their own.
            `levels="INT4"`, with `group=32`, stores projections as levels of that type and scales;
            `wide_scales=True` has these in fp32.
    """

    def __init__(self, shape: TinyShape, **options: Any) -> None:
        self.shape, self.options = shape, options
        self.dtype = DTYPES[shape.dtype]
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.random = np.random.default_rng(0)
        self.count = 0

    def node(self, op: str, inputs: list[str], name: str = "", **attributes: Any) -> str:
        self.count += 1
        output = name or f"{op.lower()}_{self.count}"
        self.nodes.append(
            helper.make_node(op, inputs, [output], name=f"node_{output}", **attributes)
        )
        return output

    def weight(
        self, name: str, *size: int, fill: float | None = None, dtype: str | None = None
    ) -> str:
        dtype = dtype or self.shape.dtype
        array = self.random.normal(size=size) * 0.1 if fill is None else np.full(size, fill)
        # TensorRT takes no others of levels of 8 bits
        array = np.abs(array) if name.endswith(".scales") else array
        values = torch.from_numpy(array).to(TORCH_DTYPES[dtype])
        # raw bytes, or they would not go into the file of weights
        raw = values.view(torch.uint8).numpy().tobytes()
        proto = helper.make_tensor(name, DTYPES[dtype], size, raw, raw=True)
        self.weights.append(proto)
        return name

    def constant(self, name: str, value: list[int]) -> str:
        if name not in {weight.name for weight in self.weights}:
            self.weights.append(numpy_helper.from_array(np.array(value, np.int64), name))
        return name

    def linear(self, x: str, name: str, num_in: int, num_out: int) -> str:
        if "levels" in self.options:
            return self.node("MatMul", [x, self.dequantized(name, num_in, num_out)])
        return self.node("MatMul", [x, self.weight(name, num_in, num_out)])

    def dequantized(self, name: str, num_in: int, num_out: int) -> str:
        """[num_in, num_out] of levels, with one scale for each column and group of rows."""
        kind, group = self.options["levels"], self.options.get("group", 0)
        count = num_in * num_out // (2 if kind.endswith("INT4") else 1)
        raw = self.random.integers(0, 100, count).astype(np.uint8).tobytes()
        number = TensorProto.DataType.Value(kind)
        self.weights.append(
            helper.make_tensor(f"{name}.levels", number, (num_in, num_out), raw, raw=True)
        )
        size = (-(-num_in // group), num_out) if group else (num_out,)
        wide = self.options.get("wide_scales")
        scales = self.weight(f"{name}.scales", *size, dtype="fp32" if wide else None)
        way = {"axis": 0, "block_size": group} if group else {"axis": 1}
        found = self.node("DequantizeLinear", [f"{name}.levels", scales], f"{name}.weight", **way)
        return self.node("Cast", [found], to=self.dtype) if wide else found

    def heads(self, x: str, num_heads: int) -> str:
        size = self.constant(f"heads_{num_heads}", [0, 0, num_heads, self.shape.head_dim])
        return self.node("Transpose", [self.node("Reshape", [x, size])], perm=[0, 2, 1, 3])

    def norm(self, x: str, name: str, size: int) -> str:
        return self.node("RMSNormalization", [x, self.weight(name, size, fill=1.0)], axis=-1)

    def rotate(self, x: str, angle: str) -> str:
        """Half-rotary: enough to hang Q and K off the positions."""
        return self.node("Mul", [x, angle])

    def layer(self, x: str, index: int, angle: str) -> str:
        s, options = self.shape, self.options
        h = self.norm(x, f"l{index}.norm1", s.hidden_size)
        kv = s.num_kv_heads * s.head_dim
        q = self.heads(self.linear(h, f"l{index}.q", s.hidden_size, s.hidden_size), s.num_heads)
        k = self.heads(self.linear(h, f"l{index}.k", s.hidden_size, kv), s.num_kv_heads)
        v = self.heads(self.linear(h, f"l{index}.v", s.hidden_size, kv), s.num_kv_heads)
        q, k = self.rotate(q, angle), self.rotate(k, angle)
        mode = options.get("cache_mode", "linear")
        caches = [
            self.node(
                "TensorScatter",
                [f"{part}_cache_{index}", update, "write_index"],
                f"{part}_cache_{index}_out",
                axis=2,
                mode=mode,
            )
            for part, update in (("k", k), ("v", v))
        ]
        window = s.window and index % 2
        mask = "" if options.get("no_mask") else f"mask_window_{s.window}" if window else "mask"
        inputs = [q, *caches, mask]
        if options.get("nonpad"):
            inputs += ["", "", "lengths"]
        extra = {k: v for k, v in options.items() if k in ("is_causal", "softcap")}
        scale = options.get("scale", s.head_dim**-0.5)
        if scale is not None:
            extra["scale"] = scale
        out = self.node("Attention", inputs, f"attention_{index}", **extra)
        flat = self.constant("flat", [0, 0, s.hidden_size])
        out = self.node("Reshape", [self.node("Transpose", [out], perm=[0, 2, 1, 3]), flat])
        out = self.sum(self.linear(out, f"l{index}.o", s.hidden_size, s.hidden_size))
        x = self.node("Add", [x, out])
        h = self.norm(x, f"l{index}.norm2", s.hidden_size)
        gate = self.linear(h, f"l{index}.gate", s.hidden_size, 2 * s.hidden_size)
        gate = self.node("Mul", [gate, self.node("Sigmoid", [gate])])
        up = self.linear(h, f"l{index}.up", s.hidden_size, 2 * s.hidden_size)
        down = self.linear(
            self.node("Mul", [gate, up]), f"l{index}.down", 2 * s.hidden_size, s.hidden_size
        )
        return self.node("Add", [x, self.sum(down)])

    def sum(self, x: str) -> str:
        if (ranks := self.options.get("ranks")) is None:
            return x
        own = SUM | {"nb_rank": ranks} | self.options.get("sum", {})
        return self.node(COLLECTIVE, [x], domain=DOMAIN, **own)

    def model(self) -> onnx.ModelProto:
        s, options = self.shape, self.options
        self.nodes, self.weights, self.count = [], [], 0
        x = self.node("Gather", [self.weight("embed", s.vocab_size, s.hidden_size), "tokens"])
        positions = self.node("Cast", ["positions"], to=self.dtype)
        axes = self.constant("rotary_axes", [1, 3])
        angle = self.node("Cos", [self.node("Unsqueeze", [positions, axes])])
        for i in range(s.num_layers):
            x = self.layer(x, i, angle)
        flat = self.node("Reshape", [x, self.constant("rows", [-1, s.hidden_size])])
        rows = self.node("Gather", [self.norm(flat, "norm", s.hidden_size), "logit_rows"])
        self.node("MatMul", [rows, self.weight("lm_head", s.hidden_size, s.vocab_size)], "logits")
        length: int | str = "cache_rows" if options.get("dynamic_cache") else s.cache_len
        cache = ("batch", s.num_kv_heads, length, s.head_dim)
        i64, flag = TensorProto.INT64, TensorProto.BOOL
        inputs = [
            ("tokens", i64, ("batch", "nodes")),
            ("positions", i64, ("batch", "nodes")),
            ("write_index", i64, ("batch",)),
            ("logit_rows", i64, ("rows",)),
        ]
        if not options.get("no_mask"):
            inputs += [("mask", flag, ("batch", 1, "nodes", length))]
        if s.window:
            inputs += [(f"mask_window_{s.window}", flag, ("batch", 1, "nodes", length))]
        if options.get("nonpad"):
            inputs += [("lengths", i64, ("batch",))]
        names = [f"{part}_cache_{i}" for i in range(s.num_layers) for part in "kv"]
        inputs += [(name, self.dtype, cache) for name in names]
        outputs = [("logits", self.dtype, ("rows", s.vocab_size))]
        if not options.get("hidden_cache"):
            outputs += [(f"{name}_out", self.dtype, cache) for name in names]
        graph = helper.make_graph(
            self.nodes,
            "tiny",
            [helper.make_tensor_value_info(*item) for item in inputs],
            [helper.make_tensor_value_info(*item) for item in outputs],
            self.weights,
        )
        opset = [helper.make_operatorsetid("", 24), helper.make_operatorsetid(DOMAIN, 1)]
        return helper.make_model(graph, opset_imports=opset, ir_version=11)


def write_tiny(folder: Path, shape: TinyShape | None = None, **options: Any) -> Path:
    """Write `model.onnx` with its weights beside it; see TinyDecoder for the options."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.onnx"
    onnx.save_model(
        TinyDecoder(shape or TinyShape(), **options).model(),
        path,
        save_as_external_data=True,
        location="weights.safetensors",
        size_threshold=256,
    )
    return path
