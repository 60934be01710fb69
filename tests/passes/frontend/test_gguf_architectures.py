"""Every architecture of GGUF that is read: a file alone is the model that llama.cpp converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specc.artifact.decoders.gguf_architectures import ARCHITECTURES
from specc.passes.frontend.checkpoint import CheckpointMap
from specc.passes.frontend.model_source import ModelSource
from tests import models
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


@pytest.mark.parametrize("name", recordings())
def test_a_file_alone_is_the_model(tmp_path: Path, name: str) -> None:
    """Numbers and logits: of names, of what the converter changed, and of the configuration."""
    from transformers import AutoModelForCausalLM

    base, changes = recordings()[name]["config"]
    model = models.build_model(base, **changes)
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
