"""Checkpoints of gpt-oss with experts in mxfp4, as they are published."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.quantized_checkpoints import FILE, Written, set_config, write_mxfp4

_SKIPPED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]


def write_experts(source: Path, root: Path) -> Written:
    """Write a model's checkpoint with its experts in mxfp4, and beside it what they stand for.

    Args:
        source: directory of the model in float32, with experts [E, K, N].
        root: gets `quantized` and `exact`.
    """
    made = Written(root / "quantized", root / "exact")
    tensors = load_file(source / FILE)
    stored = dict(tensors)
    for name, value in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        # rows of outputs
        parts = [write_mxfp4(expert.t()) for expert in value]
        blocks = [codes.view(len(codes), -1, 16) for codes, _, _ in parts]
        del stored[name]
        stored[f"{name}_blocks"] = torch.stack(blocks)
        stored[f"{name}_scales"] = torch.stack([exponents for _, exponents, _ in parts])
        made.weights[name] = torch.stack([exact.t() for _, _, exact in parts]).contiguous()
    for path, content in ((made.quantized, stored), (made.exact, tensors | made.weights)):
        shutil.copytree(source, path)
        save_file(content, path / FILE, {"format": "pt"})
    config = {"quant_method": "mxfp4", "modules_to_not_convert": _SKIPPED}
    set_config(made.quantized, quantization_config=config)
    return made
