"""Random checkpoints of draft heads, in the layouts in which they are published.

A case names what differs; `write_head` writes config.json and model.safetensors as the trainer of
that layout would, with norms and biases that let no part go unnoticed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

# of the target
WIDTH, LAYERS, VOCAB = 32, 8, 96
HEADS, KV_HEADS, INNER = 4, 2, 40


@dataclass(frozen=True)
class Case:
    """A head to write.

    Args:
        layout: `SafeAILab`, `speculators`, `DeepSpec` or `NVIDIA`.
        width: d.
        rows: Vd.
        vocab: V.
        boundaries: that its taps are, in order.
        config: keys at the top of config.json, flags among them.
        biases: projections of the first layer that have one; `fc`, too.
    """

    layout: str
    width: int = WIDTH
    rows: int = 60
    vocab: int = VOCAB
    boundaries: tuple[int, ...] = (2, 4, 5)
    config: dict[str, Any] = field(default_factory=dict)
    layer: dict[str, Any] = field(default_factory=dict)
    num_layers: int = 1
    model_type: str = "llama"
    biases: tuple[str, ...] = ()

    @property
    def head_dim(self) -> int:
        return self.layer.get("head_dim", self.width // HEADS)

    @property
    def has_qk_norm(self) -> bool:
        return self.layout in ("speculators", "DeepSpec") and self.model_type == "qwen3"


_FLAGS_31 = {"norm_before_residual": True, "norm_output": True}
_SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4}
_TARGET_WIDTH = {"target_hidden_size": WIDTH}
CASES = {
    "safeailab": Case("SafeAILab"),
    "safeailab-narrow": Case("SafeAILab", width=24, config=_TARGET_WIDTH, biases=("fc",)),
    "speculators": Case("speculators", config={"norm_before_residual": False}),
    "speculators-before-fc": Case(
        "speculators",
        width=24,
        config={"norm_before_residual": True, "norm_before_fc": True, **_TARGET_WIDTH},
        layer={"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        model_type="qwen3",
    ),
    "speculators-3.1": Case(
        "speculators", config={**_FLAGS_31, "fc_norm": True}, layer={"rope_theta": 500.0},
        num_layers=2,
    ),
    "speculators-sliding": Case(
        "speculators",
        rows=VOCAB,
        boundaries=(2, 4, 7),
        config={**_FLAGS_31, "eagle_aux_hidden_state_layer_ids": [1, 3, 6]},
        layer={**_SLIDING, "head_dim": 16},
        num_layers=2,
        model_type="qwen3",
    ),
    "deepspec": Case(
        "DeepSpec",
        rows=VOCAB,
        boundaries=(2, 4, 5, 6, 7),
        config={"target_layer_ids": [1, 3, 4, 5, 6], "num_target_layers": LAYERS},
        model_type="qwen3",
    ),
    "nvidia": Case(
        "NVIDIA",
        boundaries=(3, 1, 6, 7),
        config={
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": [3, 1, 6, 7],
            }
        },
        layer={"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
        biases=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ),
}  # fmt: skip


def write_head(directory: Path, case: Case, seed: int = 0) -> dict[str, Tensor]:
    """Write a head; returns its tensors."""
    return write_files(directory, config_of(case), draw_tensors(case, seed))


def write_files(
    directory: Path, config: dict[str, Any], tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Write a checkpoint; returns its tensors."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, str(directory / "model.safetensors"))
    return tensors


def layer_config(case: Any, model_type: str) -> dict[str, Any]:
    """What config.json says of the layers of a head or of a block drafter."""
    return {
        "model_type": model_type,
        "hidden_size": case.width,
        "intermediate_size": INNER,
        "num_hidden_layers": case.num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": case.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000.0,
        "vocab_size": case.vocab,
        **case.layer,
    }


def config_of(case: Case) -> dict[str, Any]:
    """Contents of config.json."""
    layer = layer_config(case, case.model_type)
    if case.layout == "speculators":
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": case.rows,
            "transformer_layer_config": layer,
            "speculators_config": {"algorithm": "eagle3"},
            **case.config,
        }
    names = {
        "SafeAILab": "LlamaForCausalLM",
        "DeepSpec": "Qwen3Eagle3Model",
        "NVIDIA": "LlamaForCausalLMEagle3",
    }
    found = {"architectures": [names[case.layout]], **layer, **case.config}
    return found if case.layout == "DeepSpec" else {**found, "draft_vocab_size": case.rows}


def draw_tensors(case: Case, seed: int = 0) -> dict[str, Tensor]:
    """Tensors of the checkpoint, drawn from the seed."""
    shapes = {"fc.weight": (case.width, len(case.boundaries) * WIDTH), "norm.weight": (case.width,)}
    if case.config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (len(case.boundaries) * WIDTH,)
    if case.config.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (WIDTH,) for i in range(len(case.boundaries))}
    for i in range(case.num_layers):
        first = "midlayer" if case.layout == "SafeAILab" else "layers.0"
        name = first if i == 0 else f"layers.{i}"
        shapes |= {f"{name}.{key}": shape for key, shape in _layer_shapes(case, i == 0).items()}
    for key in case.biases:
        weight = next(shape for item, shape in shapes.items() if f"{key}.weight" in item)
        prefix = "" if key == "fc" else ("midlayer." if case.layout == "SafeAILab" else "layers.0.")
        shapes[f"{prefix}{key}.bias"] = weight[:1]
    if case.layout in ("speculators", "DeepSpec") or case.width != WIDTH:
        shapes["embed_tokens.weight"] = (case.vocab, case.width)
    shapes["lm_head.weight"] = (case.rows, case.width)
    generator = torch.Generator().manual_seed(40 + seed)
    tensors = {
        key: _draw(key, shape, torch.randn(shape, generator=generator))
        for key, shape in shapes.items()
    }
    if case.rows < case.vocab:
        kept = torch.randperm(case.vocab, generator=generator)[: case.rows].sort().values
        tensors["d2t"] = kept - torch.arange(case.rows)
        tensors["t2d"] = torch.zeros(case.vocab, dtype=torch.bool).index_fill(0, kept, True)
    return tensors


def _draw(key: str, shape: tuple[int, ...], values: Tensor) -> Tensor:
    if len(shape) == 1 and "norm" in key:
        return 1.0 + 0.4 * values
    return values * (0.2 if "bias" in key else 0.25)


def _layer_shapes(case: Case, is_first: bool) -> dict[str, tuple[int, ...]]:
    d, size = case.width, case.head_dim
    read = 2 * d if is_first else d
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (d,),
        "self_attn.q_proj.weight": (HEADS * size, read),
        "self_attn.k_proj.weight": (KV_HEADS * size, read),
        "self_attn.v_proj.weight": (KV_HEADS * size, read),
        "self_attn.o_proj.weight": (d, HEADS * size),
        "post_attention_layernorm.weight": (d,),
        "mlp.gate_proj.weight": (INNER, d),
        "mlp.up_proj.weight": (INNER, d),
        "mlp.down_proj.weight": (d, INNER),
    }
    if is_first:
        shapes["hidden_norm.weight"] = (d,)
    if case.has_qk_norm:
        shapes |= {"self_attn.q_norm.weight": (size,), "self_attn.k_norm.weight": (size,)}
    return shapes
