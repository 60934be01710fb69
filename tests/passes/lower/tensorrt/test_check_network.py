"""Networks that TensorRT-RTX parsed: whether they lost anything of their file."""

from __future__ import annotations

import dataclasses

import onnx
import pytest

from specc.errors import TensorRTError
from specc.passes.lower.tensorrt.check_network import check_trt_network
from specc.passes.lower.tensorrt.onnx_attention import read_form
from specc.tensorrt import library as tensorrt
from tests.passes.lower.tensorrt.tiny_onnx import TinyShape, write_tiny


@pytest.fixture(autouse=True)
def rtx(monkeypatch):
    monkeypatch.setenv(tensorrt.ENV, "tensorrt_rtx")


def parsed(model, edit=lambda network: None):
    """Network of a file, after `edit`: (module, network, what must live as long)."""
    trt, logger = tensorrt.load(), tensorrt.logger()
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    proto = onnx.load(model, load_external_data=False)
    edit(proto)
    assert parser.parse(proto.SerializeToString(), str(model))
    return trt, network, (builder, parser)


def layer_at(network, name):
    return next(
        network.get_layer(i) for i in range(network.num_layers) if network.get_layer(i).name == name
    )


def test_why_nonpad_lengths_are_refused(tmp_path):
    """The parser takes them and drops them: no attention of the network has lengths."""
    path = write_tiny(tmp_path / "model", nonpad=True)
    trt, network, _keep = parsed(path)
    inputs = layer_at(network, "node_attention_0_AttentionInput")
    assert inputs.num_inputs == 4
    # and with the lengths cut from the file it is what specc would have written
    plain = onnx.load(path, load_external_data=False)
    for node in plain.graph.node:
        if node.op_type == "Attention":
            del node.input[4:]
    form = read_form(plain)
    check_trt_network(trt, network, form, has_lengths=False)
    with pytest.raises(TensorRTError, match="without key/value lengths"):
        check_trt_network(trt, network, form, has_lengths=True)


def without_mask(proto):
    for node in proto.graph.node:
        if node.name == "node_attention_1":
            node.input[3] = ""


def other_mask(proto):
    for node in proto.graph.node:
        if node.name == "node_attention_1":
            node.input[3] = "mask"


def other_cache(proto):
    for node in proto.graph.node:
        if node.name == "node_attention_1":
            node.input[2] = "v_cache_0_out"


@pytest.mark.parametrize(
    ("edit", "found"),
    [
        (without_mask, "node_attention_1 without its mask mask_window_16"),
        (other_mask, "node_attention_1 masked by mask"),
        (other_cache, "node_attention_1 over k_cache_1_out and v_cache_0_out"),
    ],
)
def test_a_network_that_lost_something_is_refused(tmp_path, edit, found):
    """As if the parser had done it: the network is another file's."""
    path = write_tiny(tmp_path / "model", TinyShape(window=16))
    form = read_form(onnx.load(path, load_external_data=False))
    trt, network, _keep = parsed(path, edit)
    with pytest.raises(TensorRTError, match=found):
        check_trt_network(trt, network, form, has_lengths=False)


def without_sum(proto):
    node = next(x for x in proto.graph.node if x.op_type == "DistCollective")
    node.op_type, node.domain = "Identity", ""
    del node.attribute[:]


def over_more_ranks(proto):
    node = next(x for x in proto.graph.node if x.op_type == "DistCollective")
    (ranks,) = (x for x in node.attribute if x.name == "nb_rank")
    ranks.i = 4


@pytest.mark.parametrize(
    ("edit", "found"),
    [(without_sum, "3 sums over ranks"), (over_more_ranks, "over 4 ranks")],
)
def test_a_network_with_other_sums_is_refused(tmp_path, edit, found):
    path = write_tiny(tmp_path / "model", ranks=2)
    form = read_form(onnx.load(path, load_external_data=False))
    trt, network, _keep = parsed(path)
    check_trt_network(trt, network, form, has_lengths=False)
    trt, network, _keep = parsed(path, edit)
    with pytest.raises(TensorRTError, match=found):
        check_trt_network(trt, network, form, has_lengths=False)


def test_a_network_with_other_caches_is_refused(tmp_path):
    path = write_tiny(tmp_path / "model")
    form = read_form(onnx.load(path, load_external_data=False))
    trt, network, _keep = parsed(path)
    fewer = dataclasses.replace(form, caches=form.caches[:-1])
    with pytest.raises(TensorRTError, match="an update of v_cache_1"):
        check_trt_network(trt, network, fewer, has_lengths=False)
    longer = dataclasses.replace(form.caches[0], shape=(2, 256, 64))
    with pytest.raises(TensorRTError, match="k_cache_0 of shape"):
        check_trt_network(
            trt, network, dataclasses.replace(form, caches=(longer, *form.caches[1:])), False
        )
    network.unmark_output(
        next(
            network.get_output(i)
            for i in range(network.num_outputs)
            if network.get_output(i).name == "v_cache_0_out"
        )
    )
    with pytest.raises(TensorRTError, match="v_cache_0 updated into v_cache_0_out"):
        check_trt_network(trt, network, form, has_lengths=False)


def test_attention_of_primitive_layers_is_refused(tmp_path):
    """A parser that decomposes: here the layers are MatMul and Softmax to begin with."""
    path = write_tiny(tmp_path / "model")
    form = read_form(onnx.load(path, load_external_data=False))

    def decompose(proto):
        node = next(x for x in proto.graph.node if x.name == "node_attention_1")
        node.op_type, out = "MatMul", node.output[0]
        q = node.input[0]
        del node.attribute[:]
        del node.input[:]
        proto.graph.node.remove(node)
        at = next(i for i, x in enumerate(proto.graph.node) if out in x.input)
        proto.graph.node.insert(at, onnx.helper.make_node("Softmax", [q], [out], name="s"))

    trt, network, _keep = parsed(path, decompose)
    with pytest.raises(TensorRTError, match="node_attention_1 without an attention layer"):
        check_trt_network(trt, network, form, has_lengths=False)
