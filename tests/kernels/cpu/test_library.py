"""The library as a file: which ones are opened, and what compiles it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specc.errors import CompilerError, EngineError
from specc.kernels import native
from specc.system.cxx_compiler import compiler_version, find_compiler
from tests.kernel_flags import SOURCE_DIR, run_compiler, units


def compiled(path: Path, text: str) -> Path:
    source = path.with_suffix(".cpp")
    source.write_text(text)
    run_compiler([find_compiler(), "-shared", "-fPIC", str(source), "-o", str(path)])
    return path


def test_a_library_of_another_version(tmp_path):
    other = native.INTERFACE_VERSION + 1
    text = f'extern "C" int specc_interface_version() {{ return {other}; }}'
    with pytest.raises(EngineError, match=rf"another version of specc \(interface {other}\)"):
        native.open_library(compiled(tmp_path / "other.so", text))


@pytest.mark.parametrize("content", [b"", b"no library"])
def test_a_file_that_is_no_library(tmp_path, content):
    path = tmp_path / "none.so"
    path.write_bytes(content)
    with pytest.raises(EngineError, match="cannot be loaded"):
        native.open_library(path)


def test_a_library_without_a_version(tmp_path):
    with pytest.raises(EngineError, match=r"cannot be loaded.*specc_interface_version"):
        native.open_library(compiled(tmp_path / "plain.so", "int x;"))


NO_TORCH = """
import ctypes, sys
ctypes.CDLL("libgomp.so.1", mode=ctypes.RTLD_GLOBAL)
library = ctypes.CDLL(sys.argv[1])
count = ctypes.c_int64()
library.specc_operator_names(ctypes.byref(count))
with open("/proc/self/maps") as file:
    print(count.value, "torch" in file.read())
"""


def test_the_library_needs_no_torch(native_operators):
    """A program without it opens the library, and has all operators."""
    library = native.c_functions()._name
    command = [sys.executable, "-P", "-c", NO_TORCH, library]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.stdout == f"{len(native.operator_names())} False\n", result.stderr


def included(name: str) -> set[str]:
    """All that a source includes, also through the headers beside it."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        path = SOURCE_DIR / waiting.pop()
        if path.is_file():
            named = set(re.findall(r'^#include [<"](.+)[>"]', path.read_text(), re.MULTILINE))
            waiting += named - found
            found |= named
    return found


def test_no_source_includes_torch():
    """What is compiled needs the compiler alone."""
    for unit in units():
        assert not {name for name in included(unit) if re.match("torch|ATen|c10", name)}, unit


def test_every_source_is_compiled_once():
    names = [name for parts in units().values() for name in parts]
    for unit, parts in units().items():
        # a unit of several says nothing itself
        lines = (SOURCE_DIR / unit).read_text().splitlines()
        assert parts == [unit] or all(line.startswith(("//", "#include")) for line in lines)
        names += [unit] * (parts != [unit])
    assert sorted(names) == sorted(path.name for path in SOURCE_DIR.glob("*.cpp"))


@pytest.fixture
def wrapper(tmp_path, monkeypatch) -> Path:
    """What ccache does: a program that runs the compiler which its arguments name."""
    monkeypatch.setenv("SPECC_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "cc run" / "wrap"
    path.parent.mkdir()
    path.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nexec "$@"\n')
    path.chmod(0o755)
    return path


def test_a_compiler_of_several_words(wrapper, tmp_path, monkeypatch):
    compiler = shutil.which("g++") or shutil.which("clang++")
    assert compiler is not None
    monkeypatch.setenv("CXX", f"'{wrapper}' {compiler} -DSPECC_EXTRA='1 2'")
    found = find_compiler()
    # one executable, and the same one the next time
    assert Path(found).name in ("g++", "clang++")
    assert find_compiler() == found
    assert compiler_version(found) == compiler_version(compiler)
    (tmp_path / "calls").unlink()
    compiled(tmp_path / "some.so", "int x;")
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert f"{compiler} -DSPECC_EXTRA=1 2" in call


def test_other_arguments_are_another_compiler(wrapper, monkeypatch):
    keys = set()
    for arguments in ("g++", "g++ -O1", "g++ -O2"):
        monkeypatch.setenv("CXX", f"'{wrapper}' {arguments}")
        keys.add(find_compiler())
    # one of a single word is itself
    assert len(keys) == 3


def test_one_word_stays_a_path(wrapper, tmp_path, monkeypatch):
    """Also one with a space, quoted or not."""
    compiler = tmp_path / "cc run" / "g++"
    compiler.symlink_to(shutil.which("g++") or shutil.which("clang++"))
    for text in (str(compiler), f"'{compiler}'"):
        monkeypatch.setenv("CXX", text)
        assert find_compiler() == str(compiler)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("text", ["/nonexistent/ccache g++", "'g++", "/nonexistent/g++", "' '"])
def test_no_such_compiler(wrapper, text, monkeypatch):
    monkeypatch.setenv("CXX", text)
    with pytest.raises(CompilerError, match=r"no C\+\+ compiler") as caught:
        find_compiler()
    assert text in caught.value.found


def test_a_wrapped_compiler_that_fails(wrapper, monkeypatch):
    monkeypatch.setenv("CXX", f"'{wrapper}' /nonexistent/g++")
    with pytest.raises(CompilerError, match="--version failed"):
        find_compiler()
