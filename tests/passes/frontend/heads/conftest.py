"""A target with hidden states, and the heads of `tests.heads` for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from specc.passes.frontend.heads.feature_head import FeatureHead
from specc.passes.frontend.heads.head_source import head_source
from specc.passes.frontend.heads.head_spec import HeadSpec, TargetFacts
from specc.passes.frontend.heads.recognise import recognise
from specc.passes.frontend.model_source import ModelSource
from tests import models
from tests.head_reference import Reference
from tests.heads import CASES, LAYERS, VOCAB, WIDTH, write_head

TARGET = TargetFacts("the target", WIDTH, LAYERS, VOCAB)


@dataclass
class Loaded:
    """A head from its files, with its weights, beside the reference."""

    spec: HeadSpec
    source: ModelSource
    module: FeatureHead
    reference: Reference


@pytest.fixture(scope="session")
def target() -> Any:
    """A model of transformers."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": LAYERS}
    return models.build_model("llama", vocab_size=VOCAB, **sizes)


@pytest.fixture(scope="session")
def load(target: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Loaded]:
    """Load a head by its name in `CASES`."""
    given = ModelSource.load("target", target, torch.float32)

    def load(name: str) -> Loaded:
        directory = tmp_path_factory.mktemp(name)
        tensors = write_head(directory, CASES[name])
        spec = recognise(directory, TARGET)
        assert spec is not None
        source = head_source(spec, given, torch.float32)
        embedding = target.get_input_embeddings().weight.detach()
        reference = Reference(CASES[name], tensors, embedding)
        return Loaded(spec, source, with_weights(spec, source), reference)

    return load


def with_weights(spec: HeadSpec, source: ModelSource) -> FeatureHead:
    """The module with the values that its source would have written."""
    module = FeatureHead(spec).eval()
    reader = source.reader
    for name, parameter in module.named_parameters():
        data = b"".join(bytes(chunk) for chunk in reader.read_chunks(name))
        values = torch.frombuffer(bytearray(data), dtype=reader.dtype(name))
        parameter.data = values.view(reader.shape(name)).clone()
        assert parameter.shape == source.module.get_parameter(name).shape
    return module
