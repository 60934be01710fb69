"""Checkpoints of drafts that read hidden states, as engines read them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PretrainedConfig

# of a layer, as transformers names them
_FIELDS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps",
    "vocab_size", "bos_token_id", "eos_token_id",
)  # fmt: skip
_WEIGHTS = "model.safetensors"


def save_draft(
    draft: nn.Module,
    layer: PretrainedConfig,
    config: Mapping[str, Any],
    directory: Path,
    others: Mapping[str, Tensor] | None = None,
) -> None:
    """Write config.json and model.safetensors, weights in bfloat16.

    Args:
        draft: trained.
        layer: of its layers.
        config: further fields of config.json.
        directory: is made where there is none.
        others: tensors beside the weights, as they are.
    """
    directory.mkdir(parents=True, exist_ok=True)
    fields = {
        **{key: getattr(layer, key) for key in _FIELDS},
        "rope_theta": layer.rope_parameters["rope_theta"],
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **config,
    }
    text = json.dumps(fields, indent=2) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")
    tensors = {
        key: value.detach().cpu().bfloat16().contiguous()
        for key, value in draft.state_dict().items()
    }
    file = directory / _WEIGHTS
    save_file(tensors | dict(others or {}), file, {"format": "pt"})
    # the library lets its owner alone read it
    file.chmod(0o644)


def round_weights(draft: nn.Module) -> None:
    """Leave what a checkpoint has of the weights."""
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.copy_(parameter.bfloat16())
