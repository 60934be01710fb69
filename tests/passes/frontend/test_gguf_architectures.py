"""Every architecture of GGUF that is read: a file alone is the model that llama.cpp converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specc.artifact.decoders.gguf_architectures import ARCHITECTURES
from specc.artifact.decoders.gguf_file import GGUFReader
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
        # one was added to some norms, and is taken away again
        torch.testing.assert_close(value, wanted[key], rtol=0, atol=2e-7)
    other: Any = AutoModelForCausalLM.from_config(source.config).eval()
    other.load_state_dict(found)
    # longer than windows and chunks
    tokens = torch.tensor([models.prompts()[-1]])
    with torch.no_grad():
        logits = [m(tokens).logits for m in (model, other)]
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-5, atol=1e-5)


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
