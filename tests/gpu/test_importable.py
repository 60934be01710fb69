"""What the check carries to a machine that has torch and Triton alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import importable


def test_pytest_runs_from_its_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without installed packages."""
    monkeypatch.setattr(importable, "PYTEST", tmp_path / "copy")
    importable.bundle_pytest()
    (tmp_path / "test_one.py").write_text("def test_one(tmp_path):\n    assert tmp_path.exists()\n")
    code = "import sys; sys.path.insert(0, sys.argv[1]); import pytest; pytest.main(sys.argv[2:])"
    arguments = [str(tmp_path / "copy"), "-p", "no:cacheprovider", str(tmp_path)]
    command = [sys.executable, "-I", "-S", "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
