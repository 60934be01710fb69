"""Model types of configurations: names that transformers has not, and layers that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.errors import NotCausalLMError, UnsupportedAttentionError
from specc.passes.frontend import hf_model
from specc.passes.frontend.hf_tokenizer import HfTokenizer
from tests import models

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128,
    "num_key_value_heads": 4, "intermediate_size": 96, "head_dim": 16,
}  # fmt: skip


def write(directory: Path, fields: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


def test_a_class_that_transformers_has(tmp_path: Path) -> None:
    """Kimi-K2 is DeepSeek V3 by its class, and by a name that its own code knows."""
    wanted = models.tiny_config("deepseek_v3")
    own = wanted.to_dict() | {
        "model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    }  # fmt: skip
    found = hf_model.load_config(write(tmp_path, own))
    assert (type(found), found.model_type) == (type(wanted), "deepseek_v3")
    assert found.kv_lora_rank == wanted.kv_lora_rank
    module = hf_model.build_on_meta(found, torch.float32)
    assert type(module).__name__ == "DeepseekV3ForCausalLM"


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "my_own", "architectures": ["MyOwnForCausalLM"]},
        {"model_type": "my_own", "auto_map": {"AutoConfig": "configuration_my.MyConfig"}},
        {"architectures": ["MyOwnForCausalLM"], "auto_map": {"AutoConfig": "m.MyConfig"}},
    ],
)
def test_a_type_that_nobody_knows(tmp_path: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(NotCausalLMError) as caught:
        hf_model.load_config(write(tmp_path, SIZES | fields))
    assert f"the model type {fields.get('model_type')}" in caught.value.found
    assert "trust_remote_code" not in str(caught.value)
    assert "is not run" in caught.value.needed


@pytest.mark.parametrize(
    ("model_type", "found"),
    [
        ("jamba", "linear_attention: the selective scan of Mamba-1"),
        ("mamba", "linear_attention: the selective scan of Mamba-1"),
        ("falcon_mamba", "linear_attention: the selective scan of Mamba-1"),
        ("zamba", "linear_attention: the selective scan of Mamba-1"),
        ("recurrent_gemma", "linear_attention: RG-LRU"),
        ("minimax", "linear_attention: lightning attention"),
        ("rwkv", "no attention: WKV"),
        ("qwen4_exp_text", "indexed_attention"),
        ("deepseek_v32", "indexed_attention"),
        ("deepseek_v4", "heavily_compressed_attention"),
    ],
)
def test_layers_that_are_refused(tmp_path: Path, model_type: str, found: str) -> None:
    """At once: their tracing ends in minutes, with an error of torch."""
    with pytest.raises(UnsupportedAttentionError) as caught:
        hf_model.load_config(write(tmp_path, {"model_type": model_type}))
    assert f"{model_type} has layers of the kind {found}" in caught.value.found


@pytest.mark.parametrize(
    "name", [*models.ARCHITECTURES, *models.MORE_ARCHITECTURES, *models.HYBRIDS]
)
def test_architectures_that_are_compiled(tmp_path: Path, name: str) -> None:
    models.tiny_config(name).save_pretrained(tmp_path)
    assert hf_model.load_config(tmp_path).model_type


def test_prompts_whose_tokens_see_later_ones(tmp_path: Path) -> None:
    """Traced with text alone, the model is causal, and not what transformers generates with it."""
    with pytest.raises(NotCausalLMError, match="a prompt see the later ones"):
        hf_model.load_config(write(tmp_path, {"model_type": "paligemma"}))


def test_a_tokenizer_that_is_code(tmp_path: Path) -> None:
    """What transformers advises is an option that runs it."""
    own = {
        "tokenizer_class": "MyTokenizer",
        "auto_map": {"AutoTokenizer": ["my.MyTokenizer", None]},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    (tmp_path / "my.py").write_text("raise SystemExit('this is not run')")
    models.tiny_config("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="code of the checkpoint, which is not run") as caught:
        HfTokenizer.load(tmp_path)
    assert "trust_remote_code" not in str(caught.value)
