"""Engines from the emitter's own files: every attention of every layer stays one kernel.

The 8B shape is built by tests/measure/tensorrt_builds.py, whose figures are in docs/results.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from specc.artifact.cache_rows import CacheRows, Reach
from specc.passes.lower.tensorrt.builder import BuildOptions
from specc.passes.lower.tensorrt.lower import build_engine
from specc.passes.lower.tensorrt.shape_profile import ShapeProfile
from specc.tensorrt import library as trt
from tests.models import ARCHITECTURES
from tests.onnx_models import lowered, write_onnx
from tests.passes.shard.padded_lockstep import PaddedRanks

PROFILES = (
    ShapeProfile("prefill", (1, 1, 1), (1, 32, 64), (1, 1, 1)),
    ShapeProfile("decode", (1, 2, 4), (1, 1, 1), (1, 2, 4)),
    ShapeProfile("tree 3,2,1", (1, 1, 4), (16, 16, 16), (1, 16, 64)),
)
ROWS = CacheRows.of(128, 16, 1)


def check_builds(folder, name, dtype, capabilities):
    pair = lowered(name, ROWS, dtype)
    write_onnx(pair, folder)
    masks = [Reach(layer.window, layer.chunk).mask_input for layer in pair.flat.layers]
    for capability in capabilities:
        options = BuildOptions(capability)
        report = build_engine(folder / "model.onnx", folder / "engine.plan", PROFILES, options)
        assert report.lane == "fast", report.fallback
        assert report.fallback is None
        assert [x.mask for x in report.attentions] == masks
        assert len(report.layers.attentions) == len(PROFILES) * len(masks)
        assert report.layers.fell_apart == ()
        # a cache of each layer's keys and values, every one bound to itself
        assert len(report.caches) == 2 * len(masks)
        assert {output for _, output in report.caches} == {f"{i}_out" for i, _ in report.caches}


@pytest.fixture(autouse=True)
def rtx(monkeypatch):
    monkeypatch.setenv(trt.ENV, "tensorrt_rtx")


@pytest.mark.slow
def test_two_masks_in_one_model(tmp_path):
    check_builds(tmp_path, "gemma3", torch.bfloat16, ["12.0"])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_chunks_and_mixtures_and_real_products_for_complex_ones(tmp_path, dtype):
    """Llama 4: the mask of its chunks is an input as any other."""
    check_builds(tmp_path, "llama4_text", dtype, ["8.0", "12.0"])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "mistral"])
def test_engines_for_three_gpus(tmp_path, name, dtype):
    check_builds(tmp_path, name, dtype, ["8.0", "8.9", "12.0"])


@pytest.mark.slow
@pytest.mark.parametrize("name", [x for x in ARCHITECTURES if x not in ("llama", "qwen3")])
def test_every_architecture(tmp_path, name):
    check_builds(tmp_path, name, torch.float16, ["8.9"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_one_of_two_ranks_of_every_architecture(tmp_path, name):
    """Its sums over ranks are layers, and change nothing about attention."""
    cut = PaddedRanks(name, 2, ROWS, torch.float16)
    cut.write(tmp_path)
    plan, options = tmp_path / "rank-1.model.plan", BuildOptions("8.9", prefix="rank-1.")
    # one of two key heads is left: all queries of one, of which TensorRT-RTX wants two nodes
    profiles = [dataclasses.replace(x, nodes=(*x.nodes[:2], max(2, x.nodes[2]))) for x in PROFILES]
    report = build_engine(tmp_path / "rank-1.model.onnx", plan, profiles, options)
    assert (report.lane, report.fallback) == ("fast", None)
    assert report.num_sums == len(cut.plan.collectives) > 1
    assert report.layers.fell_apart == ()
    assert (tmp_path / "rank-1.layers.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_standard_form_builds_as_well(tmp_path, name):
    """The checked twin: the file as the emitter wrote it."""
    write_onnx(lowered(name, ROWS, torch.float16), tmp_path)
    options = BuildOptions("8.9", use_fast_lane=False)
    report = build_engine(tmp_path / "model.onnx", tmp_path / "engine.plan", PROFILES, options)
    assert report.lane == "standard"
    assert report.layers.fell_apart == ()
