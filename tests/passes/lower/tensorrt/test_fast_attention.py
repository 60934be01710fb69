"""The fast lane says what the standard form says: checked by translating it back and running both.

Nothing but TensorRT reads its operators, so the oracle is onnxruntime on the standard form, against
the rewritten file with `TRT_Attention` read as an Attention of scale 1 and `TRT_KVCacheUpdate` as a
TensorScatter.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

from specc.errors import TensorRTError
from specc.passes.lower.tensorrt.fast_attention import LENGTHS, use_trt_attention
from specc.passes.lower.tensorrt.onnx_attention import attributes, read_form
from tests.passes.lower.tensorrt.tiny_onnx import TinyDecoder, TinyShape

SHAPE = TinyShape(dtype="fp32", num_heads=4, num_kv_heads=2, head_dim=16, cache_len=24, window=16)


def rewritten(shape=SHAPE, **options):
    model = TinyDecoder(shape, **options).model()
    return model, use_trt_attention(model, read_form(model))


def translated_back(model):
    """TensorRT's operators as their schemas describe them, in standard ones."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    nodes = []
    for node in result.graph.node:
        if node.op_type == "TRT_KVCacheUpdate":
            assert attributes(node) == {"mode": "linear", "axis": -2}
            index = f"{node.name}_index"
            cast = onnx.helper.make_node(
                "Cast", [node.input[2]], [index], to=onnx.TensorProto.INT64
            )
            inputs = [node.input[0], node.input[1], index]
            scatter = onnx.helper.make_node("TensorScatter", inputs, node.output, axis=-2)
            nodes += [cast, scatter]
        elif node.op_type == "TRT_Attention":
            assert attributes(node) == {"causal_kind": "none"}
            assert list(node.input[4:]) == ["", LENGTHS]
            nodes.append(onnx.helper.make_node("Attention", node.input[:4], node.output, scale=1.0))
        else:
            nodes.append(node)
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del result.graph.node[:]
    result.graph.node.extend(copies)
    return result


def feeds(shape, batch=3, nodes=4):
    """A committed prefix of another length in every sequence, and a tree of four nodes."""
    random = np.random.default_rng(1)
    lengths = np.array([0, 5, 17], np.int64)[:batch]
    parents = [-1, 0, 0, 1]
    mask = np.zeros((batch, 1, nodes, shape.cache_len), bool)
    depth = np.zeros(nodes, np.int64)
    for node, parent in enumerate(parents):
        depth[node] = 0 if parent < 0 else depth[parent] + 1
        for b, length in enumerate(lengths):
            mask[b, 0, node, :length] = True
            if parent >= 0:
                mask[b, 0, node] |= mask[b, 0, parent]
            mask[b, 0, node, length + node] = True
    window = mask & (np.arange(shape.cache_len) > lengths[:, None, None, None] - 8)
    half = (batch, shape.num_kv_heads, shape.cache_len, shape.head_dim)
    caches = {
        f"{part}_cache_{i}": random.normal(size=half).astype(np.float32)
        for i in range(shape.num_layers)
        for part in "kv"
    }
    return {
        "tokens": random.integers(0, shape.vocab_size, (batch, nodes)),
        "positions": lengths[:, None] + depth,
        "write_index": lengths,
        "logit_rows": np.array([0, 3, 6, 11]),
        "mask": mask,
        f"mask_window_{shape.window}": window,
        **caches,
    }


def run(model, values):
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    given = {item.name: values[item.name] for item in session.get_inputs()}
    return dict(zip([x.name for x in session.get_outputs()], session.run(None, given), strict=True))


def other_nodes(model):
    changed = ("Attention", "TensorScatter", "TRT_Attention", "TRT_KVCacheUpdate")
    return [
        node.SerializeToString()
        for node in model.graph.node
        if node.op_type not in changed and not node.name.startswith("trt_")
    ]


@pytest.mark.parametrize("scale", [None, 0.25, 0.3, 1.0])
def test_the_rewrite_computes_the_same(scale):
    """Whatever the scale: default, a power of two, another number, none to speak of."""
    standard, fast = rewritten(scale=scale)
    values = feeds(SHAPE)
    values[LENGTHS] = (values["write_index"] + 4).astype(np.int32)
    want, got = run(standard, values), run(translated_back(fast), values)
    assert want.keys() == got.keys()
    for name, value in want.items():
        tolerance = 1e-5 if name == "logits" else 2e-6
        np.testing.assert_allclose(got[name], value, atol=tolerance, rtol=0, err_msg=name)
    # the oracle sees a scale that is off: a softmax over equal scores would hide it
    off = translated_back(fast)
    for node in off.graph.node:
        if node.op_type == "Attention":
            node.attribute[0].f = 0.5
    assert np.abs(run(off, values)["logits"] - want["logits"]).max() > 1e-3


def test_everything_else_is_kept():
    standard, fast = rewritten()
    assert other_nodes(fast) == other_nodes(standard)
    assert [x.op_type for x in fast.graph.node if x.domain == "trt"].count("TRT_Attention") == 2
    assert [x.op_type for x in fast.graph.node if x.domain == "trt"].count("TRT_KVCacheUpdate") == 4
    assert not {x.op_type for x in fast.graph.node} & {"Attention", "TensorScatter"}
    assert list(fast.graph.output) == list(standard.graph.output)
    assert list(fast.graph.input[:-1]) == list(standard.graph.input)
    lengths = fast.graph.input[-1]
    assert lengths.name == LENGTHS
    assert lengths.type.tensor_type.elem_type == onnx.TensorProto.INT32
    weights = {item.name: item.SerializeToString() for item in standard.graph.initializer}
    kept = {item.name: item.SerializeToString() for item in fast.graph.initializer}
    assert weights.items() <= kept.items()
    assert len(kept) == len(weights) + 2  # one scale for each attention


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_the_scale_is_on_the_query_once_and_exact(dtype):
    """fp32 holds 1/sqrt(128) better than fp16 and bf16: the product is rounded, not the scale."""
    shape = TinyShape(dtype=dtype, head_dim=128)
    _, fast = rewritten(shape, scale=None)
    makers = {node.output[0]: node for node in fast.graph.node}
    weights = {item.name: item for item in fast.graph.initializer}
    for node in fast.graph.node:
        if node.op_type != "TRT_Attention":
            continue
        path, step = [], makers[node.input[0]]
        while step.name.startswith("trt_"):
            path.append(step)
            step = makers[step.input[0]]
        casts = [] if dtype == "fp32" else ["Cast"]
        assert [x.op_type for x in path] == [*casts, "Mul", *casts]
        scale = weights[next(x for x in path if x.op_type == "Mul").input[1]]
        assert onnx.numpy_helper.to_array(scale) == np.float32(128**-0.5)
        # keys and values come straight from their updates
        assert [makers[x].op_type for x in node.input[1:3]] == ["TRT_KVCacheUpdate"] * 2
        assert node.input[3] == "mask"


def test_the_file_given_is_not_changed():
    model = TinyDecoder(SHAPE).model()
    before = model.SerializeToString()
    use_trt_attention(model, read_form(model))
    assert model.SerializeToString() == before


def test_a_taken_name_is_refused():
    model = TinyDecoder(SHAPE).model()
    model.graph.node[0].output[0] = "trt_something"
    with pytest.raises(TensorRTError, match="trt_something"):
        use_trt_attention(model, read_form(model))
