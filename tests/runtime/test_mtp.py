"""Engines whose draft is the MTP module of their target."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from specc.compiler.build import build
from specc.errors import HeadError
from specc.runtime.core import EngineCore
from tests import quantized_checkpoints
from tests.lossless import Zoo
from tests.mtp import LAYERS, MtpReference, change_tensors, write_target
from tests.runtime.head_rig import BLOCK, TREE, HeadOracle, load, options, prompts_of, serve


@pytest.mark.slow
def test_targets_with_quantized_weights(zoo: Zoo, tmp_path: Path) -> None:
    """The module is quantized as its target is; the reference has what the weights stand for."""
    from transformers import AutoModelForCausalLM

    form = quantized_checkpoints.float8_blocks(32)
    source = zoo.once("mtp-glm4_moe", lambda path: write_target("glm4_moe", path))
    written = quantized_checkpoints.write_checkpoint(source, tmp_path, form.config, form.writer)
    assert any(f"layers.{LAYERS}." in name for name in written.weights)
    given = options(plans=(TREE,), weight_only=True)
    build(written.quantized, "mtp", tmp_path / "engine", given)
    core = EngineCore(load(tmp_path / "engine"), TREE.name)
    exact = AutoModelForCausalLM.from_pretrained(written.exact, dtype=torch.float32).eval()
    oracle = HeadOracle(exact, MtpReference(exact, "glm4_moe"))
    oracle.watch(core)
    serve(core, oracle, prompts_of(BLOCK), num_tokens=8, temperature=1.5)
    assert oracle.num_nodes > 60
    manifest = core.engine.manifest
    assert manifest is not None
    assert manifest.models[1].quantization == manifest.models[0].quantization != ""


def test_targets_without_a_module(zoo: Zoo, tmp_path: Path) -> None:
    target = write_target("glm4_moe", tmp_path / "target")
    change_tensors(target, lambda own: {k: v for k, v in own.items() if "layers.2." not in k})
    with pytest.raises(HeadError, match="draft 0: --draft mtp, and no MTP module"):
        build(target, "mtp", tmp_path / "e", options(plans=()))
    with pytest.raises(HeadError, match="a target that is a module"):
        build(nn.Linear(2, 2), "mtp", tmp_path / "e", options(plans=()))
    assert not (tmp_path / "e").exists()
