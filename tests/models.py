"""Tiny models of every supported architecture, with weights that let no part go unnoticed.

Freshly made Hugging Face models have zero biases, unit norms, and outputs that collapse to one
token; a wrong bias, norm or position would not show. `build_model` draws every parameter anew.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from tests import hybrids, more_models

VOCAB = 128
WINDOW = 16
POSITIONS = 256
MAX_SEQ_LEN = 128
# the last prompt is longer than a sliding window and than two blocks of 16
PROMPT_LENS = (1, 7, 16, 33, 40)
NUM_TOKENS = 64

_COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
}
_IDS = {"vocab_size": VOCAB, "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
_ROPE = {"rope_theta": 10000.0, "factor": 4.0}
_LONG_ROPE = _ROPE | {"original_max_position_embeddings": POSITIONS // 4}


def _without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in _COMMON.items() if key not in keys}


_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16}
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _COMMON),
    "mistral": ("MistralConfig", _COMMON | {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2Config", _COMMON),
    "qwen3": ("Qwen3Config", _COMMON | {"head_dim": 16}),
    "gemma3": (
        "Gemma3TextConfig",
        _COMMON
        | {"num_hidden_layers": 3, "head_dim": 16, "sliding_window": WINDOW}
        # a scaled embedding that is also the head repeats the last token forever
        | {"tie_word_embeddings": False}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "phi": ("PhiConfig", _COMMON | {"num_key_value_heads": 4}),
    "phi3": ("Phi3Config", _COMMON),
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS}),
    "opt": (
        "OPTConfig",
        _without("intermediate_size", "num_key_value_heads")
        | {"ffn_dim": 96, "word_embed_proj_dim": 64},
    ),
    "gpt_neox": ("GPTNeoXConfig", _without("num_key_value_heads")),
    "mixtral": ("MixtralConfig", _COMMON | {"num_local_experts": 4}),
    "qwen3_moe": ("Qwen3MoeConfig", _COMMON | _MOE),
    "llama-llama3": (
        "LlamaConfig",
        _COMMON
        | {
            "rope_parameters": _LONG_ROPE
            | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        },
    ),
    "llama-linear": (
        "LlamaConfig",
        _COMMON | {"rope_parameters": _ROPE | {"rope_type": "linear"}},
    ),
    "llama-yarn": (
        "LlamaConfig",
        _COMMON | {"rope_parameters": _LONG_ROPE | {"rope_type": "yarn"}},
    ),
}
_CONFIGS["gemma3-tied"] = (
    "Gemma3TextConfig",
    _CONFIGS["gemma3"][1] | {"tie_word_embeddings": True},
)
ARCHITECTURES = tuple(name for name in _CONFIGS if "-" not in name)
MORE_ARCHITECTURES = tuple(more_models.CONFIGS)
_CONFIGS |= more_models.CONFIGS
HYBRIDS = tuple(hybrids.CONFIGS)
_CONFIGS |= hybrids.CONFIGS
ROTARY_VARIANTS = ("llama-llama3", "llama-linear", "llama-yarn")

# noise on the weights of a draft, relative to each weight's own spread, with which the target
# accepts some proposals and rejects others
DRAFT_NOISE = {
    "llama": 0.05,
    "mistral": 0.04,
    "qwen2": 0.04,
    "qwen3": 0.07,
    "gemma3": 0.1,
    "phi": 0.12,
    "phi3": 0.05,
    "gpt2": 0.06,
    "opt": 0.15,
    "gpt_neox": 0.1,
    "mixtral": 0.03,
    "qwen3_moe": 0.05,
    "llama-llama3": 0.04,
    "llama-linear": 0.04,
    "llama-yarn": 0.05,
    "gemma3-tied": 0.1,
}


def draft_noise(name: str) -> float:
    """Noise on the weights of a draft, as of DRAFT_NOISE."""
    return DRAFT_NOISE[name] if name in DRAFT_NOISE else more_models.DRAFT_NOISE.get(name, 0.05)


def tiny_config(name: str, **changes: Any) -> Any:
    """The Hugging Face configuration of a tiny model; `changes` replace its fields."""
    import transformers

    kind, fields = _CONFIGS[name]
    return getattr(transformers, kind)(**{**_IDS, **copy.deepcopy(fields), **changes})


def build_model(name: str, seed: int = 0, noise: float = 0.0, **changes: Any) -> Any:
    """A model in float32 whose parameters are all drawn from the seed, and then disturbed."""
    model = _auto_class(name).from_config(tiny_config(name, **changes), dtype=torch.float32)
    generator = torch.Generator().manual_seed(1000 + seed)
    other = torch.Generator().manual_seed(2000 + seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            spread, center = _spread_of(name)(name, key, parameter)
            parameter.fill_(center)
            parameter += spread * torch.randn(parameter.shape, generator=generator)
            parameter += noise * spread * torch.randn(parameter.shape, generator=other)
        if name in more_models.CONFIGS or name in HYBRIDS:
            more_models.draw_buffers(model, generator)
    return model.eval()


def read_model(name: str, directory: Path, dtype: torch.dtype) -> Any:
    """Transformers' model of a checkpoint of one of these."""
    return _auto_class(name).from_pretrained(directory, dtype=dtype).eval()


def _auto_class(name: str) -> Any:
    """The class of transformers that knows these; some are among models that take images, too."""
    import transformers

    kind = type(tiny_config(name))
    is_known = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(kind, None) is not None
    return (
        transformers.AutoModelForCausalLM if is_known else transformers.AutoModelForImageTextToText
    )


def _spread_of(name: str) -> Callable[[str, str, Tensor], tuple[float, float]]:
    if name in HYBRIDS:
        return hybrids.spread
    return _spread if name in DRAFT_NOISE else more_models.spread


def _spread(name: str, key: str, parameter: Tensor) -> tuple[float, float]:
    """Standard deviation and mean of a parameter's values."""
    if "bias" in key:
        return 0.1, 0.0
    if parameter.ndim == 1:
        # Gemma multiplies with 1 + weight
        return 0.3, 0.0 if name.startswith("gemma3") else 1.0
    if any(part in key for part in ("embed", "wte", "wpe")):
        return 0.1, 0.0
    return 0.2, 0.0


def byte_tokenizer() -> Tokenizer:
    """One token a byte, for the first 128 letters of the byte-level alphabet."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:VOCAB]
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def save_tiny(
    name: str, directory: Path, seed: int = 0, noise: float = 0.0, **changes: Any
) -> Path:
    """Write a tiny checkpoint with its tokenizer, as `save_pretrained` would."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model = build_model(name, seed, noise, **changes)
    if noise and name in HYBRIDS:
        # one that keeps no states; `test_hybrid_architectures.py` has others
        model = hybrids.draft_of(build_model(name, seed, **changes))
    model.save_pretrained(directory)
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


def prompts(seed: int = 5) -> list[list[int]]:
    """Five prompts of unequal lengths, one of a single token."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in PROMPT_LENS]
