"""Layers of an engine: lists as the builder logs them.

Builds in tests/passes/lower/tensorrt/test_lower.py read real lists; here are the rare forms.
"""

from __future__ import annotations

import json

import pytest

from specc.tensorrt.layers import LayerReport, layers_from_log, read_layers

TENSOR = (
    "{{ Name: {}, Dimensions: [-1,2,128,64], Strides: [9,8,7,1], Datatype: Half, Format: (x) }}"
)


def line(name, kind, inputs=(), outputs=(), tactic="", nodes=(), constants="[]"):
    tensors = [
        f"[ {', '.join(TENSOR.format(x) for x in names)}]" if names else "[]"
        for names in (inputs, outputs)
    ]
    metadata = "".join(f"[ONNX Layer: {node}]" for node in nodes)
    return (
        f"Name: {name}, LayerType: {kind}, Inputs: {tensors[0]}, Constants: {constants}, "
        f"Outputs: {tensors[1]}, TacticName: {tactic}, StreamId: 0, Metadata: {metadata}"
    )


COPY = (
    "Name: [ShapeHostToDeviceCopy 0], LayerType: ShapeHostToDevice, Inputs: [], Outputs: [ { Name: "
    "n32, Location: Device, Dimensions: [1], Datatype: Int32, Format: none }], ParameterType: "
    "ShapeH2D, shapeValues0: [1], TacticValue: 0x0, StreamId: 0, Metadata: "
)
FUSED = [
    COPY,
    line("a+b_myl0_0", "gemm", ["tokens"], ["x_myl0"], "t", ["q_proj"]),
    line("__myl_Scat_myl0_1", "kgen", ["x_myl0", "k_out"], ["k_out"], "t", ["write", "attn"]),
    line("_gemv_mha_v1_myl0_2", "kgen", ["k_out", "mask"], ["o"], "_gemv_mha_v1_0x1", ["attn"]),
]
APART = [
    line("__shape_myl1_0", "shape_call"),
    line("__myl_Repl_myl1_1", "kgen", ["k_out [profile 1]"], ["r_myl1"], "t", ["attn"]),
    line("__fc1_myl1_2", "gemm", ["r_myl1"], ["s"], "t", ["attn"]),
    line("__myl_MaxrSubExpSumDiv_myl1_3", "kgen", ["s"], ["p"], "t", ["attn"]),
    line("__fc2_myl1_4", "gemm", ["p"], ["o [profile 1]"], "t", ["attn"]),
]


def text(lines):
    return "INFO: before\nVERBOSE: Layers:\n" + "\n".join(lines) + "\n\nI/O Tensors:\n Name: q, x\n"


def report(lines):
    return read_layers(layers_from_log(text(lines)), ["attn"], ["k_out"])


def test_a_list_of_two_profiles():
    """A group has the profile of any of its layers; names lose it."""
    layers = report(FUSED + APART)
    assert [x.profile for x in layers.layers] == [0] * 4 + [1] * 5
    assert [layers.count(i) for i in range(layers.num_profiles)] == [4, 5]
    assert layers.layers[0].outputs == ("n32",)
    assert layers.layers[5].inputs == ("k_out",)
    assert layers.layers[3].tactic == "_gemv_mha_v1_0x1"
    assert layers.layers[2].nodes == ("write", "attn")
    assert layers.reads("mask")
    assert not layers.reads("kv_lengths")
    assert LayerReport.from_json(json.loads(json.dumps(layers.to_json()))) == layers


def test_fused_and_fallen_apart():
    fused, apart = report(FUSED + APART).attentions
    assert (fused.is_fused, fused.profile) == (True, 0)
    assert fused.kernels == ("_gemv_mha_v1_myl0_2",)
    assert fused.others == ()  # the write is there anyway
    assert fused.cache_reads == ()
    assert (apart.is_fused, apart.profile) == (False, 1)
    assert apart.kernels == ()
    assert len(apart.others) == 4
    assert apart.cache_reads == ("__myl_Repl_myl1_1",)
    assert report(FUSED + APART).fell_apart == (apart,)


@pytest.mark.parametrize(
    "extra",
    [
        line("__fc9_myl0_3", "gemm", ["x"], ["y"], "t", ["attn"]),
        line("_gemm_mha_v2_myl0_3", "kgen", ["x"], ["y"], "t", ["attn"]),
    ],
)
def test_a_kernel_with_a_product_beside_it_is_not_one_kernel(extra):
    (attention,) = report([*FUSED, extra]).attentions
    assert not attention.is_fused


@pytest.mark.parametrize("name", ["_gemm_mha_v2_myl0_2", "fmha_sm120_myl0_2", "flash_attention"])
def test_names_of_fused_kernels(name):
    (attention,) = report([line(name, "kgen", ["k_out"], ["o"], "", ["attn"])]).attentions
    assert attention.is_fused


@pytest.mark.parametrize("name", ["alphamhastart_myl0_1", "node_attention_0_myl0_1", "attn"])
def test_names_of_nodes_are_no_kernels(name):
    """Layers are named after ONNX nodes, too."""
    (attention,) = report([line(name, "kgen", ["k_out"], ["o"], "", ["attn"])]).attentions
    assert not attention.is_fused


PRODUCTS = [
    line("__myl_CastMulCastFc_myl0_0", "runtime_fusion", ["x"], ["a"], "t", ["w0", "m0"]),
    line("__myl_ReplCastMulCast_myl0_1", "kgen", [], ["f"], "t", ["w1", "cast"]),
    line("mm_myl0_2", "gemm", ["a", "f"], ["b"], "t", ["m1"]),
    line("__myl_Fc_myl1_1", "runtime_fusion", ["x"], ["c [profile 1]"], "t", ["w1", "m1"]),
]


@pytest.mark.parametrize(
    ("products", "decoded"),
    [
        (PRODUCTS, ("w1",)),
        (PRODUCTS[:1] + PRODUCTS[3:], ()),
        (PRODUCTS[:1], ("w1",)),
        ([], ()),
    ],
)
def test_weights_that_become_floats(products, decoded):
    """In some profile, by a layer without a product; in one with it the integers are read.

    Of a weight that no layer names nothing shows that they are, if there are layers at all.
    """
    weights = {"w0": ("m0",), "w1": ("m1", "m2")}
    found = read_layers(layers_from_log(text(products)), [], [], weights)
    assert found.decoded == decoded
    assert LayerReport.from_json(json.loads(json.dumps(found.to_json()))) == found
    # of engines of earlier versions
    old = {k: v for k, v in found.to_json().items() if k != "decoded"}
    assert LayerReport.from_json(old).decoded == ()


def test_an_attention_that_no_layer_names_is_not_fused():
    layers = read_layers(layers_from_log(text(FUSED)), ["attn", "gone"], ["k_out"])
    assert [x.is_fused for x in layers.attentions] == [True, False]
    assert [x.node for x in layers.fell_apart] == ["gone"]


def test_a_log_without_a_list():
    assert layers_from_log("INFO: nothing") == ()
    nothing = read_layers((), ["attn"], [])
    assert (nothing.num_profiles, nothing.attentions) == (0, ())


def test_the_last_list_counts():
    """Logs of two builds in one file."""
    assert layers_from_log(text(FUSED) + text(APART)) == layers_from_log(text(APART))
