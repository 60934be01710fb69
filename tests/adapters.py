"""Adapters in PEFT's files, and what a target with one merged into its weights computes.

The dense reference shares nothing with specc: it reads the files itself, and adds scale · B · A to
the weights of a transformers model.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

# as peft 0.18 writes it, without values
PEFT_CONFIG: dict[str, Any] = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "auto_mapping": None,
    "base_model_name_or_path": "tiny",
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 16,
    "lora_bias": False,
    "lora_dropout": 0.05,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "peft_type": "LORA",
    "peft_version": "0.18.0",
    "qalora_group_size": 16,
    "r": 4,
    "rank_pattern": {},
    "revision": None,
    "target_modules": [],
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
_PREFIX = "base_model.model."


def save_adapter(
    path: Path,
    model: torch.nn.Module,
    modules: Sequence[str] = ALL,
    rank: int = 4,
    seed: int = 0,
    ranks: Mapping[str, int] | None = None,
    spread: float = 0.3,
    layers: Sequence[int] = (),
    is_turned: bool = False,
    **config: Any,
) -> Path:
    """Write a random adapter of a model's projections.

    Args:
        modules: last names of projections.
        ranks: pattern → rank, of `rank_pattern`.
        spread: of the entries of A and B.
        layers: numbers of layers; () is all.
        is_turned: weights are [inputs, outputs], as GPT-2 has them.
        config: other values of adapter_config.json.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        parts = name.split(".")
        if parts[-1] not in modules or (layers and int(re.search(r"\d+", name)[0]) not in layers):  # type: ignore[index]
            continue
        own = next((r for p, r in (ranks or {}).items() if re.match(rf"(.*\.)?({p})$", name)), rank)
        outputs, inputs = module.weight.shape[::-1] if is_turned else module.weight.shape  # type: ignore[union-attr, misc]
        for half, shape in (("A", (own, inputs)), ("B", (outputs, own))):
            values = spread * torch.randn(shape, generator=generator)
            tensors[f"{_PREFIX}{name}.lora_{half}.weight"] = values
    assert tensors, f"no {modules}"
    path.mkdir(parents=True)
    save_file(tensors, path / "adapter_model.safetensors", {"format": "pt"})
    told = {"target_modules": [*modules], "r": rank, "rank_pattern": dict(ranks or {})}
    data = {**PEFT_CONFIG, **told, **config}
    (path / "adapter_config.json").write_text(json.dumps(data), encoding="utf-8")
    return path


@torch.no_grad()
def merged(model: Any, path: Path, is_turned: bool = False) -> Any:
    """A copy of a model with an adapter in its weights, added in float64."""
    made = copy.deepcopy(model)
    config = json.loads((path / "adapter_config.json").read_text("utf-8"))
    tensors = load_file(path / "adapter_model.safetensors")
    modules = dict(made.named_modules())
    for key, down in tensors.items():
        name, _, half = key.removeprefix(_PREFIX).partition(".lora_A")
        if not half:
            continue
        up = tensors[key.replace(".lora_A.", ".lora_B.")].double()
        alpha = next(
            (a for p, a in config["alpha_pattern"].items() if re.match(rf"(.*\.)?({p})$", name)),
            config["lora_alpha"],
        )
        rank = len(down)
        scale = alpha / (math.sqrt(rank) if config["use_rslora"] else rank)
        delta = scale * (up @ down.double())
        weight = modules[name].weight
        weight.copy_((weight.double() + (delta.T if is_turned else delta)).to(weight.dtype))
    return made


@contextlib.contextmanager
def adapted(model: Any, adapters: dict[int, Path], rows: Tensor) -> Iterator[None]:
    """Let projections of a model add the term of each row's adapter, -1 for none."""
    handles = []
    modules = dict(model.named_modules())
    for number, path in adapters.items():
        config = json.loads((path / "adapter_config.json").read_text("utf-8"))
        tensors = load_file(path / "adapter_model.safetensors")
        for key, down in tensors.items():
            name, found, _ = key.removeprefix(_PREFIX).partition(".lora_A")
            if not found:
                continue
            up, scale = tensors[key.replace("lora_A", "lora_B")], config["lora_alpha"] / len(down)

            def add(_: Any, x: Any, out: Tensor, own: Any = (number, scale, down, up)) -> Tensor:
                number, scale, down, up = own
                term = scale * (x[0] @ down.T) @ up.T
                return out + (rows == number)[None, :, None] * term

            handles.append(modules[name].register_forward_hook(add))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
