"""Converters of specc's operators, on networks of TensorRT-RTX that are then built."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from specc.errors import TensorRTError
from specc.kernels import ops
from specc.passes.lower.experimental.converters import convert_cache_write, convert_masked_attention
from specc.passes.lower.tensorrt.check_network import check_trt_network
from specc.passes.lower.tensorrt.onnx_attention import Cache, CachedAttention, DecoderForm
from specc.tensorrt import library as tensorrt
from specc.tensorrt.layers import layers_from_log, read_layers

# no GPU has run it, and no default path uses it
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def rtx(monkeypatch):
    monkeypatch.setenv(tensorrt.ENV, "tensorrt_rtx")


HEADS, KV_HEADS, LENGTH, DIM = 8, 2, 64, 64


class Converted:
    """A network with one layer's cache writes and attention, made by the converters."""

    def __init__(self, dtype="HALF", decomposable=False, scale=0.3):
        trt = self.trt = tensorrt.load()
        self.builder = trt.Builder(tensorrt.logger())
        self.net = self.builder.create_network(0)
        kind = getattr(trt.DataType, dtype)
        cache = (-1, KV_HEADS, LENGTH, DIM)
        shapes = {
            "q": ((-1, HEADS, -1, DIM), kind),
            "k": ((-1, KV_HEADS, -1, DIM), kind),
            "v": ((-1, KV_HEADS, -1, DIM), kind),
            "k_cache": (cache, kind),
            "v_cache": (cache, kind),
            "write_index": ((-1,), trt.int64),
            "mask": ((-1, 1, -1, LENGTH), trt.bool),
        }
        given = {
            name: self.net.add_input(name, type_, shape) for name, (shape, type_) in shapes.items()
        }
        self.given, self.kept = given, {}
        ctx = SimpleNamespace(net=self.net, record_weight=self.kept.__setitem__)
        written = []
        for part in "kv":
            args = (given[f"{part}_cache"], given[part], given["write_index"])
            made = convert_cache_write(ctx, ops.cache_write, args, {}, f"path/write_{part}")
            made.name = f"{part}_cache_out"
            self.net.mark_output(made)
            written.append(made)
        out = convert_masked_attention(
            ctx, ops.masked_attention, (given["q"], *written),
            {"mask": given["mask"], "scale": scale}, "path/attend", decomposable,
        )  # fmt: skip
        out.name = "out"
        self.net.mark_output(out)

    def form(self):
        caches = tuple(
            Cache(f"{x}_cache", f"{x}_cache_out", f"write_{x}", (KV_HEADS, LENGTH, DIM))
            for x in "kv"
        )
        attention = CachedAttention("attend", "out", *(x.output for x in caches), "mask", 0.3)
        return DecoderForm(caches, (attention,), 10, {})

    def build(self):
        """The plan, and the layers that the builder lists."""
        trt, told = self.trt, []
        config = self.builder.create_builder_config()
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        config.num_compute_capabilities = 1
        config.set_compute_capability(trt.ComputeCapability.SM89, 0)
        profile = self.builder.create_optimization_profile()
        sizes = {0: (1, 2, 4), 2: (1, 7, 16)}
        for name, tensor in self.given.items():
            shape = tuple(tensor.shape)
            profile.set_shape(
                name,
                *([sizes[i][n] if x < 0 else x for i, x in enumerate(shape)] for n in range(3)),
            )
        config.add_optimization_profile(profile)
        with tensorrt.listening(lambda severity, message: told.append(message)):
            plan = self.builder.build_serialized_network(self.net, config)
        listed = [line for line in told if line.startswith("Layers:")]
        return plan, layers_from_log(listed[-1]) if listed else ()


@pytest.mark.parametrize("dtype", ["HALF", "BF16"])
def test_attention_stays_one_kernel_with_its_mask_and_caches_in_place(dtype):
    made = Converted(dtype)
    (attention,) = check_trt_network(made.trt, made.net, made.form(), has_lengths=False)
    assert attention.mask == "mask"
    assert not attention.scales_keys
    plan, layers = made.build()
    assert plan is not None
    (found,) = read_layers(layers, ["attend"], ["k_cache_out", "v_cache_out"]).attentions
    assert found.is_fused
    assert len(found.kernels) == 1


def test_queries_are_scaled_in_fp32():
    made = Converted()
    (number,) = made.kept.values()
    assert number.dtype == torch.float32
    assert number.flatten().tolist() == pytest.approx([0.3])
    kinds = {kind: name for name, kind in made.trt.LayerType.__members__.items()}
    layers = [made.net.get_layer(i) for i in range(made.net.num_layers)]
    (product,) = [layer for layer in layers if kinds[layer.type] == "ELEMENTWISE"]
    assert product.get_output(0).dtype == made.trt.float32
    (begin,) = [layer for layer in layers if kinds[layer.type] == "ATTENTION_INPUT"]
    assert begin.get_input(0).dtype == made.trt.float16
    # and not at all where there is nothing to scale
    plain = Converted(scale=1.0)
    layers = [plain.net.get_layer(i) for i in range(plain.net.num_layers)]
    assert "ELEMENTWISE" not in [kinds[layer.type] for layer in layers]


def test_an_attention_may_come_apart_only_if_asked():
    assert Converted("FLOAT").build()[0] is None
    assert Converted("FLOAT", decomposable=True).build()[0] is not None


def test_converters_refuse_what_tensorrt_would_misread():
    made = Converted()
    ctx = SimpleNamespace(net=made.net, record_weight=made.kept.__setitem__)
    given = made.given
    args = (given["q"], given["k_cache"], given["v_cache"], given["q"], 1.0)
    with pytest.raises(TensorRTError, match="a mask of"):
        convert_masked_attention(ctx, ops.masked_attention, args, {}, "attend_2")
    copied = made.net.add_identity(given["k_cache"]).get_output(0)
    args = (copied, given["k"], given["write_index"])
    with pytest.raises(TensorRTError, match="an input of the network"):
        convert_cache_write(ctx, ops.cache_write, args, {}, "write_2")


def test_tensorrt_10_has_the_older_call():
    trt, calls = tensorrt.load(), []

    class Layer(SimpleNamespace):
        def get_output(self, i):
            return "attended"

    layer = Layer()
    net = SimpleNamespace(add_attention=lambda *args: calls.append(args) or layer)
    q = SimpleNamespace(shape=(1, 2, 3, 4), dtype=trt.float16)
    mask = SimpleNamespace(dtype=trt.bool)
    ctx = SimpleNamespace(net=net)
    args = (q, "k", "v", mask, 1.0)
    out = convert_masked_attention(ctx, ops.masked_attention, args, {}, "a/attend")
    assert out == "attended"
    assert calls == [(q, "k", "v", trt.AttentionNormalizationOp.SOFTMAX, False)]
    assert (layer.mask, layer.decomposable, layer.name) == (mask, False, "a/attend")
