"""An engine that another one takes the place of while it is loaded."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from specc.artifact.directory import open_engine
from specc.errors import EngineError
from specc.runtime import engine as engine_module
from specc.runtime.engine import Engine


def test_an_engine_that_is_replaced_while_it_loads(
    tiny_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever parts of two engines would do together, the cause is named."""
    path = shutil.copytree(tiny_engine, tmp_path / "engine")

    def replace() -> None:
        path.rename(tmp_path / "old")
        shutil.copytree(tiny_engine, path)

    def remove() -> None:
        shutil.rmtree(path)

    for action in (replace, remove):

        def open_then_act(*args: Any, action: Any = action, **options: Any) -> Any:
            manifest = open_engine(*args, **options)
            action()
            return manifest

        monkeypatch.setattr(engine_module, "open_engine", open_then_act)
        with pytest.raises(EngineError, match="replaced or removed while it was being loaded"):
            Engine.load(path)
