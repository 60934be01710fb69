"""Real TensorRT-RTX builds of tiny decoders, on the CPU: what is built, refused and reported."""

from __future__ import annotations

import dataclasses
import json
import warnings
from types import SimpleNamespace

import onnx
import pytest

from specc.errors import TensorRTError, WeightError
from specc.passes.lower.tensorrt import builder as trt_builder
from specc.passes.lower.tensorrt.builder import BuildOptions, read_timing_cache, write_timing_cache
from specc.passes.lower.tensorrt.lower import build_engine
from specc.passes.lower.tensorrt.shape_profile import ShapeProfile, merge_profiles
from specc.tensorrt import library as tensorrt
from specc.tensorrt.layers import LayerReport
from tests.passes.lower.tensorrt.tiny_onnx import TinyShape, write_tiny

DECODE = ShapeProfile("decode", (1, 2, 4), (1, 1, 1), (1, 2, 4))
TREE = ShapeProfile("tree 3,2,1", (1, 1, 2), (2, 10, 16), (1, 10, 32))
STANDARD = BuildOptions("8.9", use_fast_lane=False)


@pytest.fixture(autouse=True)
def rtx(monkeypatch):
    monkeypatch.setenv(tensorrt.ENV, "tensorrt_rtx")


def build(folder, shape=None, options=STANDARD, profiles=(DECODE, TREE), **features):
    model = write_tiny(folder / "model", shape, **features)
    return build_engine(model, model.with_name("engine.plan"), profiles, options)


@pytest.mark.default("fast-fp16")
@pytest.mark.parametrize("dtype", ["fp16", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("lane", ["standard", "fast"])
def test_both_lanes_build_and_attention_stays_one_kernel(tmp_path, dtype, lane):
    options = BuildOptions("8.9", use_fast_lane=lane == "fast")
    report = build(tmp_path, TinyShape(dtype=dtype, window=16), options)
    assert report.lane == lane
    assert report.fallback is None
    assert [x.mask for x in report.attentions] == ["mask", "mask_window_16"]
    assert {x.scales_keys for x in report.attentions} == {lane == "standard"}
    assert {x.has_lengths for x in report.attentions} == {lane == "fast"}
    found = {(x.node, x.profile): x for x in report.layers.attentions}
    assert set(found) == {(f"node_attention_{i}", p) for i in (0, 1) for p in (0, 1)}
    assert all(x.is_fused and len(x.kernels) == 1 for x in found.values())
    assert report.layers.fell_apart == ()
    # every cache is bound to itself, and its lengths are an input in the fast lane only
    assert report.caches == tuple(
        (f"{part}_cache_{i}", f"{part}_cache_{i}_out") for i in (0, 1) for part in "kv"
    )
    assert ("kv_lengths" in report.inputs) is (lane == "fast")
    plan = tmp_path / "model/engine.plan"
    assert plan.stat().st_size == report.num_bytes
    # the weights are in it
    assert report.weights_bytes <= report.num_bytes
    assert report.weights_bytes > 2 * 2 * 256 * 512 * 2
    assert report.activation_bytes > 0
    log = (tmp_path / "model/builder.log").read_text()
    assert f"=== {lane} lane ===" in log
    assert "VERBOSE: Layers:" in log
    stored = json.loads((tmp_path / "model/layers.json").read_text())
    assert LayerReport.from_json(stored) == report.layers
    json.dumps(report.to_json())


def test_lengths_beside_a_mask_are_dropped_by_rtx_and_reported(tmp_path):
    """The mask holds the same facts, so nothing is wrong; but nobody may believe that rows past
    the lengths cost nothing.
    """
    report = build(tmp_path, options=BuildOptions("8.9"))
    assert report.lane == "fast"
    assert report.reads_lengths is False
    assert any("no kernel reads kv_lengths" in line for line in report.warnings)


@pytest.mark.slow
def test_readers_of_the_whole_cache_are_reported(tmp_path):
    """Grouped queries with several nodes: keys and values are repeated for each query head."""
    grouped = build(tmp_path / "grouped").layers.attentions
    reads = {(x.node, x.profile): x.cache_reads for x in grouped}
    assert reads["node_attention_0", 0] == ()
    assert len(reads["node_attention_0", 1]) == 2
    assert all("Repl" in name for name in reads["node_attention_0", 1])
    equal = build(tmp_path / "equal", TinyShape(num_kv_heads=4)).layers.attentions
    assert not any("Repl" in name for x in equal for name in x.cache_reads)


def test_the_multiplied_cache_of_keys_is_counted(tmp_path):
    """Even a scale of 1 multiplies it in the standard lane, and never in the fast one."""
    report = build(tmp_path / "a", scale=1.0)
    assert "the cache of keys is multiplied in 2 attentions" in report.warnings
    fast = build(tmp_path / "b", scale=1.0, options=BuildOptions("8.9"))
    assert not any("multiplied" in line for line in fast.warnings)


@pytest.mark.parametrize(
    ("features", "found"),
    [
        ({"nonpad": True}, "nonpad_kv_seqlen"),
        ({"is_causal": 1}, "is_causal and a mask"),
        ({"is_causal": 1, "no_mask": True}, "is_causal"),
        ({"softcap": 30.0}, "softcap 30"),
        ({"cache_mode": "circular"}, "mode circular"),
        ({"dynamic_cache": True}, "k_cache_0 of shape"),
        ({"hidden_cache": True}, "k_cache_0_out is no output"),
        ({"no_mask": True}, "without a mask"),
    ],
)
def test_a_form_that_tensorrt_loses_or_lacks_is_refused(tmp_path, features, found):
    with pytest.raises(TensorRTError, match=found) as caught:
        build(tmp_path, **features)
    assert caught.value.needed
    assert caught.value.do
    assert not (tmp_path / "model/engine.plan").exists()


def test_fp32_has_no_fused_kernel(tmp_path):
    with pytest.raises(TensorRTError, match="float32 attention") as caught:
        build(tmp_path, TinyShape(dtype="fp32"))
    assert "--decomposable-attention" in caught.value.do


def test_a_head_size_without_a_kernel_is_named(tmp_path):
    """The builder finds out; its message speaks of a composite operation."""
    with pytest.raises(TensorRTError, match="float16 attention with heads of 12"):
        build(tmp_path, TinyShape(head_dim=12))


@pytest.mark.parametrize("fast", [pytest.param(True, marks=pytest.mark.slow), False])
def test_attention_that_fell_apart_is_told(tmp_path, fast):
    """fp32 with several nodes; with one node there is a kernel after all."""
    options = BuildOptions("8.9", decomposable=True, use_fast_lane=fast)
    report = build(tmp_path, TinyShape(dtype="fp32"), options)
    assert {(x.node, x.profile) for x in report.layers.fell_apart} == {
        ("node_attention_0", 1),
        ("node_attention_1", 1),
    }
    assert all(not x.kernels and len(x.others) > 2 for x in report.layers.fell_apart)
    assert sum("fell apart in profile 1" in line for line in report.warnings) == 2
    # both lanes fall apart alike, so the fast one is kept
    assert report.lane == ("fast" if fast else "standard")
    assert report.fallback is None


@pytest.mark.slow
def test_decomposable_costs_nothing_where_a_kernel_is_fused(tmp_path):
    report = build(tmp_path, options=dataclasses.replace(STANDARD, decomposable=True))
    assert report.layers.fell_apart == ()


def test_the_standard_lane_steps_in_and_says_why(tmp_path, monkeypatch):
    """A rewrite that TensorRT refuses: a causal kind beside the mask."""
    rewrite = trt_builder.use_trt_attention

    def broken(model, form):
        result = rewrite(model, form)
        for node in result.graph.node:
            if node.op_type == "TRT_Attention":
                (kind,) = (x for x in node.attribute if x.name == "causal_kind")
                kind.s = b"lower_right"
        return result

    monkeypatch.setattr(trt_builder, "use_trt_attention", broken)
    report = build(tmp_path, options=BuildOptions("8.9"))
    assert report.lane == "standard"
    assert "cannot parse the program" in report.fallback
    assert "TRT_Attention node_attention_0" in report.fallback
    assert report.layers.fell_apart == ()
    log = (tmp_path / "model/builder.log").read_text()
    assert log.index("=== fast lane ===") < log.index("=== standard lane ===")


@pytest.mark.parametrize(
    ("fast", "standard", "lane", "fallback"),
    [
        (2, 0, "standard", "2 attentions fell apart in the fast lane"),
        (2, 2, "fast", None),
        (0, 0, "fast", None),
    ],
)
def test_the_lane_with_more_fused_attentions_is_kept(
    monkeypatch, tmp_path, fast, standard, lane, fallback
):
    apart, built = {"fast": fast, "standard": standard}, []

    def build_lane(self, name):
        built.append(name)
        return SimpleNamespace(num_apart=apart[name], lane=name)

    monkeypatch.setattr(trt_builder.Builder, "lane", build_lane)
    builder = trt_builder.Builder(tmp_path, None, None, [], BuildOptions(), None)
    chosen, why = builder.any_lane()
    assert (chosen.lane, why) == (lane, fallback)
    # nothing is built twice without need
    assert built == (["fast", "standard"] if fast else ["fast"])


@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_fixed_batch_of_several_nodes_builds(tmp_path, fast):
    """TensorRT-RTX 1.7 fails on it ("Error while verifying IR") unless the batch may vary."""
    shape = TinyShape(head_dim=128, cache_len=1024)
    prefill = ShapeProfile("prefill", (1, 1, 1), (1, 32, 64), (1, 1, 1))
    fixed = ShapeProfile("fixed", (1, 1, 1), (8, 8, 8), (1, 1, 1))
    options = BuildOptions("8.9", use_fast_lane=fast)
    report = build(tmp_path, shape, options, [prefill, fixed])
    assert [x["batch"] for x in report.profiles] == [(1, 1, 2), (1, 1, 1)]
    assert [line for line in report.warnings if "up to 2 sequences" in line] == [
        "profile prefill is built for up to 2 sequences: TensorRT-RTX fails on a fixed batch"
    ]
    assert report.lane == ("fast" if fast else "standard")
    assert report.layers.fell_apart == ()


def test_parser_errors_are_one_readable_error(tmp_path):
    path = write_tiny(tmp_path / "model")
    proto = onnx.load(path, load_external_data=False)
    for node in proto.graph.node:
        if node.op_type == "Sigmoid":
            node.op_type = "StringNormalizer"
    onnx.save(proto, path)
    with pytest.raises(TensorRTError, match="cannot parse the program") as caught:
        build_engine(path, path.with_name("engine.plan"), [DECODE], STANDARD)
    assert "StringNormalizer" in caught.value.found
    assert "cudaError" not in caught.value.found


def test_hopper_is_refused_before_anything_is_built(tmp_path):
    with pytest.raises(TensorRTError, match=r"9\.0 with TensorRT-RTX") as caught:
        build(tmp_path, options=BuildOptions("9.0"))
    assert "8.0" in caught.value.needed
    assert "12.0" in caught.value.needed
    assert not (tmp_path / "model/builder.log").exists()


@pytest.mark.slow
def test_engines_for_other_gpus(tmp_path):
    """A plan begins with what it is for: equal for one GPU, other bytes for every other."""
    heads = {}
    for capability in ("8.0", "8.9", "12.0", None):
        report = build(tmp_path, options=BuildOptions(capability, use_fast_lane=False))
        assert report.compute_capability == capability
        assert report.layers.fell_apart == ()
        heads[capability] = (tmp_path / "model/engine.plan").read_bytes()[:256]
    assert len(set(heads.values())) == 4
    build(tmp_path, options=BuildOptions("sm_89", use_fast_lane=False))
    assert (tmp_path / "model/engine.plan").read_bytes()[:256] == heads["8.9"]


def test_equal_profiles_are_one(tmp_path):
    level = dataclasses.replace(TREE, name="draft level 1")
    report = build(tmp_path, profiles=[TREE, DECODE, level])
    assert [x["names"] for x in report.profiles] == [("tree 3,2,1", "draft level 1"), ("decode",)]
    assert report.profiles[0]["nodes"] == (2, 10, 16)
    assert report.layers.num_profiles == 2
    # profile 1 is the decode profile: one node, the other kernel
    kernels = {x.profile: x.kernels[0] for x in report.layers.attentions}
    assert "gemv" in kernels[1]
    assert "gemv" not in kernels[0]


@pytest.mark.parametrize(
    ("profile", "found"),
    [
        (ShapeProfile("prefill", (1, 1, 1), (1, 64, 129), (1, 1, 1)), "129 nodes, caches of 128"),
        (ShapeProfile("p", (1, 1, 1), (1, 4, 2), (1, 1, 1)), "nodes 1, 4, 2"),
        (ShapeProfile("p", (0, 1, 1), (1, 1, 1), (1, 1, 1)), "batch 0, 1, 1"),
        (ShapeProfile("p", (1, 1, 1), (2, 2, 2), (1, 1, 3)), "3 rows"),
    ],
)
def test_profiles_that_cannot_be(tmp_path, profile, found):
    with pytest.raises(TensorRTError, match=found):
        build(tmp_path, profiles=[profile])


def test_no_profile_is_refused():
    with pytest.raises(TensorRTError, match="no profile"):
        merge_profiles([], 128)


def test_another_dynamic_dimension_is_refused(tmp_path):
    path = write_tiny(tmp_path / "model")
    proto = onnx.load(path, load_external_data=False)
    proto.graph.input[1].type.tensor_type.shape.dim[1].dim_param = "length"
    onnx.save(proto, path)
    with pytest.raises(TensorRTError, match="positions with a dimension length"):
        build_engine(path, path.with_name("engine.plan"), [DECODE], STANDARD)


@pytest.mark.slow
def test_progress_counts_up_to_its_total(tmp_path):
    seen = []
    options = dataclasses.replace(STANDARD, progress=lambda *event: seen.append(event))
    build(tmp_path, options=options)
    phases = {phase for phase, _, _ in seen}
    assert "Building engine" in phases
    for phase in phases:
        mine = [(done, total) for name, done, total in seen if name == phase]
        assert mine[0][0] == 0
        assert all(done <= total for done, total in mine)
        assert mine[-1][0] == mine[-1][1] > 0


def test_the_workspace_is_limited(tmp_path):
    """The builder keeps to it: with too little it finds no kernel at all."""
    with pytest.raises(TensorRTError, match="scratch memory too low"):
        build(tmp_path, options=dataclasses.replace(STANDARD, workspace_bytes=1 << 16))
    assert build(tmp_path, options=dataclasses.replace(STANDARD, workspace_bytes=1 << 28))


@pytest.mark.slow
def test_the_timing_cache_is_kept(tmp_path):
    """RTX measures nothing, and says so; the file functions work with its empty cache."""
    path = tmp_path / "cache/timing.cache"
    report = build(tmp_path, options=dataclasses.replace(STANDARD, timing_cache=path))
    assert "measures nothing" in report.timing_cache
    assert not path.exists()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        config = tensorrt.load().Builder(tensorrt.logger()).create_builder_config()
        read_timing_cache(config, path)
        write_timing_cache(config, path)
        first = path.read_bytes()
        assert first
        read_timing_cache(config, path)
        write_timing_cache(config, path)
    assert path.read_bytes() == first
    assert [x.name for x in path.parent.iterdir()] == [path.name]


def test_weights_that_cannot_be_read(tmp_path):
    """Found before the builder, which would name a tensor and no file."""
    path = write_tiny(tmp_path / "model")
    weights, plan = path.with_name("weights.safetensors"), path.with_name("engine.plan")
    content = weights.read_bytes()
    weights.write_bytes(content[:-1])
    with pytest.raises(WeightError, match=f"of {len(content) - 1} bytes"):
        build_engine(path, plan, [DECODE], STANDARD)
    weights.unlink()
    with pytest.raises(WeightError, match=r"no file .*weights\.safetensors"):
        build_engine(path, plan, [DECODE], STANDARD)
    (tmp_path / "weights.safetensors").write_bytes(content)
    proto = onnx.load(path, load_external_data=False)
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../weights.safetensors"
    onnx.save(proto, path)
    with pytest.raises(WeightError, match=r"weights in \.\./weights"):
        build_engine(path, plan, [DECODE], STANDARD)


@pytest.mark.slow
def test_external_weights_are_built_in(tmp_path):
    """Other weights, another plan: the file beside the ONNX file is what the engine holds."""
    path = write_tiny(tmp_path / "model")
    plan, weights = path.with_name("engine.plan"), path.with_name("weights.safetensors")
    content = weights.read_bytes()
    needle = content[4096:4128]
    build_engine(path, plan, [DECODE], STANDARD)
    assert needle in plan.read_bytes()
    weights.write_bytes(content.replace(needle, bytes(32)))
    build_engine(path, plan, [DECODE], STANDARD)
    assert needle not in plan.read_bytes()
