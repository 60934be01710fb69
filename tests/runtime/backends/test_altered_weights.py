"""A flipped bit in any file of weights is an error where the engine is loaded, never an output."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from specc.artifact.directory import read_manifest
from specc.config import CompileConfig
from specc.errors import EngineError
from specc.runtime.backends.held_weights import HeldWeights
from specc.runtime.backends.program_files import map_weights
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.system.files import sample_file
from tests import engines


@pytest.fixture
def engine(tiny_engine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_engine, tmp_path / "engine"))


def flip(file: Path, place: float) -> None:
    """One bit, at a share of the file's length."""
    with file.open("r+b") as data:
        offset = int((file.stat().st_size - 1) * place)
        data.seek(offset)
        byte = data.read(1)[0]
        data.seek(offset)
        data.write(bytes([byte ^ 0x10]))


@pytest.mark.default("0.3-target/weights.safetensors", "1.0-draft-0/weights.safetensors")
@pytest.mark.parametrize("name", ["target/weights.safetensors", "draft-0/weights.safetensors"])
@pytest.mark.parametrize("place", [0.3, 0.7, 1.0])
def test_it_is_refused(engine, name, place):
    flip(engine / name, place)
    with pytest.raises(EngineError, match="altered the weights") as caught:
        LLM(engine)
    assert name in caught.value.found
    assert "check the disk" in caught.value.do
    # whoever has switched it off
    assert Engine.load(engine, check_weights=False).manifest is not None
    assert LLM(engine, check_weights=False).engine.backend == "eager"


def test_held_and_mapped_weights(engine):
    manifest, name = read_manifest(engine), "target/weights.safetensors"
    crc32 = manifest.files[name].crc32
    expected = HeldWeights(engine / name, crc32)
    assert map_weights(engine, manifest, name).keys() == expected.keys()
    flip(engine / name, 0.5)
    for load in (
        lambda: HeldWeights(engine / name, crc32),
        lambda: map_weights(engine, manifest, name),
    ):
        with pytest.raises(EngineError, match="altered the weights"):
            load()
    assert HeldWeights(engine / name).keys() == expected.keys()
    assert map_weights(engine, manifest.unchecked(), name).keys() == expected.keys()


def test_engines_from_before_there_were_sums_are_loaded(engine):
    manifest = json.loads((engine / "manifest.json").read_bytes())
    for entry in manifest["files"].values():
        entry.pop("crc32", None)
    (engine / "manifest.json").write_text(json.dumps(manifest))
    assert LLM(engine).engine.manifest.files["target/weights.safetensors"].crc32 == ""


@pytest.mark.parametrize("crc32", ["0" * 7, "0" * 16, "0000000x", 5, None])
def test_sums_that_cannot_be(engine, crc32):
    manifest = json.loads((engine / "manifest.json").read_bytes())
    manifest["files"]["target/weights.safetensors"]["crc32"] = crc32
    (engine / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(EngineError, match=r"weights\.safetensors\.crc32"):
        LLM(engine)


@pytest.mark.slow
def test_weights_of_a_rank(tmp_path):
    """The rank finds it, and rank 0 says so."""
    engine = engines.build_cut(tmp_path, positions=128)
    manifest = read_manifest(engine)
    assert all(manifest.files[name].crc32 for name in manifest.weights_files)
    name = manifest.weights_file(manifest.models[0], 1)
    flip(engine / name, 0.6)
    # a sample of a file as small as this one is all of it
    data = json.loads((engine / "manifest.json").read_bytes())
    data["parallel"]["samples"][name] = sample_file(engine / name)
    (engine / "manifest.json").write_text(json.dumps(data))
    with pytest.raises(EngineError, match="altered the weights"):
        Engine.load(engine, oversubscribes=True)


def test_quantized_weights(tiny_models, tmp_path):
    config = CompileConfig(max_seq_len=64, max_batch_size=2, quantize="int8", probe=False)
    engine = engines.build(tiny_models.target, (), tmp_path / "engine", config)
    manifest = read_manifest(engine)
    assert all(manifest.files[name].crc32 for name in manifest.weights_files)
    flip(engine / "target/weights.safetensors", 0.5)
    with pytest.raises(EngineError, match="altered the weights"):
        LLM(engine)


def test_a_resharded_or_extended_engine_keeps_its_sums(engine, tmp_path):
    """Files that are taken over are taken over with what is known of them."""
    from specc.artifact.engine_writer import EngineWriter

    manifest = read_manifest(engine)
    with EngineWriter(tmp_path / "other") as writer:
        for name, entry in manifest.files.items():
            writer.link_file(engine / name, name, entry)
        made = writer.commit(manifest)
    assert made.files == manifest.files
    assert os.path.samefile(
        engine / "target/weights.safetensors", tmp_path / "other/target/weights.safetensors"
    )
