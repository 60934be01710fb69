"""Every architecture of GGUF that is read: a file alone is the model that llama.cpp converted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specc.artifact.decoders.gguf_architectures import ARCHITECTURES
from specc.artifact.decoders.gguf_file import GGUFReader
from specc.errors import WeightError
from specc.passes.frontend.checkpoint import CheckpointMap
from specc.passes.frontend.gguf_config import config_of
from specc.passes.frontend.model_source import ModelSource
from tests import gguf_files, models
from tests.passes.frontend.gguf_recordings import recordings, write_recorded


def read(source: ModelSource) -> dict[str, Tensor]:
    """All parameters and stored buffers of a model, from its file."""
    checkpoint, found = CheckpointMap(source.module, source.reader), {}
    for name, value in source.module.state_dict().items():
        parts = []
        for part in checkpoint.sources(name):
            data = b"".join(map(bytes, source.reader.read_chunks(part.name, rows=part.rows)))
            parts.append(torch.frombuffer(bytearray(data), dtype=torch.float32))
        found[name] = torch.cat(parts).view(value.shape)
    return found


def build(name: str) -> Any:
    base, changes = recordings()[name]["config"]
    return models.build_model(base, **changes)


@pytest.mark.default(
    "llama",
    "llama-tied",
    "llama-llama3",
    "mistral",
    "qwen3-yarn",
    "gemma",
    "gemma3",
    "gemma4",
    "phimoe",
    "starcoder2",
    "bloom",
    "falcon",
    "stablelm-heads",
    "olmo2",
    "cohere-norms",
    "granitemoeshared",
    "glm4",
    "seed_oss",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "qwen3_next_hybrid",
    "qwen3_5-square",
    "lfm2_moe",
    "bamba",
    "nemotron_h-moe",
    "mamba2",
    "kimi_linear",
)
@pytest.mark.parametrize("name", recordings())
def test_a_file_alone_is_the_model(tmp_path: Path, name: str) -> None:
    """Numbers and logits: of names, of what the converter changed, and of the configuration."""
    from transformers import AutoModelForCausalLM

    model = build(name)
    write_recorded(tmp_path / "model.gguf", name, model.state_dict())
    source = ModelSource.load("target", tmp_path / "model.gguf", torch.float32)
    found, wanted = read(source), model.state_dict()
    assert found.keys() == wanted.keys()
    for key, value in found.items():
        # one was added to some norms, and is taken away again; exponentials are the file's
        atol = 1e-6 if key.endswith("A_log") else 2e-7
        torch.testing.assert_close(value, wanted[key], rtol=0, atol=atol)
    other: Any = AutoModelForCausalLM.from_config(source.config).eval()
    other.load_state_dict(found)
    # longer than windows and chunks
    tokens = torch.tensor([models.prompts()[-1]])
    with torch.no_grad():
        logits = [m(tokens).logits for m in (model, other)]
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3_5-square", "glm4_moe"])
def test_layers_that_predict_further_tokens(tmp_path: Path, name: str) -> None:
    """A module of MTP comes after the model's layers, which are all that is read."""
    state = build(name).state_dict()
    write_recorded(tmp_path / "a.gguf", name, state)
    fields, tensors = gguf_files.read_file(tmp_path / "a.gguf")
    kind, layers = fields["general.architecture"], build(name).config.num_hidden_layers
    fields |= {f"{kind}.block_count": layers + 1, f"{kind}.nextn_predict_layers": 1}
    key = f"{kind}.attention.recurrent_layers"
    if key in fields:
        fields[key] = [*fields[key], False]
    last = f"blk.{layers}"
    of_one = {key: item for key, item in tensors.items() if key.startswith(f"blk.{layers - 1}.")}
    further = {key.replace(f"blk.{layers - 1}", last): item for key, item in of_one.items()}
    further[f"{last}.nextn.eh_proj.weight"] = next(iter(of_one.values()))
    gguf_files.write_file(tmp_path / "b.gguf", fields, tensors | further)
    source = ModelSource.load("target", tmp_path / "b.gguf", torch.float32)
    assert source.config.num_hidden_layers == layers
    assert read(source).keys() == state.keys()


def test_a_wrapper_beside_the_file(tmp_path: Path) -> None:
    """config.json of the model that takes images, as its makers publish it."""
    from transformers import Qwen3_5Config

    model = build("qwen3_5-square")
    write_recorded(tmp_path / "model.gguf", "qwen3_5-square", model.state_dict())
    config = Qwen3_5Config(
        text_config=model.config.to_dict(), architectures=["Qwen3_5ForConditionalGeneration"]
    )
    config.save_pretrained(tmp_path)
    models.byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    found = read(ModelSource.load("target", tmp_path, torch.float32))
    assert found.keys() == model.state_dict().keys()


def test_layers_without_a_list(tmp_path: Path) -> None:
    """Files from before the list: each fourth layer attends, or each of another number."""
    write_recorded(tmp_path / "a.gguf", "qwen3_5", build("qwen3_5").state_dict())
    fields, tensors = gguf_files.read_file(tmp_path / "a.gguf")
    del fields["qwen35.attention.recurrent_layers"]
    del fields["qwen35.full_attention_interval"]
    for every, attending in ((None, [3]), (2, [1, 3])):
        more = {} if every is None else {"qwen35.full_attention_interval": every}
        gguf_files.write_file(tmp_path / "b.gguf", fields | more, tensors)
        kinds = config_of(GGUFReader(tmp_path / "b.gguf", reads_lists=True))["layer_types"]
        assert [n for n, kind in enumerate(kinds) if kind == "full_attention"] == attending


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        # windows, of which transformers' LFM2 has none
        ("lfm2", "lfm2.attention.sliding_window", 16),
        ("lfm2_moe", "lfm2moe.expert_gating_func", 1),
        ("granite4_hybrid", "granitehybrid.ssm.inner_size", 100),
        ("bamba", "granitehybrid.rope.dimension_count", 16),
        ("nemotron_h-moe", "nemotron_h_moe.expert_used_count", [2, 2, 2, 1, 2, 2]),
    ],
)
def test_fields_of_states_that_are_refused(tmp_path: Path, name: str, key: str, value: Any) -> None:
    write_recorded(tmp_path / "a.gguf", name, build(name).state_dict())
    fields, tensors = gguf_files.read_file(tmp_path / "a.gguf")
    gguf_files.write_file(tmp_path / "b.gguf", fields | {key: value}, tensors)
    with pytest.raises(WeightError, match=re.escape(key)):
        config_of(GGUFReader(tmp_path / "b.gguf", reads_lists=True))


def test_heads_that_do_not_fit(tmp_path: Path) -> None:
    """Rows of value heads that are not as many as the fields say."""
    write_recorded(tmp_path / "a.gguf", "qwen3_5-square", build("qwen3_5-square").state_dict())
    fields, tensors = gguf_files.read_file(tmp_path / "a.gguf")
    gguf_files.write_file(tmp_path / "b.gguf", fields | {"qwen35.ssm.state_size": 8}, tensors)
    with pytest.raises(
        WeightError, match=r"blk\.0\.ssm_conv1d\.weight .* rows or columns of heads"
    ):
        ModelSource.load("target", tmp_path / "b.gguf", torch.float32)


def test_all_architectures_are_recorded() -> None:
    recorded = {item["fields"]["general.architecture"] for item in recordings().values()}
    assert recorded == set(ARCHITECTURES)


@pytest.mark.parametrize(("name", "base"), [("gemma3", 10000.0), ("olmo3", 500000.0)])
def test_frequencies_of_windows_without_a_field(tmp_path: Path, name: str, base: float) -> None:
    """Files of Gemma 3 from before the field have the base that llama.cpp takes."""
    write_recorded(tmp_path / "a.gguf", name, build(name).state_dict())
    fields, tensors = gguf_files.read_file(tmp_path / "a.gguf")
    kind = fields["general.architecture"]
    del fields[f"{kind}.rope.freq_base_swa"]
    gguf_files.write_file(tmp_path / "b.gguf", fields, tensors)
    config = config_of(GGUFReader(tmp_path / "b.gguf", reads_lists=True))
    assert config["rope_parameters"]["sliding_attention"]["rope_theta"] == base
