"""Files that cannot be written: the engine's and the cache's have errors of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specc.errors import CompilerError, OutputError, SpeccError
from specc.kernels import native
from specc.passes.lower.cpu import lower as lower_cpu
from specc.passes.lower.inductor import package as lower_aot_inductor
from specc.system.child_processes import ChildProcesses
from specc.system.cxx_compiler import find_compiler
from specc.system.file_cache import FileCache
from tests.file_limits import file_size_limit

PROGRAM: dict[str, Any] = {
    "name": "target",
    "inputs": [],
    "graph": {"nodes": [], "output": "x" * 9000},
}
# a compiler that is new enough and writes 9000 bytes where -o says
FAKE_COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "g++ (x) 12.1.0"; exit 0; fi
while [ "$1" != -o ]; do shift; done
head -c 9000 /dev/zero > "$2"
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a compiler that takes no time."""
    compiler = tmp_path / "g++"
    compiler.write_text(FAKE_COMPILER)
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("SPECC_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    path = tmp_path / "engine"
    path.mkdir()
    return path


def compile_program(package: Path) -> None:
    lower_cpu._compile(PROGRAM, package, ChildProcesses())


def copy_library(library: Path) -> None:
    lower_cpu.lower_cpu([], library)


def fill_cache(cache: Path) -> None:
    """What a compilation leaves in the cache for the two."""
    native.build()
    key = lower_aot_inductor._content_key(PROGRAM, find_compiler())
    FileCache().write(f"programs/{key}.pt2", json.dumps(PROGRAM).encode())


BOTH = pytest.mark.parametrize("write", [compile_program, copy_library])


def error_of(kind: type[SpeccError], write: Any, output: Path) -> SpeccError:
    with pytest.raises(SpeccError) as caught:
        write(output)
    assert type(caught.value) is kind, caught.value
    return caught.value


@BOTH
def test_what_the_cache_holds_is_copied(cache: Path, engine: Path, write: Any) -> None:
    fill_cache(cache)
    write(engine / "file")
    assert (engine / "file").stat().st_size >= 9000


@BOTH
def test_no_directory_for_the_engine(cache: Path, engine: Path, write: Any) -> None:
    fill_cache(cache)
    error = error_of(OutputError, write, engine / "absent" / "file")
    assert str(engine / "absent" / "file") in error.found
    assert "No such file" in error.found


@BOTH
def test_no_space_for_the_engine(cache: Path, engine: Path, write: Any) -> None:
    fill_cache(cache)
    (engine / "file").symlink_to("/dev/full")
    error = error_of(OutputError, write, engine / "file")
    assert str(engine / "file") in error.found
    assert "output on another file system" in error.do


@BOTH
@pytest.mark.parametrize("num_bytes", [0, 4000])
def test_a_quota_ends_in_the_engine(cache: Path, engine: Path, write: Any, num_bytes: int) -> None:
    """An error that names no file, where not even the first byte could be written."""
    fill_cache(cache)
    with file_size_limit(num_bytes):
        error = error_of(OutputError, write, engine / "file")
    assert str(engine / "file") in error.found


def test_a_quota_ends_in_the_cache(cache: Path, engine: Path) -> None:
    """Nothing is named by this error either."""
    with file_size_limit(4000):
        error = error_of(CompilerError, compile_program, engine / "file")
    assert str(cache) in error.found
    assert "SPECC_CACHE_DIR" in error.do
    assert "file system" in error.do


def test_the_cache_cannot_take_the_library(cache: Path, engine: Path) -> None:
    native.build().unlink()
    (directory,) = (cache / "native").iterdir()
    (directory / native.LIBRARY_NAME).mkdir()
    error = error_of(CompilerError, copy_library, engine / "file")
    assert str(directory / native.LIBRARY_NAME) in error.found
    assert "SPECC_CACHE_DIR" in error.do


def test_a_compiler_that_cannot_run_is_neither(
    cache: Path, engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(compiler: str, *args: Any) -> Path:
        raise PermissionError(13, "Permission denied", compiler)

    monkeypatch.setattr(native, "_compile", refuse)
    error = error_of(CompilerError, copy_library, engine / "file")
    assert "g++: Permission denied" in error.found
    assert "cache" not in error.found
