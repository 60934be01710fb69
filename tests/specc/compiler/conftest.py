"""Checkpoints that tests of `build` compile."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import save_tiny


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories of Llamas of one layer; read only."""
    root = tmp_path_factory.mktemp("models")
    save_tiny("llama", root / "target", num_hidden_layers=1)
    save_tiny("llama", root / "draft", noise=0.1, num_hidden_layers=1)
    return root
