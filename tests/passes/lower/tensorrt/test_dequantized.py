"""Quantized weights for TensorRT-RTX: forms, parsed networks, and what real builds make of them."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from specc.errors import TensorRTError
from specc.passes.lower.tensorrt.builder import BuildOptions
from specc.passes.lower.tensorrt.check_network import check_trt_network
from specc.passes.lower.tensorrt.lower import build_engine
from specc.passes.lower.tensorrt.onnx_attention import read_form
from specc.passes.lower.tensorrt.shape_profile import ShapeProfile
from specc.tensorrt import library as tensorrt
from tests.passes.lower.tensorrt.test_check_network import parsed
from tests.passes.lower.tensorrt.tiny_onnx import TinyDecoder, TinyShape, write_tiny

SHAPE = TinyShape(num_layers=1)
DECODE = ShapeProfile("decode", (1, 2, 4), (1, 1, 1), (1, 2, 4))
TREE = ShapeProfile("tree 3,2,1", (1, 1, 4), (10, 10, 10), (1, 10, 40))
# levels and groups whose product is one kernel that reads them, and those of which a kernel of its
# own makes floats; the table of docs/guide/quantization.md says the same
READ = (
    ("INT4", 64), ("INT8", 0), ("INT4", 32), ("FLOAT8E4M3FN", 0), ("INT4", 128),
)  # fmt: skip
FLOATS = (
    *(("INT8", group) for group in (64, 32, 128)),
    *(("FLOAT8E4M3FN", group) for group in (128, 32, 64)),
)
NAMES = [f"l0.{name}" for name in ("q", "k", "v", "o", "gate", "up", "down")]


@pytest.fixture(autouse=True)
def rtx(monkeypatch):
    monkeypatch.setenv(tensorrt.ENV, "tensorrt_rtx")


def model(levels, group=0, **options):
    return TinyDecoder(SHAPE, levels=levels, group=group, **options).model()


def node_of(proto, name):
    return next(node for node in proto.graph.node if node.name == f"node_{name}.weight")


def test_what_a_file_has():
    """Shapes, and who reads a weight, through casts."""
    form = read_form(model("INT4", 64))
    assert [x.output for x in form.weights] == [f"{name}.weight" for name in NAMES]
    first = form.weights[0]
    assert (first.levels, first.scales, first.axis) == ((256, 256), (4, 256), 0)
    assert (first.kind, first.is_fp8) == ("INT4", False)
    wide = read_form(model("FLOAT8E4M3FN", wide_scales=True)).weights[0]
    assert (wide.scales, wide.axis, wide.is_fp8) == ((256,), 1, True)
    for found in (first, wide):
        (reader,) = found.readers
        assert reader.startswith("node_matmul_")
    assert read_form(TinyDecoder(SHAPE).model()).weights == ()


def with_zeros(proto):
    node_of(proto, "l0.k").input.append("l0.k.levels")


def with_computed_scales(proto):
    node_of(proto, "l0.k").input[1] = "tokens"


def along_outputs(proto):
    attribute = next(a for a in node_of(proto, "l0.k").attribute if a.name == "axis")
    attribute.i = 1


def in_larger_groups(proto):
    attribute = next(a for a in node_of(proto, "l0.k").attribute if a.name == "block_size")
    attribute.i = 128


def in_groups_of_none(proto):
    attribute = next(a for a in node_of(proto, "l0.k").attribute if a.name == "block_size")
    attribute.i = 96


@pytest.mark.parametrize(
    ("edit", "found"),
    [
        (with_zeros, "with zero points"),
        (with_computed_scales, "of computed values"),
        (along_outputs, "with scales [4, 128] along axis 1"),
        (in_larger_groups, "with scales [4, 128] along axis 0"),
        (in_groups_of_none, "of 256 rows in groups of 96"),
    ],
)
def test_forms_that_are_refused(edit, found):
    proto = model("INT4", 64)
    edit(proto)
    with pytest.raises(TensorRTError) as caught:
        read_form(proto)
    assert found in caught.value.found
    assert caught.value.found.startswith("node_l0.k.weight (DequantizeLinear)")


@pytest.mark.parametrize("levels", ["UINT4", "UINT8", "INT16"])
def test_levels_that_are_refused(levels):
    proto = model("INT8")
    for item in proto.graph.initializer:
        if item.name.endswith(".levels"):
            item.data_type = TensorProto.DataType.Value(levels)
    with pytest.raises(TensorRTError, match=f"of {levels}"):
        read_form(proto)


def test_a_network_that_lost_something_is_refused(tmp_path):
    """Of another file than that which it is compared with."""
    path = write_tiny(tmp_path / "model", SHAPE, levels="INT8")
    form = read_form(onnx.load(path, load_external_data=False))

    def along_rows(proto):
        # as many rows as columns
        (attribute,) = node_of(proto, "l0.q").attribute
        attribute.i = 0

    def not_dequantized(proto):
        node = node_of(proto, "l0.q")
        node.op_type = "Cast"
        del node.input[1:]
        del node.attribute[:]
        node.attribute.append(helper.make_attribute("to", TensorProto.FLOAT16))

    for edit, found in (
        (along_rows, r"node_l0.q.weight of levels \(256, 256\).* along axis 0"),
        (not_dequantized, "6 quantized weights"),
    ):
        trt, network, _keep = parsed(path, edit)
        with pytest.raises(TensorRTError, match=found):
            check_trt_network(trt, network, form, has_lengths=False)
    trt, network, _keep = parsed(path)
    check_trt_network(trt, network, form, has_lengths=False)


def build(folder: Path, capability: str = "8.9", shape: TinyShape = SHAPE, **options):
    path = write_tiny(folder / "model", shape, **options)
    return build_engine(path, path.with_name("plan"), [DECODE, TREE], BuildOptions(capability))


@pytest.mark.default("INT4-64-fp16", "FLOAT8E4M3FN-0-fp16")
@pytest.mark.parametrize(
    ("levels", "group", "dtype"),
    [
        pytest.param(*case, dtype, marks=() if i % 3 == j else pytest.mark.slow)
        for i, case in enumerate(READ)
        for j, dtype in enumerate(("fp16", "bf16"))
    ],
)
def test_products_read_integers(tmp_path, levels, group, dtype):
    """Every weight is in one layer with its product, in both profiles, and stored as it was."""
    shape = TinyShape(num_layers=1, dtype=dtype)
    options = {"levels": levels, "group": group, "wide_scales": levels != "INT4"}
    report = build(tmp_path, shape=shape, **options)
    assert (report.lane, report.fallback) == ("fast", None)
    assert report.layers.decoded == ()
    assert report.layers.fell_apart == ()
    assert not [line for line in report.warnings if "quantized" in line]
    held = [x for x in report.layers.layers if any(".weight" in node for node in x.nodes)]
    assert {x.profile for x in held} == {0, 1}
    # [256, 256] twice, two of half of that, three of twice: 9 · 65536 levels
    count = 9 * 65536 // (2 if levels == "INT4" else 1)
    assert count < report.weights_bytes < 1.5 * count + 2**17


@pytest.mark.parametrize(
    ("levels", "group", "wide_scales"),
    [
        pytest.param(*case, True, marks=pytest.mark.slow if i else ())
        for i, case in enumerate(FLOATS)
    ]
    # why scales of int4 have the type of rows
    + [pytest.param("INT4", 64, True, marks=pytest.mark.slow)],
)
def test_weights_that_become_floats_in_every_pass_are_told(tmp_path, levels, group, wide_scales):
    report = build(tmp_path, levels=levels, group=group, wide_scales=wide_scales)
    # of int4 not all of them
    decoded = report.layers.decoded
    assert 3 < len(decoded) <= 7
    assert set(decoded) <= {f"node_{name}.weight" for name in NAMES}
    (told,) = [line for line in report.warnings if "quantized" in line]
    assert told.startswith(f"{len(decoded)} of the quantized weights become floats in every pass")
    assert told.endswith(", …")


@pytest.mark.parametrize("capability", ["8.0", "8.6"])
def test_fp8_is_for_newer_gpus(tmp_path, capability):
    with pytest.raises(TensorRTError) as caught:
        build(tmp_path, capability, levels="FLOAT8E4M3FN", wide_scales=True)
    assert caught.value.found == f"weights in fp8 for compute capability {capability}"
    assert caught.value.needed.startswith("8.9 or newer")


def one_product(levels, zeros, scale=1.0):
    """A file with one weight [64, 64], and nothing that specc refuses before TensorRT reads it."""
    kind = TensorProto.DataType.Value(levels)
    size = 64 * 64 // (2 if levels.endswith("INT4") else 1)
    held = [
        helper.make_tensor("levels", kind, (64, 64), bytes(size), raw=True),
        helper.make_tensor("scales", TensorProto.FLOAT16, (1, 64), [scale] * 64),
    ]
    if zeros is not None:
        raw = bytes([zeros]) * (64 // (2 if levels.endswith("INT4") else 1))
        held.append(helper.make_tensor("zeros", kind, (1, 64), raw, raw=True))
    nodes = [
        helper.make_node(
            "DequantizeLinear", [item.name for item in held], ["weight"], axis=0, block_size=64
        ),
        helper.make_node("MatMul", ["x", "weight"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, ("rows", 64)) for name in "xy"]
    graph = helper.make_graph(nodes, "one", ends[:1], ends[1:], held)
    opset = [helper.make_operatorsetid("", 24)]
    return helper.make_model(graph, opset_imports=opset, ir_version=11)


@pytest.mark.parametrize(
    ("levels", "zeros", "scale", "said"),
    [
        # zero points
        ("UINT4", None, 1, "Failed to import initializer"),
        ("UINT8", None, 1, "unsupported input type of UINT8"),
        ("INT4", 0x11, 1, "Non-zero zero point is not supported"),
        ("INT8", 1, 1, "Non-zero zero point is not supported"),
        # scales of outputs that are zeros, and of formats that have them
        ("INT8", None, 0, "Scale coefficients must all be positive"),
        ("INT8", None, -1, "Scale coefficients must all be positive"),
        ("FLOAT8E4M3FN", None, 0, "Scale coefficients must all be positive"),
        ("INT8", None, 1, None),
        ("FLOAT8E4M3FN", None, 1, None),
        ("INT4", None, 0, None),
        ("INT4", None, -1, None),
    ],
)
def test_what_the_parser_refuses(levels, zeros, scale, said):
    """Why weights have no zero points, and those of 8 bits scales above 0."""
    trt, logger = tensorrt.load(), tensorrt.logger()
    builder = trt.Builder(logger)
    # a parser does not keep its network
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    is_parsed = parser.parse(one_product(levels, zeros, scale).SerializeToString())
    errors = " ".join(parser.get_error(i).desc() for i in range(parser.num_errors))
    assert is_parsed == (said is None), errors
    assert (said or "") in errors
