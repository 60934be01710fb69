"""Weight files of ranks of quantized engines: the whole's integers, cut along both dimensions."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from specc.artifact.directory import read_manifest
from specc.artifact.quantized_layout import QuantizedLayout, dequantize
from specc.compiler.build import build
from specc.config import CompileConfig
from specc.errors import ConfigError
from specc.passes.quantize.quantized_inputs import COLUMN_ORDER
from specc.runtime.backends.eager.program import ModelProgram
from specc.sharding.shard_plan import ShardPlan
from tests import branded_checkpoints as branded
from tests import models
from tests import quantized_checkpoints as made
from tests.mxfp4_experts import write_experts
from tests.passes.shard.lockstep import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    ThreadRanks,
    assert_alike,
    prompt_inputs,
)
from tests.traces import shared_traces

SLOW = pytest.mark.slow
WIDE = {"intermediate_size": 128}


def compiled(checkpoint: Path, path: Path, num_ranks: int, **options: Any) -> Path:
    config = CompileConfig(
        max_seq_len=64, backend="eager", probe=False, tensor_parallel_size=num_ranks, **options
    )
    with shared_traces():
        build(checkpoint, None, path, config)
    return path


def values_of(key: str, stored: Tensor, shape: tuple[int, ...]) -> Tensor:
    """What a tensor of a file stands for; floats stand for themselves."""
    name = key.rpartition(":")[2]
    if name == key:
        return stored
    return dequantize(stored, shape, QuantizedLayout.named(name))


def check_pieces(one: Path, cut: Path, num_ranks: int) -> ShardPlan:
    """Every rank has the whole's values of its rows and columns, in as many bytes as planned."""
    whole = load_file(one / "target" / "weights.safetensors")
    plan = ShardPlan.from_json(json.loads((cut / "target" / "shard.json").read_text()))
    quantized = [item.key for item in plan.weights if item.layout is not None]
    assert set(quantized) == {key for key in whole if ":" in key}
    for rank in range(num_ranks):
        own = load_file(cut / "target" / f"rank-{rank}.weights.safetensors")
        assert whole.keys() <= own.keys()
        for key, item in plan.by_key.items():
            found = values_of(key, own[key], item.local_shape)
            want = item.take(values_of(key, whole[key], item.shape), rank)
            assert torch.equal(found, want), (key, rank)
        assert sum(own[key].nbytes for key in plan.by_key) == plan.local_bytes
        constants = sum(own[key].nbytes for key in own.keys() - plan.by_key.keys())
        memory = read_manifest(cut).memory_plan["target"].weights
        assert memory == plan.local_bytes + constants
    nodes = json.loads((cut / "target" / "program.json").read_text())["graph"]["nodes"]
    summed = {node["name"]: node["args"][0] for node in nodes if "all_reduce" in node["name"]}
    for item in plan.collectives:
        assert summed[item.node] == {"node": item.after}
    assert plan.whole_bytes == sum(whole[key].nbytes for key in plan.by_key)
    entries = [read_manifest(engine).models[0] for engine in (one, cut)]
    assert entries[0].num_parameters == entries[1].num_parameters
    assert entries[0].quantization == entries[1].quantization
    return plan


@pytest.mark.parametrize(
    ("name", "num_ranks", "changes", "options"),
    [
        # two heads of keys and values are copied for four
        ("llama", 4, WIDE | {"head_dim": 32}, {"quantize": "int4", "quantize_group": 32}),
        # fused in the checkpoint, columns of logits padded for four
        ("phi3", 4, {"vocab_size": 126}, {"quantize": "int8"}),
        pytest.param("mixtral", 2, WIDE, {"quantize": "int4", "quantize_group": 32}, marks=SLOW),
        # experts are columns of their parameters, and whole on every rank
        pytest.param("gpt_oss", 2, {}, {"quantize": "fp8"}, marks=SLOW),
        # transposed in the checkpoint
        pytest.param("gpt2", 2, {}, {"quantize": "int4", "quantize_group": 32}, marks=SLOW),
        # the head is the embedding, too
        pytest.param("gemma3-tied", 2, {}, {"quantize": "int8"}, marks=SLOW),
        # 48 outputs of each expert's part
        pytest.param("qwen3_moe", 2, {}, {"quantize": "int8"}, marks=SLOW),
    ],
)
def test_files_of_ranks_are_pieces_of_the_whole(tmp_path, name, num_ranks, changes, options):
    checkpoint = models.save_tiny(name, tmp_path / "checkpoint", **changes)
    one = compiled(checkpoint, tmp_path / "whole", 1, **options)
    cut = compiled(checkpoint, tmp_path / "cut", num_ranks, **options)
    plan = check_pieces(one, cut, num_ranks)
    # all of the layers' projections are cut, along outputs or along columns
    layers = [item for item in plan.weights if item.layout and "layers" in item.key]
    is_whole = lambda key: name == "gpt_oss" and "experts" in key  # noqa: E731
    assert all(item.is_cut != is_whole(item.key) for item in layers)


def zeros_in_layers() -> made.Format:
    """Zero points, but for the head: its scales are not those that engines round with."""
    plain, zeros = made.packed(4, 32), made.packed(4, 32, False)
    config = copy.deepcopy(dict(zeros.config))
    group = copy.deepcopy(plain.config["config_groups"]["group_0"])
    config["config_groups"]["group_1"] = group | {"targets": ["re:lm_head"]}
    write = lambda name, weight: (plain if "lm_head" in name else zeros).writer(name, weight)  # noqa: E731
    return made.Format(config, write)


@pytest.mark.parametrize(
    "form",
    [
        zeros_in_layers(),
        pytest.param(made.gptq(4, 32, False), marks=SLOW),
        pytest.param(made.packed(8, None, False), marks=SLOW),
        pytest.param(made.float8_blocks(32), marks=SLOW),
        pytest.param(made.packed_mxfp4(), marks=SLOW),
        pytest.param(branded.packed_nvfp4(), marks=SLOW),
    ],
)
def test_integers_of_checkpoints(tmp_path, form) -> None:
    """Scales and zero points go with the rows and columns that they are of, the head's, too."""
    changes = WIDE | {"vocab_size": 126, "head_dim": 32}
    checkpoint = models.save_tiny("llama", tmp_path / "checkpoint", **changes)
    only = lambda name: "_proj." in name or "lm_head" in name  # noqa: E731
    written = made.write_checkpoint(checkpoint, tmp_path, form.config, form.writer, only)
    options = {"weight_only": True}
    one = compiled(written.quantized, tmp_path / "whole", 1, **options)
    cut = compiled(written.quantized, tmp_path / "cut", 4, **options)
    check_pieces(one, cut, 4)


@pytest.mark.slow
def test_experts_in_mxfp4(tmp_path) -> None:
    checkpoint = models.save_tiny("gpt_oss", tmp_path / "checkpoint", **WIDE)
    written = write_experts(checkpoint, tmp_path)
    one = compiled(written.quantized, tmp_path / "whole", 1)
    cut = compiled(written.quantized, tmp_path / "cut", 2)
    plan = check_pieces(one, cut, 2)
    assert [item.layout for item in plan.weights if item.layout] == ["mxfp4"] * 4


def test_groups_are_not_cut(tmp_path) -> None:
    """Of 96 columns in groups of 32, two ranks would have one and a half each."""
    checkpoint = models.save_tiny("llama", tmp_path / "checkpoint")
    with pytest.raises(ConfigError) as caught:
        compiled(checkpoint, tmp_path / "cut", 2, quantize="int4", quantize_group=32)
    assert caught.value.found == (
        "model.layers.0.mlp.down_proj.weight:int4-g32-zeros, 32 columns of which share a scale, and"
        " 2 ranks: rank 0 would have columns 0 … 47"
    )
    assert not (tmp_path / "cut").exists()


def test_columns_in_another_order(tmp_path) -> None:
    """Ranks have whole groups of columns that they share, and all of the others' in one order."""
    checkpoint = models.save_tiny("llama", tmp_path / "checkpoint", **WIDE)
    form = made.in_order(made.gptq(4, 32, False))
    written = made.write_checkpoint(checkpoint, tmp_path, form.config, form.writer)
    cut = compiled(written.quantized, tmp_path / "cut", 2)
    plan = check_pieces(compiled(written.quantized, tmp_path / "one", 1), cut, 2)
    program = json.loads((cut / "target" / "program.json").read_text())
    inputs = program["inputs"]
    orders = {x["key"] for x in inputs if x["kind"] == "constant" and COLUMN_ORDER in x["name"]}
    # before attention, its output, the block's two first projections, and its last one
    assert len(orders) == 4
    own = [load_file(cut / "target" / f"rank-{rank}.weights.safetensors") for rank in range(2)]
    for key in orders:
        assert torch.equal(own[0][key], own[1][key])
        assert own[0][key].sort().values.tolist() == [*range(len(own[0][key]))]
    # rows are exchanged before the two products of each layer that are summed
    layers = read_manifest(cut).models[0].layers
    sums = [(item.layer, item.bytes_per_token) for item in plan.collectives]
    rows, total = {"o": 64 * 4, "down": 128 * 4}, 64 * 4
    want = [(0, total)]
    for layer in range(1, len(layers) + 1):
        want += [(layer, rows["o"]), (layer, total), (layer, rows["down"]), (layer, total)]
    assert sums == want
    # and put in place by a choice: an infinite value times 0 would be NaN in the others' columns
    nodes = {x["name"]: x for x in program["graph"]["nodes"]}
    calls = [x for x in nodes.values() if "all_reduce" in x.get("target", "")]
    summed = [nodes[x["args"][0]["node"]] for x in calls]
    chosen = [x for x in summed if x["target"] == "aten.masked_fill.Scalar"]
    assert len(chosen) == 2 * len(layers)

    exact = AutoModelForCausalLM.from_pretrained(written.exact).eval()
    prompts = models.prompts()[-2:]
    with torch.inference_mode():
        logits = torch.cat([exact(torch.tensor([x])).logits[0] for x in prompts])
    assert_alike(logits_of_ranks(cut, 2, prompts), logits)


def logits_of_ranks(engine: Path, num_ranks: int, prompts: Sequence[Sequence[int]]) -> Tensor:
    """Of all tokens, [tokens, V]; ranks are threads."""
    data = json.loads((engine / "target" / "program.json").read_text())
    sizes = [x["shape"] for x in data["inputs"] if x["kind"] == "cache"]
    calls = []
    for rank in range(num_ranks):
        weights = load_file(engine / "target" / f"rank-{rank}.weights.safetensors")
        slabs = [torch.full((NUM_BLOCKS, BLOCK_SIZE, *size), 30.0) for size in sizes]
        caches = list(zip(slabs[::2], slabs[1::2], strict=True))
        calls.append(partial(ModelProgram(data, weights, caches), *prompt_inputs(prompts)))
    return torch.cat(ThreadRanks(num_ranks).run(calls), 1)
