"""Adapters as PEFT writes them are read; what is more than low-rank terms is refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specc.errors import ConfigError, SpeccError, WeightError
from specc.lora.peft_files import LoraFiles, names_of, parse_adapters
from tests.adapters import save_adapter

MODULE = "model.layers.1.self_attn.q_proj"
KEY = f"base_model.model.{MODULE}.lora"


class Projections(torch.nn.Module):
    """Two layers, as Llama names them."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(2))
        for layer in self.model.layers:
            layer.self_attn, layer.mlp = torch.nn.Module(), torch.nn.Module()
            layer.self_attn.q_proj = torch.nn.Linear(6, 10, bias=False)
            layer.mlp.up_proj = torch.nn.Linear(6, 12, bias=False)


def write(path: Path, **config: Any) -> Path:
    return save_adapter(path / "a", Projections(), ("q_proj", "up_proj"), **config)


def change(path: Path, **tensors: torch.Tensor | None) -> None:
    """Put other tensors into an adapter's file; None takes one out."""
    file = path / "adapter_model.safetensors"
    found: dict[str, torch.Tensor | None] = {**load_file(file), **tensors}
    save_file({k: v for k, v in found.items() if v is not None}, file, {"format": "pt"})


def test_terms_and_scales(tmp_path):
    path = write(tmp_path, rank=4, lora_alpha=6)
    files = LoraFiles.open("a", path)
    assert len(files.pairs) == 4
    pair = files.pairs[MODULE]
    assert pair[3:] == (4, 6, 10, 1.5)
    down, up = files.read(pair, torch.float32)
    tensors = load_file(path / "adapter_model.safetensors")
    assert torch.equal(down, tensors[f"{KEY}_A.weight"])
    assert torch.equal(up, tensors[f"{KEY}_B.weight"].T)


def test_scales_by_the_root_of_the_rank(tmp_path):
    files = LoraFiles.open("a", write(tmp_path, rank=4, lora_alpha=6, use_rslora=True))
    assert files.pairs[MODULE].scale == 6 / math.sqrt(4)


def test_patterns(tmp_path):
    """A pattern is the end of a name, after a dot; the first that fits counts."""
    path = write(
        tmp_path,
        rank=4,
        ranks={r"layers\.1\.self_attn\.q_proj": 2, "q_proj": 3},
        alpha_pattern={"up_proj": 8, "proj": 100},
        lora_alpha=6,
    )
    files = LoraFiles.open("a", path)
    found = {name: (pair.rank, pair.scale) for name, pair in files.pairs.items()}
    assert found == {
        "model.layers.0.self_attn.q_proj": (3, 2.0),
        MODULE: (2, 3.0),
        "model.layers.0.mlp.up_proj": (4, 2.0),
        "model.layers.1.mlp.up_proj": (4, 2.0),
    }
    assert files.rank == 4


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"peft_type": "LOHA"}, "LOHA"),
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "lora_only"}, "lora_only"),
        ({"lora_bias": True}, "lora_bias"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"init_lora_weights": "loftq"}, "loftq"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"alora_invocation_tokens": [1]}, "aLoRA"),
        ({"use_monteclora": {"n": 4}}, "use_monteclora"),
        ({"lora_alpha": "16"}, "lora_alpha"),
        ({"lora_alpha": True}, "lora_alpha"),
        ({"alpha_pattern": {"(": 3}}, "alpha_pattern"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_is_more_is_refused(tmp_path, config, found):
    path = write(tmp_path)
    file = path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | config), encoding="utf-8")
    with pytest.raises(ConfigError, match=found):
        LoraFiles.open("a", path)


@pytest.mark.parametrize("config", [{"a_later_key": None}, {"a_later_key": False}])
def test_keys_that_are_off(tmp_path, config):
    assert LoraFiles.open("a", write(tmp_path, **config)).pairs


@pytest.mark.parametrize(
    ("tensors", "kind"),
    [
        ({f"{KEY}_magnitude_vector": torch.ones(10)}, ConfigError),
        ({"base_model.model.lm_head.weight": torch.ones(3, 2)}, ConfigError),
        ({"base_model.model.model.embed.lora_embedding_A": torch.ones(4, 2)}, ConfigError),
        ({f"{KEY}_B.bias": torch.ones(10)}, ConfigError),
        ({f"{KEY}_B.weight": None}, WeightError),
        ({f"{KEY}_B.weight": torch.ones(10, 3)}, WeightError),
        ({f"{KEY}_A.weight": torch.ones(4, 6, dtype=torch.int8)}, WeightError),
        (
            {f"{KEY}_A.weight": torch.ones(3, 6), f"{KEY}_B.weight": torch.ones(10, 3)},
            WeightError,
        ),
    ],
    ids=("dora", "head", "embedding", "bias", "half", "shapes", "integers", "rank"),
)
def test_tensors_that_do_not_fit(tmp_path, tensors, kind):
    path = write(tmp_path)
    change(path, **tensors)
    with pytest.raises(kind):
        LoraFiles.open("a", path)


def test_values_that_are_no_numbers(tmp_path):
    path = write(tmp_path)
    change(path, **{f"{KEY}_A.weight": torch.full((4, 6), math.inf)})
    files = LoraFiles.open("a", path)
    with pytest.raises(SpeccError, match="lora_A"):
        files.read(files.pairs[MODULE], torch.float32)


def test_files_that_are_absent(tmp_path):
    path = write(tmp_path)
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"no adapter_model\.safetensors"):
        LoraFiles.open("a", path)


def test_options():
    assert parse_adapters(["sql=a/b=c", "x-1=d"]) == {"sql": Path("a/b=c"), "x-1": Path("d")}
    for wrong in (["sql"], ["=a"], ["sql="], ["a b=c"], ["a=b", "a=c"]):
        with pytest.raises(ConfigError, match="--lora"):
            parse_adapters(wrong)


def test_names_of_wrapped_language_models():
    assert names_of(MODULE) == (MODULE,)
    wrapped = "model.language_model.layers.0.mlp.up_proj"
    assert "model.layers.0.mlp.up_proj" in names_of(wrapped)
