"""Where the library of C++ operators is kept, and when it is built anew."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from specc.kernels import native, native_build
from tests.fake_compiler import SLOW_BUILD, fake_compiler


def with_hash(library: Path) -> list[Path]:
    return [library, library.with_name(f"{library.name}.sha256")]


def files_in(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Callable[[], int]:
    """Use a compiler that makes files of text; returns how often it ran."""
    path = fake_compiler(tmp_path / "bin", "g++ (x) 12.1.0")
    monkeypatch.setenv("CXX", str(path))
    log = path.parent / "runs"
    return lambda: len(log.read_text().splitlines()) if log.exists() else 0


def test_the_second_build_is_the_first(runs, tmp_path):
    library = native.build(tmp_path / "cache")
    assert library.is_relative_to(tmp_path / "cache" / "native")
    assert library.read_text().startswith("made of")
    count = runs()
    assert count == len(native_build.sources()) + 1
    assert native.build(tmp_path / "cache") == library
    assert runs() == count
    # nothing but the library and its hash is kept
    assert sorted(files_in(tmp_path / "cache")) == with_hash(library)


def test_whatever_a_library_is_made_of_is_in_its_key(runs, tmp_path, monkeypatch):
    sources = tmp_path / "sources"
    shutil.copytree(native_build.SOURCE_DIR, sources)
    # each is a process for each library
    for path in sources.glob("*.cpp"):
        if path.name != "step.cpp":
            path.unlink()
    monkeypatch.setattr(native_build, "SOURCE_DIR", sources)
    made = {native.build(tmp_path / "cache")}
    for name in ("vec.h", "step.cpp"):
        (sources / name).write_text((sources / name).read_text() + "// changed\n")
        made.add(native.build(tmp_path / "cache"))
    for name, value in (("isa_flags", lambda: ("avx9",)), ("FLAGS", (*native_build.FLAGS, "-g"))):
        with monkeypatch.context() as patch:
            patch.setattr(native_build, name, value)
            made.add(native.build(tmp_path / "cache"))
    assert len(made) == 5


def included(name: str) -> set[str]:
    """All that a source includes, also through the headers beside it."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        path = native_build.SOURCE_DIR / waiting.pop()
        if path.is_file():
            named = set(re.findall(r'^#include [<"](.+)[>"]', path.read_text(), re.MULTILINE))
            waiting += named - found
            found |= named
    return found


def test_no_source_includes_torch():
    """What is compiled needs the compiler alone."""
    for source in native_build.sources():
        assert not {x for x in included(source.name) if re.match("torch|ATen|c10", x)}, source


def test_every_source_is_compiled_once():
    compiled = [source.name for source in native_build.sources()]
    for source in native_build.sources():
        members = [name for name in included(source.name) if name.endswith(".cpp")]
        compiled += members
        # a unit says nothing itself
        lines = source.read_text().splitlines()
        assert not members or all(line.startswith(("//", "#include")) for line in lines)
    assert sorted(compiled) == sorted(path.name for path in native_build.SOURCE_DIR.glob("*.cpp"))


@pytest.mark.slow
def test_two_builds_at_once(tmp_path, monkeypatch):
    compiler = fake_compiler(tmp_path / "bin", "g++ (x) 12.1.0", SLOW_BUILD)
    monkeypatch.setenv("CXX", str(compiler))
    script = "from specc.kernels import native; print(native.build())"
    environment = os.environ | {"SPECC_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-P", "-c", script]
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    found = [process.communicate(timeout=120)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert found[0] == found[1]
    assert sorted(files_in(tmp_path / "cache")) == with_hash(Path(found[0]))


def test_where_the_cache_lies(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECC_CACHE_DIR", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert native_build.default_cache_dir() == tmp_path / "a"
    monkeypatch.delenv("SPECC_CACHE_DIR")
    assert native_build.default_cache_dir() == tmp_path / "b" / "specc"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert native_build.default_cache_dir() == tmp_path / ".cache" / "specc"
