"""Shapes of published models, by name: what a benchmark with random weights is made of.

Figures are those of each model's public config.json. Weights are never looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specc.close_name import advice
from specc.errors import ConfigError, VocabMismatchError


def _llama(hidden: int, intermediate: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    rotary = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": more.pop("head_dim", 128),
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": rotary | {"factor": more.pop("factor", 8.0)},
        "tie_word_embeddings": False,
        **more,
    }


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": False,
        **more,
    }


def _qwen3_moe(hidden: int, intermediate: int, layers: int, heads: int, **more: Any) -> dict:
    """128 experts in each layer, of which a token has 8, with weights that add up to one."""
    fields = {
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return _qwen3(hidden, intermediate, layers, heads, **fields, **more)


def _qwen35(hidden: int, intermediate: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    """Gated delta rules in three of four layers."""
    rotary = {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25}
    fields = {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "max_position_embeddings": 262144,
        "rope_parameters": rotary,
    }
    return _qwen3(hidden, intermediate, layers, heads, **fields, **more)


_TIED = {"tie_word_embeddings": True}
# attention over latents, and one dense layer before mixtures with experts that all tokens share
_DEEPSEEK_V2_LITE = {
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
    },
    "tie_word_embeddings": False,
}
# name → fields of the configuration
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _llama(4096, 14336, 32, 32),
    "llama-3.1-70b": _llama(8192, 28672, 80, 64),
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, head_dim=64, factor=32.0, **_TIED),
    "llama-3.2-3b": _llama(3072, 8192, 28, 24, factor=32.0, **_TIED),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, **_TIED),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, **_TIED),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, **_TIED),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64),
    "qwen3-30b-a3b": _qwen3_moe(2048, 6144, 48, 32, moe_intermediate_size=768),
    "deepseek-v2-lite": _DEEPSEEK_V2_LITE,
    "qwen3.5-9b": _qwen35(4096, 12288, 32, 16, linear_num_value_heads=32),
    "qwen3.5-27b": _qwen35(5120, 17408, 64, 24, linear_num_value_heads=48),
    # no published model: layers of qwen3-0.6b with the vocabulary of Qwen3.5, as a draft of these
    "qwen3-0.6b-248k": _qwen3(1024, 3072, 28, 16, vocab_size=248320, **_TIED),
}


@dataclass(frozen=True)
class Shape:
    """A model's geometry.

    Args:
        label: what the user called it: a name of the table, or a directory.
        fields: of the configuration, where it is one of the table.
        directory: that holds config.json; None for a shape of the table.
    """

    label: str
    fields: dict[str, Any] | None = None
    directory: Path | None = None

    def make_config(self) -> Any:
        """A fresh configuration of transformers, of a shape of the table."""
        from transformers import AutoConfig

        assert self.fields is not None, "the compiler reads directories"
        return AutoConfig.for_model(**self.fields)


def parse_shapes(text: str) -> tuple[Shape, Shape | None]:
    """A target, and its draft: `llama-3.1-8b/llama-3.2-1b`, or directories with a comma between.

    Raises:
        ConfigError: neither a name of the table nor a directory with config.json.
    """
    if "," in text:
        target, draft = text.split(",", 1)
        return _find(target, text), _find(draft, text)
    name, slash, rest = text.partition("/")
    if slash and name in SHAPES:
        return _find(name, text), _find(rest, text)
    return _find(text, text), None


def check_vocabularies(target: Any, draft: Any, shapes: tuple[Shape, Shape]) -> None:
    """Raises VocabMismatchError: the configurations have vocabularies of different sizes."""
    if target.vocab_size != draft.vocab_size:
        names = [shape.label for shape in shapes]
        same = [n for n, f in SHAPES.items() if f["vocab_size"] == target.vocab_size]
        raise VocabMismatchError(
            f"{names[0]} has {target.vocab_size} tokens, {names[1]} has {draft.vocab_size}",
            "a draft with the target's vocabulary",
            f"choose a draft of {', '.join(same)}" if same else "choose another draft",
        )


def _find(text: str, option: str) -> Shape:
    name = text.strip()
    if name in SHAPES:
        return Shape(name, fields=dict(SHAPES[name]))
    if name and (Path(name) / "config.json").is_file():
        return Shape(name, directory=Path(name))
    raise ConfigError(
        f"--synthetic {option}: {name or 'an empty name'} is no known shape, and no directory"
        " with a config.json",
        f"one of {', '.join(SHAPES)}, or such a directory",
        advice(
            name,
            SHAPES,
            "for example --synthetic llama-3.1-8b/llama-3.2-1b; put a comma between directories:"
            " --synthetic TARGET,DRAFT",
        ),
    )
