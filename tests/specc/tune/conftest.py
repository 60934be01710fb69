"""Models that tests of tuning compile."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import models
from tests.heads import LAYERS, VOCAB, WIDTH
from tests.lossless import Zoo, shared_zoo


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return shared_zoo(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def target(zoo: Zoo) -> Path:
    """What heads and block drafters read the hidden states of."""
    sizes = {"intermediate_size": 48, "num_hidden_layers": LAYERS, "vocab_size": VOCAB}
    return zoo.once(
        "head-target", lambda path: models.save_tiny("llama", path, hidden_size=WIDTH, **sizes)
    )
