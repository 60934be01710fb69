"""A target with hidden states, and the heads of `tests.heads` for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from specc.passes.drafters.feature_head import FeatureHead
from specc.passes.drafters.head_source import head_source
from specc.passes.drafters.head_spec import EagleSpec, HeadSpec, TargetFacts
from specc.passes.drafters.mtp_head import MtpHead
from specc.passes.drafters.mtp_source import mtp_source
from specc.passes.drafters.mtp_spec import recognise_mtp
from specc.passes.drafters.recognise import recognise
from specc.passes.frontend.model_source import ModelSource
from tests import models
from tests.head_reference import Reference
from tests.heads import CASES, LAYERS, VOCAB, WIDTH, write_head
from tests.mtp import MtpReference, write_target

TARGET = TargetFacts("the target", WIDTH, LAYERS, VOCAB)


@dataclass
class Loaded:
    """A head from its files, with its weights, beside the reference."""

    spec: HeadSpec
    source: ModelSource
    module: torch.nn.Module
    reference: Reference | MtpReference


@pytest.fixture(scope="session")
def target() -> Any:
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


@pytest.fixture(scope="session")
def load_mtp(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Any, Loaded]]:
    """A target of transformers, and the MTP module in its checkpoint."""

    @functools.cache
    def load(name: str, has_own_ends: bool = False) -> tuple[Any, Loaded]:
        from transformers import AutoModelForCausalLM

        directory = write_target(name, tmp_path_factory.mktemp(name), has_own_ends)
        source = ModelSource.load("target", directory, torch.float32)
        facts = TargetFacts.of_config(name, source.config)
        spec = recognise_mtp(source.config, source.reader, directory, facts)
        given = mtp_source(spec, source, torch.float32)
        with torch.device("cpu"):
            deeper = AutoModelForCausalLM.from_config(spec.config, dtype=torch.float32)
        module = filled(MtpHead(deeper).eval(), given)
        target = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        return target, Loaded(spec, given, module, MtpReference(target, name, has_own_ends))

    return load


def with_weights(spec: EagleSpec, source: ModelSource) -> FeatureHead:
    """The module with the values that its source would have written."""
    return filled(FeatureHead(spec).eval(), source)


def filled(module: Any, source: ModelSource) -> Any:
    """A module with the values that its source would have written."""
    reader, places = source.reader, source.places
    assert places is not None
    wanted = source.module.state_dict()
    for name, stored in module.state_dict(keep_vars=True).items():
        found = [
            chunk
            for item in places(name)
            for chunk in reader.read_chunks(item.name, rows=item.rows, transpose=item.transpose)
        ]
        values = torch.frombuffer(bytearray().join(map(bytes, found)), dtype=torch.float32)
        stored.data = values.view(wanted[name].shape).clone()
    return module
