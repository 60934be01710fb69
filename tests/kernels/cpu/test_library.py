"""The library as a file: of which version it is, what compiles it, and what its programs leave."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specc.errors import CompilerError, EngineError
from specc.kernels import native
from specc.runtime.backends.cpu import compiled_program
from specc.system.cxx_compiler import compiler_version, find_compiler
from specc.system.files import hash_file
from tests.file_limits import file_size_limit
from tests.kernels.probe import WEIGHT_SHAPE, load_probe, probe_inputs
from tests.tiers import every

ROOT = Path(__file__).parents[3]


@pytest.fixture
def small_library(tmp_path, monkeypatch) -> Any:
    """Builds a library whose interface is that of a changed copy of the sources.

    Everything but version.cpp is empty where the compiler looks, so that a build takes a second.
    """

    def build(changed: str = "") -> Path:
        sources = tmp_path / f"sources-{changed}"
        shutil.copytree(native.SOURCE_DIR, sources)
        if changed:
            path = sources / changed
            path.write_text(path.read_text() + "struct Changed;  // so\n")
        with monkeypatch.context() as patch:
            patch.setattr(native, "SOURCE_DIR", sources)
            patch.setattr(native, "_sources", lambda: [sources / "version.cpp"])
            return native.build(tmp_path / f"cache-{changed}")

    return build


@pytest.mark.parametrize("name", every(5, native._INTERFACE))
def test_a_library_of_changed_sources_is_refused(native_operators, small_library, name):
    library = small_library(name)
    with pytest.raises(EngineError, match="another version of specc") as caught:
        native.load(library)
    assert native.interface_hash() in caught.value.needed
    assert caught.value.do == "compile the engine again with this version"


def test_comments_are_no_part_of_the_interface(tmp_path, monkeypatch):
    known = native.interface_hash()
    sources = shutil.copytree(native.SOURCE_DIR, tmp_path / "sources")
    monkeypatch.setattr(native, "SOURCE_DIR", sources)
    header = sources / "step_runner.h"
    text = header.read_text()
    header.write_text(f"// of a new line\n{text}".replace(";\n", ";  // at an end\n", 1))
    assert native.interface_hash() == known
    header.write_text(text.replace(";\n", ";;\n", 1))
    assert native.interface_hash() != known


def test_sources_that_changed_since(native_operators, tmp_path, monkeypatch):
    """The other way around: the library is loaded, and another specc is installed over this one."""
    native.load()
    library = native.build()
    sources = shutil.copytree(native.SOURCE_DIR, tmp_path / "sources")
    (sources / "step_runner.h").write_text("struct Another;\n")
    monkeypatch.setattr(native, "SOURCE_DIR", sources)
    with pytest.raises(EngineError, match="another version of specc"):
        native.load(library)


@pytest.mark.parametrize(
    "name",
    ["", pytest.param("linear.cpp", marks=pytest.mark.slow), "vec.h"],
    ids=["same", "kernel", "header"],
)
def test_a_changed_kernel_is_the_same_interface(native_operators, small_library, name):
    """Such an engine still runs; here another build is loaded, which is the next thing to check."""
    with pytest.raises(EngineError, match="differs from the operators that this process"):
        native.load(small_library(name))


@pytest.fixture
def marking_library(tmp_path) -> Any:
    """Builds a library that leaves a mark as soon as it is opened."""

    def build(interface: str | None) -> tuple[Path, Path]:
        source, library, mark = (tmp_path / name for name in ("mark.cpp", "mark.so", "mark"))
        text = f"""
            #include <cstdio>
            __attribute__((constructor)) static void leave() {{ fclose(fopen("{mark}", "w")); }}
        """
        if interface is not None:
            text += f"""
                extern "C" __attribute__((used)) const char specc_interface[] =
                    "specc-interface:{interface}";
            """
        source.write_text(text)
        native._run([find_compiler(), "-shared", "-fPIC", str(source), "-o", str(library)])
        return library, mark

    return build


LOAD = """
import sys
import textwrap
from pathlib import Path
from specc.errors import EngineError
from specc.kernels import native
try:
    native.load(Path(sys.argv[1]), *sys.argv[2:])
except EngineError as error:
    print(error)
"""


def load_in_a_process(library: Path, *sha256: str) -> str:
    """What a process that has loaded no other library says."""
    command = [sys.executable, "-P", "-c", LOAD, str(library), *sha256]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("interface", [None, "0123456789abcdef"])
def test_a_library_that_is_refused_does_not_run(marking_library, interface):
    """One that names no version, as before there were versions, and one of another version."""
    library, mark = marking_library(interface)
    found = load_in_a_process(library)
    assert f"is of another version of specc (interface {interface or 'none'})" in found
    assert not mark.exists()


@pytest.mark.slow
def test_an_altered_library_does_not_run(marking_library):
    library, mark = marking_library(native.interface_hash())
    assert "as the manifest says" in load_in_a_process(library, "0" * 64)
    assert not mark.exists()
    # the mark tells: it is left where nothing refuses the library before it is opened
    load_in_a_process(library, hash_file(library))
    assert mark.exists()


@pytest.mark.slow
def test_what_is_opened_is_what_was_checked(marking_library, native_operators, tmp_path):
    """The file changes between the two: only the copy in memory counts."""
    library, mark = marking_library(native.interface_hash())
    changed = tmp_path / "changed.so"
    shutil.copyfile(native.build(), changed)
    code = """
        import sys
        from pathlib import Path
        from specc.kernels import native
        path, other = Path(sys.argv[1]), Path(sys.argv[2])
        check = native._check_interface
        def check_then_change(library, data):
            check(library, data)
            with open(path, "r+b") as file:  # the same file, in place
                file.write(other.read_bytes())
                file.truncate()
        native._check_interface = check_then_change
        native.load(path)
        assert native.kernel_threads() > 0
    """
    command = [sys.executable, "-P", "-c", textwrap.dedent(code), str(changed), str(library)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert changed.read_bytes() == library.read_bytes()
    assert not mark.exists()


@pytest.fixture
def wrapper(tmp_path, monkeypatch) -> Path:
    """What ccache does: a program that runs the compiler which its arguments name."""
    monkeypatch.setenv("SPECC_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "cc run" / "wrap"
    path.parent.mkdir()
    path.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nexec "$@"\n')
    path.chmod(0o755)
    return path


def test_a_compiler_of_several_words(wrapper, small_library, tmp_path, monkeypatch):
    compiler = shutil.which("g++") or shutil.which("clang++")
    assert compiler is not None
    monkeypatch.setenv("CXX", f"'{wrapper}' {compiler} -DSPECC_EXTRA='1 2'")
    found = find_compiler()
    # one executable, by a name that Inductor knows, and the same one the next time
    assert Path(found).name in ("g++", "clang++")
    assert find_compiler() == found
    assert compiler_version(found) == compiler_version(compiler)
    (tmp_path / "calls").unlink()
    library = small_library()
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 2
    assert all(f"{compiler} -DSPECC_EXTRA=1 2" in call for call in calls)
    assert native._interface_of(library.read_bytes()) == native.interface_hash()


def test_the_arguments_are_in_the_key(wrapper, monkeypatch):
    keys = set()
    for arguments in ("g++", "g++ -O1", "g++ -O2"):
        monkeypatch.setenv("CXX", f"'{wrapper}' {arguments}")
        keys.add(native._content_key(find_compiler()))
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


DEATH = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from specc.kernels import native
from specc.runtime.backends.program_files import MappedWeights
native.load()
from tests.file_limits import file_size_limit
from tests.kernels.probe import load_probe, probe_inputs
path = Path(sys.argv[3])
weights = MappedWeights(path)
program = load_probe(Path(sys.argv[2]), weights["w0"])
program.run(probe_inputs(3))
if sys.argv[4] == "dropped":
    del program
elif sys.argv[4] == "bound-again":
    program.bind_weights(["w0"], [weights["w0"].clone()])
os.truncate(path, 0)
weights["w0"].sum() if sys.argv[4] != "used" else program.run(probe_inputs(3))
"""


@pytest.mark.parametrize(
    "how",
    [
        "used",
        pytest.param("dropped", marks=pytest.mark.slow),
        pytest.param("bound-again", marks=pytest.mark.slow),
    ],
)
def test_bound_weights_are_watched_while_they_are_bound(probe_package, tmp_path, how):
    path = tmp_path / "weights.safetensors"
    save_file({"w0": torch.zeros(WEIGHT_SHAPE)}, path)
    command = [sys.executable, "-P", "-c", DEATH, *map(str, (ROOT, probe_package, path)), how]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == -signal.SIGBUS, result.stderr
    assert ("cut while the engine was using them" in result.stderr) == (how == "used")


def test_a_loaded_program_has_no_files(probe_package, tmp_path, monkeypatch):
    """What is mapped needs none, and a process that is killed leaves none."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    program = load_probe(probe_package)
    assert list(tmp_path.iterdir()) == []
    assert program.run(probe_inputs(3)).shape[0] == 3


def test_a_torch_that_takes_no_directories(probe_package, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(compiled_program, "_DIRECTORIES_SINCE", (99,))
    assert load_probe(probe_package).run(probe_inputs(3)).shape[0] == 3
    assert list(tmp_path.iterdir()) == []


def test_a_package_that_is_none(tmp_path):
    package = tmp_path / "program.pt2"
    package.write_bytes(b"")
    with pytest.raises(EngineError, match="cannot be loaded: File is not a zip file"):
        load_probe(package)


def test_no_room_to_unpack(probe_package, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with file_size_limit(1000), pytest.raises(EngineError) as caught:
        load_probe(probe_package)
    assert "into the temporary directory failed" in caught.value.found
    assert "TMPDIR" in caught.value.do
    assert list(tmp_path.iterdir()) == []
