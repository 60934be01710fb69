"""Forms of an ONNX file that TensorRT must not get, beyond those built in test_lower."""

from __future__ import annotations

import onnx
import pytest

from specc.errors import TensorRTError
from specc.passes.lower.tensorrt.onnx_attention import Cache, CachedAttention, read_form
from tests.passes.lower.tensorrt.tiny_onnx import TinyDecoder, TinyShape

SHAPE = TinyShape(window=16, head_dim=16)


def model(**features):
    return TinyDecoder(SHAPE, **features).model()


def nodes(proto, op):
    return [node for node in proto.graph.node if node.op_type == op]


def test_what_a_decoder_has():
    form = read_form(model(scale=None))
    assert form.caches[1] == Cache("v_cache_0", "v_cache_0_out", "node_v_cache_0_out", (2, 128, 16))
    assert [x.input for x in form.caches] == ["k_cache_0", "v_cache_0", "k_cache_1", "v_cache_1"]
    assert form.attentions[1] == CachedAttention(
        "node_attention_1", "attention_1", "k_cache_1_out", "v_cache_1_out", "mask_window_16", 0.25
    )
    assert (form.rows, form.dtype) == (128, "float16")
    assert form.dims["mask"] == ("batch", 1, "nodes", 128)
    assert form.dims["logit_rows"] == ("rows",)


def test_sums_over_ranks():
    form = read_form(model(ranks=4))
    assert [item.num_ranks for item in form.sums] == [4] * 4
    sums = nodes(model(ranks=4), "DistCollective")
    assert [(x.node, x.output) for x in form.sums] == [(x.name, x.output[0]) for x in sums]
    assert read_form(model()).sums == ()


@pytest.mark.parametrize(
    ("ranks", "other"),
    [
        (1, {}),
        (2, {"root": 0}),
        (2, {"reduce_op": "max"}),
        (2, {"collective_operation": "reduce_scatter"}),
        (2, {"groups": [0]}),
    ],
)
def test_collectives_that_are_no_sums_are_refused(ranks, other):
    with pytest.raises(TensorRTError, match="DistCollective"):
        read_form(model(ranks=ranks, sum=other))


def test_nodes_without_a_name_get_one_of_their_own():
    proto = model()
    for node in proto.graph.node:
        node.name = "same" if node.op_type == "Attention" else ""
    form = read_form(proto)
    names = [node.name for node in proto.graph.node]
    assert len(set(names)) == len(names)
    assert all(names)
    assert [x.node for x in form.attentions] == [x.name for x in nodes(proto, "Attention")]


def written_twice(proto):
    node = nodes(proto, "TensorScatter")[0]
    again = onnx.NodeProto.FromString(node.SerializeToString())
    again.name, again.output[0] = "again", "k_again"
    proto.graph.node.append(again)


def computed_cache(proto):
    proto.graph.node.insert(0, onnx.helper.make_node("Identity", ["k_cache_0"], ["copied"]))
    nodes(proto, "TensorScatter")[0].input[0] = "copied"


def other_axis(proto):
    (axis,) = (x for x in nodes(proto, "TensorScatter")[0].attribute if x.name == "axis")
    axis.i = 1


def no_index(proto):
    del nodes(proto, "TensorScatter")[0].input[2]


def past(proto):
    nodes(proto, "Attention")[0].input.extend(["k_cache_0", "v_cache_0"])


def present(proto):
    nodes(proto, "Attention")[0].output.extend(["k_present"])


def packed_heads(proto):
    attention = nodes(proto, "Attention")[0]
    attention.attribute.append(onnx.helper.make_attribute("q_num_heads", 4))


def additive_mask(proto):
    (mask,) = (x for x in proto.graph.input if x.name == "mask")
    mask.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16


def computed_mask(proto):
    proto.graph.node.insert(0, onnx.helper.make_node("Not", ["mask"], ["inverted"]))
    nodes(proto, "Attention")[0].input[3] = "inverted"


def stale_keys(proto):
    """Attention over the cache as it was before the write."""
    nodes(proto, "Attention")[0].input[1] = "k_cache_0"


def unread_cache(proto):
    nodes(proto, "Attention")[1].input[1] = "k_cache_0_out"


def other_dtype(proto):
    (cache,) = (x for x in proto.graph.input if x.name == "v_cache_1")
    cache.type.tensor_type.elem_type = onnx.TensorProto.FLOAT


def no_attention(proto):
    for node in nodes(proto, "Attention"):
        node.op_type = "Softmax"


def no_cache(proto):
    for node in nodes(proto, "TensorScatter"):
        node.op_type = "ScatterND"


@pytest.mark.parametrize(
    ("edit", "found"),
    [
        (written_twice, "k_cache_0 written by node_k_cache_0_out and by again"),
        (computed_cache, "into copied, a computed tensor"),
        (other_axis, "axis 1"),
        (no_index, "without write_indices"),
        (past, "with past, present or score tensors"),
        (present, "with past, present or score tensors"),
        (packed_heads, "packed heads"),
        (additive_mask, "with the mask mask"),
        (computed_mask, "with the mask inverted"),
        (stale_keys, "over k_cache_0$"),
        (unread_cache, "k_cache_1, which no Attention reads"),
        (other_dtype, "caches of several dtypes"),
        (no_attention, "no Attention"),
        (no_cache, "no TensorScatter"),
    ],
)
def test_forms_that_are_refused(edit, found):
    proto = model()
    edit(proto)
    with pytest.raises(TensorRTError) as caught:
        read_form(proto)
    if found.endswith("$"):
        assert caught.value.found.endswith(found[:-1])
    else:
        assert found in caught.value.found
