"""Every defect of an engine directory is an error where it is opened."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch

from specc.artifact import directory as artifact
from specc.artifact.directory import open_engine, torch_version
from specc.artifact.manifest import INSTRUCTIONS_VERSION, SCHEMA_VERSION
from specc.version import __version__
from tests.specc.artifact.engine_folders import FILES, edit, refused, write_engine


@pytest.fixture
def engine(tmp_path):
    write_engine(tmp_path / "engine")
    return tmp_path / "engine"


class TestOpen:
    def test_absent_and_not_an_engine(self, tmp_path):
        refused(tmp_path / "absent", "does not exist")
        (tmp_path / "file").write_bytes(b"")
        refused(tmp_path / "file", "is no directory")
        refused(tmp_path, "is not an engine")

    @pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe\x00", b"{} x"])
    def test_manifest_that_is_no_json(self, engine, data):
        (engine / "manifest.json").write_bytes(data)
        refused(engine, "is no JSON")

    @pytest.mark.parametrize("data", [b"[]", b"{}", b'{"schema_version": "1"}', b"3"])
    def test_manifest_without_schema(self, engine, data):
        (engine / "manifest.json").write_bytes(data)
        refused(engine, "schema_version")

    def test_other_schema(self, engine):
        edit(engine, schema_version=SCHEMA_VERSION + 1, specc_version="9.0", models="something new")
        error = refused(engine, r"written by a newer specc \(9\.0\)")
        assert "update specc" in error.do
        edit(engine, schema_version=0)
        refused(engine, "older specc")

    def test_other_runtime(self, engine):
        for version in ("0.0.9", f"{__version__}.post1", ""):
            edit(engine, backend="cuda", specc_version=version)
            error = refused(engine, re.escape(f"an engine of specc {version}, and specc"))
            assert f"install specc-llm {version}, or compile" in error.do
        edit(engine, specc_version=__version__, torch_version="2.12.1")
        assert "install torch 2.12.1" in refused(engine, r"torch 2\.12\.1").do
        # what is data alone runs on all of them
        edit(engine, backend="eager", specc_version="0.0.9")
        assert open_engine(engine).specc_version == "0.0.9"
        edit(engine, instructions=0)
        assert "compile the engine again" in refused(engine, "an engine of instructions 0").do
        edit(engine, instructions=INSTRUCTIONS_VERSION, specc_version=__version__)
        edit(engine, torch_version=torch_version(), backend="cuda")
        refused(engine, "backend cuda", backends=("eager",))
        edit(engine, backend="tensorrt")
        refused(engine, "backend tensorrt with rectangle")
        edit(engine, backend="eager", device="npu")
        refused(engine, "device npu")

    def test_torch_version_has_no_local_part(self, monkeypatch):
        for version, wanted in [
            ("2.13.0+cpu", "2.13.0"),
            ("2.14.0.dev20260101+cu130", "2.14.0"),
            ("2.14.0a0+git12", "2.14.0"),
            ("2.11.1", "2.11.1"),
        ]:
            monkeypatch.setattr(torch, "__version__", version)
            assert torch_version() == wanted

    def test_too_little_memory(self, engine):
        assert open_engine(engine, available_memory=1361).total_memory == 1361
        error = refused(engine, "1360|1.3 KiB", available_memory=1360)
        assert "max_batch_size 8" in error.needed
        assert "--max-batch-size" in error.do
        assert "--max-seq-len" in error.do

    def test_available_memory(self):
        assert 1 << 20 < artifact.available_memory_bytes() < 1 << 60

    @pytest.mark.parametrize("name", FILES)
    def test_missing_file(self, engine, name):
        (engine / name).unlink()
        assert name in refused(engine, "is missing", verify=False).found

    @pytest.mark.parametrize("name", FILES)
    @pytest.mark.parametrize("change", [-1, 1])
    def test_wrong_size(self, engine, name, change):
        data = FILES[name]
        if not data and change < 0:
            return
        (engine / name).write_bytes(data[:-1] if change < 0 else data + b"\0")
        assert name in refused(engine, "bytes", verify=False).found

    @pytest.mark.parametrize("name", [name for name, data in FILES.items() if data])
    def test_any_flipped_byte(self, engine, name):
        data = FILES[name]
        for position in {0, len(data) // 2, len(data) - 1}:
            changed = bytearray(data)
            changed[position] ^= 1
            (engine / name).write_bytes(changed)
            assert name in refused(engine, "has sha256", verify=True).found
            open_engine(engine, verify=False)  # sees sizes only
        (engine / name).write_bytes(data)
        open_engine(engine)

    def test_progress(self, engine):
        calls = []
        open_engine(engine, verify=True, progress=lambda *call: calls.append(call))
        total = sum(map(len, FILES.values()))
        assert calls[-1] == (total, total)

    def test_weights_are_read_only_when_asked(self, engine):
        name = "target/weights.safetensors"
        calls = []
        open_engine(engine, progress=lambda *call: calls.append(call))
        read = [data for file, data in FILES.items() if not file.endswith("weights.safetensors")]
        assert calls[-1][1] == sum(map(len, read))
        (engine / name).write_bytes(FILES[name][::-1])
        open_engine(engine)
        refused(engine, "has sha256", verify=True)

    @pytest.mark.parametrize(
        "path", ["../secret", "/etc/hostname", "a/../../b", "", ".", "manifest.json", "a\\..\\b"]
    )
    def test_paths_that_escape(self, engine, path):
        files = json.loads((engine / "manifest.json").read_text())["files"]
        edit(engine, files=files | {path: {"sha256": "ab" * 32, "bytes": 1}})
        refused(engine, "manifest is invalid")

    def test_a_copied_engine_opens(self, engine, tmp_path):
        shutil.copytree(engine, tmp_path / "copy")
        assert open_engine(tmp_path / "copy") == open_engine(engine)
