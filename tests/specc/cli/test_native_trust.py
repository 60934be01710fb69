"""Which commands run code of an engine: here it leaves a mark as soon as it is opened."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.artifact.directory import open_engine, read_manifest
from specc.artifact.manifest import MANIFEST_FILE
from specc.artifact.manifest_entries import FileEntry, NativeEntry
from specc.errors import EngineError
from specc.kernels import native
from specc.runtime import engine as engine_module
from specc.runtime.engine import Engine
from specc.system.cxx_compiler import find_compiler
from specc.system.files import hash_file
from tests.runtime.backends.cpu.cpu_pair import load_program

LIBRARY = "native/libspecc_cpu.so"
SOURCE = """
#include <cstdio>
__attribute__((constructor)) static void leave() { fclose(fopen("%s", "a")); }
extern "C" __attribute__((used)) const char specc_interface[] = "specc-interface:%s";
"""
# one process, since each takes seconds to start; it says after which command there is a mark
COMMANDS = """
import json, sys
from pathlib import Path
from typer.testing import CliRunner
from specc.cli.main import app
engine, mark = sys.argv[1], Path(sys.argv[2])
found = []
for command in json.loads(sys.argv[3]):
    result = CliRunner().invoke(app, command)
    found.append((command[0], result.exit_code, mark.exists(), result.output[-2000:]))
print("\\n" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def engine(tiny_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny engine as one of the backend cpu, whose code leaves a mark, and nothing else."""
    root = tmp_path_factory.mktemp("marking")
    path = shutil.copytree(tiny_engine, root / "engine")
    source, library = root / "mark.cpp", path / LIBRARY
    source.write_text(SOURCE % (root / "mark", native.interface_hash()))
    library.parent.mkdir()
    native._run([find_compiler(), "-shared", "-fPIC", str(source), "-o", str(library)])
    manifest = read_manifest(path)
    for model in manifest.models:
        with zipfile.ZipFile(path / model.package_file, "w") as archive:
            archive.write(library, "program/data/aotinductor/model/x.wrapper.so")
    files = [LIBRARY, *manifest.files, *(model.package_file for model in manifest.models)]
    entries = {n: FileEntry(hash_file(path / n), (path / n).stat().st_size) for n in files}
    manifest = dataclasses.replace(
        manifest, backend="cpu", native=NativeEntry(LIBRARY, ()), files=entries
    )
    (path / MANIFEST_FILE).write_text(json.dumps(manifest.to_json()))
    return path


@pytest.mark.slow
def test_what_runs_no_code_of_an_engine(engine: Path) -> None:
    mark, name = engine.parent / "mark", str(engine)
    eager = ["--backend", "eager"]
    commands = [
        ["inspect", name],
        ["inspect", name, "--verify"],
        ["doctor"],
        ["run", name, "a", "--max-tokens", "2", *eager],
        # the mark tells: this one does run it
        ["run", name, "a", "--max-tokens", "2"],
    ]
    process = [sys.executable, "-P", "-c", COMMANDS, name, str(mark), json.dumps(commands)]
    result = subprocess.run(process, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    *none, last = json.loads(result.stdout.splitlines()[-1])
    for command, code, is_marked, output in none:
        assert code == 0, (command, output)
        assert not is_marked, command
    assert last[2]


@pytest.mark.parametrize("kind", ["library", "package"])
def test_altered_code_is_refused_and_does_not_run(engine: Path, tmp_path: Path, kind: str) -> None:
    """Also where no other hashes are compared."""
    mark = engine.parent / "mark"
    mark.unlink(missing_ok=True)
    altered = shutil.copytree(engine, tmp_path / "engine")
    model = read_manifest(altered).models[0]
    file = altered / (LIBRARY if kind == "library" else model.package_file)
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    for verify in (None, True):
        with pytest.raises(EngineError, match="as manifest"):
            Engine.load(altered, verify=verify)
    if kind == "library":
        load = partial(Engine.load, altered, verify=False)
    else:
        sha256 = hash_file(engine / model.package_file)
        caches = [
            (torch.zeros(1, 16, layer.num_kv_heads, layer.head_dim),) * 2 for layer in model.layers
        ]
        load = partial(load_program, altered / model.dir, caches, sha256)
    with pytest.raises(EngineError, match="as the manifest says"):
        load()
    assert not mark.exists()


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
