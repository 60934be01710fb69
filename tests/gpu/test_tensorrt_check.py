"""Pieces of wheels become what they were, and what is absent or altered is said."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from tests.gpu import tensorrt_check
from tests.gpu.results import Results, Skipped
from tests.gpu.tensorrt_check import install, join, split
from tests.gpu.test_sweep_tiles import DEVICE


@pytest.fixture
def wheels(tmp_path: Path) -> list[Path]:
    """Two wheels that say what they are."""
    found = []
    for name in ("one", "two"):
        path = tmp_path / f"{name}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as file:
            file.writestr(f"{name}.py", f"NAME = {name!r}\n" + "# \n" * 300)
            info = f"{name}-1.0.dist-info"
            file.writestr(
                f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
            )
            file.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            file.writestr(f"{info}/RECORD", "")
        found.append(path)
    return found


def test_pieces_become_wheels(wheels: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "pieces"
    folders = split(wheels, folder, 900)
    assert [path.name for path in folders] == [f"call-{i + 1}" for i in range(len(folders))]
    assert len(folders) > 2
    for path in folders:
        assert sum(x.stat().st_size for x in path.iterdir() if x.name != "pieces.json") <= 900
    joined = join(folder, tmp_path / "joined")
    assert [path.read_bytes() for path in joined] == [path.read_bytes() for path in wheels]


def test_wheels_are_installed(wheels: list[Path], tmp_path: Path) -> None:
    split(wheels, tmp_path / "pieces", 900)
    assert install(tmp_path / "pieces", tmp_path / "site") == [path.name for path in wheels]
    assert "NAME = 'two'" in (tmp_path / "site/two.py").read_text()


def test_what_is_absent_or_altered(wheels: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "pieces"
    first, *_ = split(wheels, folder, 900)
    (piece,) = (path for path in first.iterdir() if path.name.endswith(".00"))
    data = piece.read_bytes()
    piece.write_bytes(data[:-1] + b"?")
    with pytest.raises(ValueError, match="other bytes"):
        join(folder, tmp_path / "joined")
    piece.unlink()
    with pytest.raises(ValueError, match=r"lacks call-1/one-1.0-py3-none-any.whl.00"):
        join(folder, tmp_path / "joined")


def test_without_pieces_it_is_skipped(tmp_path: Path) -> None:
    with pytest.raises(Skipped, match="not installed"):
        tensorrt_check.check(Results(tmp_path / "events"), DEVICE, str(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    (found,) = (line for line in lines if line.get("name") == "install")
    assert found["state"] == "skipped"
    assert "tensorrt_check" in found["value"]
