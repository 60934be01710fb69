"""Heads of drafts that read a target's hidden states, by name: files as published, without weights.

What they are made of follows from the target's shape, as that of published ones does:

- `eagle3`: one layer of the target's sizes that reads a token and a feature side by side, `fc` over
  three hidden states, and a vocabulary head of 32000 of the target's ids. So is SafeAILab's for
  Llama 3.1 8B, and so are heads of others for Qwen3.
- `dflash`: five layers of the target's sizes, which fill a block of 16 tokens (of Llama, 10) from
  five hidden states; embedding and vocabulary head are the target's. So are those of z-lab for
  Qwen3 4B and 8B and for Llama 3.1 8B, of which the size of a block is what users of it say.
- `dspark`: as `dflash`, with embedding and vocabulary head of its own, a block of 7 tokens, a table
  and a matrix of rank 256 that make logits depend on the token before, and a head that estimates
  acceptance. So are those of DeepSeek for Qwen3 4B, 8B and 14B, and for no Llama.
- `medusa`: three heads of one layer, each with a vocabulary head of its own, which read the last
  hidden state after its norm. So are NVIDIA's for Llama 3.1 8B, before they are quantized.

Which ids a head has rows for says nothing about its speed: they are spread evenly.
Sources: SafeAILab/EAGLE eagle/traineagle3/config.json; sgl-project/SpecForge configs/
qwen3-8b-dflash.json and *-eagle3.json; z-lab/dflash dflash/model.py, for the layers that are read;
deepseek-ai/DeepSpec config/dspark and deepspec/modeling/dspark;
for Medusa an example of NVIDIA's for nvidia/Llama-3.1-8B-Medusa-FP8, which names three heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specc.artifact.in_memory import HeadShape
from specc.errors import ConfigError

# ids that heads of EAGLE-3 have rows for, and the least share of a vocabulary that is left out
_KEPT, _PART = 32000, 4
_EAGLE_TAPS = 3
_BLOCK_LAYERS = 5
_MEDUSA_HEADS = 3
# of DSpark: tokens of a block, and columns of what the token before adds
_SPARK_BLOCK, _SPARK_RANK = 7, 256
# of targets in which no two of the layers that a head reads are the same
_LEAST_LAYERS = {"eagle3": 7, "dflash": 8, "dspark": 8, "medusa": 1}
# model type of the target → tokens of a block, and the id that stands for those not yet known
_BLOCKS = {"qwen3": (16, 151669), "llama": (10, 128002)}
# of a layer, as configurations of transformers call them
_SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "max_position_embeddings", "rms_norm_eps", "vocab_size",
)  # fmt: skip

Shapes = dict[str, tuple[int, ...]]


def make_head(name: str, label: str, target: Any) -> HeadShape:
    """The head of this name for a target.

    Args:
        name: one of `HEADS`.
        target: its configuration, of transformers.
    Raises:
        ConfigError: the target is of another kind than those that such heads are published for, or
            has too few layers to read.
    """
    kinds = ["qwen3"] if name == "dspark" else sorted(_BLOCKS)
    if target.model_type not in kinds:
        raise ConfigError(
            f"--draft {name}, and {label}, a model of type {target.model_type}",
            f"a target of the shape of {' or '.join(kinds)}, which such heads are published for",
            "choose another target, or name the shape of a draft: --synthetic TARGET/DRAFT",
        )
    config, shapes, maps = HEADS[name](target)
    if target.num_hidden_layers < (least := _LEAST_LAYERS[name]):
        raise ConfigError(
            f"--draft {name}, and {label}, a target of {target.num_hidden_layers} layers",
            f"hidden states of different layers, which a target of {least} layers or more has",
            "choose a deeper target",
        )
    tensors = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
    return HeadShape(name, config, tensors | maps)


def _block_ids(num_layers: int) -> list[int]:
    """Layers that a block drafter reads, of a target of so many."""
    last = num_layers - 3
    return [round(1 + i * (last - 1) / (_BLOCK_LAYERS - 1)) for i in range(_BLOCK_LAYERS)]


def _eagle3(target: Any) -> tuple[dict[str, Any], Shapes, dict[str, Tensor]]:
    """Configuration, shapes of floating-point tensors, and maps of ids; files of SafeAILab."""
    width, vocab_size = target.hidden_size, target.vocab_size
    num_rows = min(_KEPT, vocab_size // _PART)
    config = _layers_of(target, 1) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "draft_vocab_size": num_rows,
    }
    shapes: Shapes = {
        "fc.weight": (width, _EAGLE_TAPS * width),
        "norm.weight": (width,),
        "midlayer.hidden_norm.weight": (width,),
        "lm_head.weight": (num_rows, width),
    }
    shapes |= {f"midlayer.{key}": shape for key, shape in _layer(target, 2 * width).items()}
    rows = torch.arange(num_rows)
    ids = rows * vocab_size // num_rows
    kept = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    return config, shapes, {"d2t": ids - rows, "t2d": kept}


def _dflash(target: Any) -> tuple[dict[str, Any], Shapes, dict[str, Tensor]]:
    """The same, in files of z-lab."""
    width, size = target.hidden_size, target.head_dim
    block_size, mask = _BLOCKS[target.model_type]
    config = _layers_of(target, _BLOCK_LAYERS) | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": block_size,
        "num_target_layers": target.num_hidden_layers,
        "dflash_config": {
            "mask_token_id": min(mask, target.vocab_size - 1),
            "target_layer_ids": _block_ids(target.num_hidden_layers),
        },
    }
    shapes: Shapes = {
        "fc.weight": (width, _BLOCK_LAYERS * width),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }
    own = _layer(target, width)
    own |= {"self_attn.q_norm.weight": (size,), "self_attn.k_norm.weight": (size,)}
    for layer in range(_BLOCK_LAYERS):
        shapes |= {f"layers.{layer}.{key}": shape for key, shape in own.items()}
    return config, shapes, {}


def _dspark(target: Any) -> tuple[dict[str, Any], Shapes, dict[str, Tensor]]:
    """The same, in files of DeepSpec."""
    config, shapes, _ = _dflash(target)
    nested, width = config.pop("dflash_config"), target.hidden_size
    config |= nested | {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": _SPARK_BLOCK,
        "markov_rank": _SPARK_RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    for key in ("embed_tokens", "lm_head"):
        shapes[f"{key}.weight"] = (target.vocab_size, width)
    for key in ("markov_w1", "markov_w2"):
        shapes[f"markov_head.{key}.weight"] = (target.vocab_size, _SPARK_RANK)
    shapes["confidence_head.proj.weight"] = (1, width + _SPARK_RANK)
    shapes["confidence_head.proj.bias"] = (1,)
    return config, shapes, {}


def _medusa(target: Any) -> tuple[dict[str, Any], Shapes, dict[str, Tensor]]:
    """The same, in files of vLLM."""
    width, vocab_size = target.hidden_size, target.vocab_size
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": width,
        "vocab_size": vocab_size,
        "num_heads": _MEDUSA_HEADS,
        "num_hidden_layers": 1,
        "medusa_fc_bias": True,
    }
    shapes: Shapes = {}
    for head in range(_MEDUSA_HEADS):
        shapes[f"blocks.{head}.layers.0.weight"] = (width, width)
        shapes[f"blocks.{head}.layers.0.bias"] = (width,)
        shapes[f"lm_heads.{head}.weight"] = (vocab_size, width)
    return config, shapes, {}


# name → what makes its files for a target
HEADS: dict[str, Callable[[Any], tuple[dict[str, Any], Shapes, dict[str, Tensor]]]] = {
    "eagle3": _eagle3,
    "dflash": _dflash,
    "dspark": _dspark,
    "medusa": _medusa,
}


def _layers_of(target: Any, count: int) -> dict[str, Any]:
    """What a configuration says of layers as wide as the target's."""
    sizes = {key: getattr(target, key) for key in _SIZES}
    theta = target.rope_parameters["rope_theta"]
    return sizes | {"num_hidden_layers": count, "rope_theta": theta}


def _layer(target: Any, columns: int) -> Shapes:
    """Tensors of a layer whose attention reads so many columns."""
    width, inner, size = target.hidden_size, target.intermediate_size, target.head_dim
    queries = target.num_attention_heads * size
    keys = target.num_key_value_heads * size
    return {
        "self_attn.q_proj.weight": (queries, columns),
        "self_attn.k_proj.weight": (keys, columns),
        "self_attn.v_proj.weight": (keys, columns),
        "self_attn.o_proj.weight": (width, queries),
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
