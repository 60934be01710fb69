"""Buffers that no checkpoint has get their values from what transformers initializes."""

from __future__ import annotations

import pytest
import torch

from specc.errors import UnsupportedGraphError
from specc.passes.frontend import hf_model
from specc.passes.frontend.buffer_values import buffer_values
from tests import models

PATHS = {"model.layers.1.mamba.mup_vector", "model.rotary_emb.inv_freq"}


def test_buffers_that_a_module_around_fills():
    """The multipliers of Falcon-H1 are those of its whole decoder."""
    config = models.tiny_config("falcon_h1")
    loaded = models.build_model("falcon_h1")
    model = hf_model.build_on_meta(config, torch.float32)
    found = buffer_values(model, PATHS)
    assert found.keys() == PATHS
    for path, value in found.items():
        assert torch.equal(value, loaded.get_buffer(path))
    assert len(found["model.layers.1.mamba.mup_vector"].unique()) == 5
    assert model.get_buffer("model.layers.1.mamba.mup_vector").is_meta


def test_a_buffer_that_nobody_fills_is_refused():
    model = hf_model.build_on_meta(models.tiny_config("llama"), torch.float32)
    part = model.get_submodule("model.layers.1.mlp")
    part.register_buffer("own", torch.empty(3, device="meta"), persistent=False)
    with pytest.raises(
        UnsupportedGraphError, match=r"buffer model\.layers\.1\.mlp\.own has no value"
    ):
        buffer_values(model, {"model.layers.1.mlp.own"})
