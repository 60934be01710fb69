"""Which library of the CPU operators a process opens, by processor and SPECC_ISA."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from specc.errors import ConfigError, EngineError
from specc.kernels import library_files
from specc.kernels.library_files import (
    built_libraries,
    changed_source,
    known_sets,
    library_path,
    processor_flags,
    usable_sets,
)
from tests.tiers import every

ROOT = Path(__file__).parents[2]
V3 = "fpu avx avx2 bmi1 bmi2 f16c fma abm movbe"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"


@pytest.mark.parametrize(
    ("machine", "flags", "sets"),
    [
        ("x86_64", "sse2 avx", []),
        ("x86_64", V3.replace(" fma", ""), []),
        ("x86_64", V3, ["avx2"]),
        ("x86_64", V4.replace(" avx512vl", ""), ["avx2"]),
        ("AMD64", V4, ["avx512", "avx2"]),
        ("x86_64", f"{V4} avx512_vnni", ["avx512_vnni", "avx512", "avx2"]),
        # a Cooper Lake without VNNI there is not
        ("x86_64", f"{V4} avx512_bf16", ["avx512", "avx2"]),
        ("x86_64", f"{V4} avx512_vnni avx512_bf16 amx_tile",
         ["avx512_bf16", "avx512_vnni", "avx512", "avx2"]),
        ("aarch64", "fp asimd", ["neon"]),
        ("arm64", "fp asimd asimddp i8mm", ["neon_i8mm", "neon_dotprod", "neon"]),
        ("aarch64", "fp asimd i8mm", ["neon"]),
        ("riscv64", "", []),
    ],
)  # fmt: skip
def test_sets_of_processors(machine: str, flags: str, sets: list[str]) -> None:
    assert usable_sets(frozenset(flags.split()), machine) == sets


def test_flags_are_those_of_the_first_processor(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nflags\t\t: fpu avx2\nbugs\t\t: x\n\nflags\t\t: fpu\n")
    assert processor_flags(info) == {"fpu", "avx2"}
    info.write_text("processor\t: 0\nFeatures\t: fp asimd\n")
    assert processor_flags(info) == {"fp", "asimd"}
    assert processor_flags(tmp_path / "none") == frozenset()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of libraries, on a processor with AVX-512 and no more."""
    monkeypatch.setattr(library_files, "processor_flags", lambda: frozenset(V4.split()))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setenv("SPECC_LIBRARY_DIR", str(tmp_path))
    monkeypatch.delenv("SPECC_ISA", raising=False)
    for name in ("avx2", "avx512", "avx512_bf16"):
        (tmp_path / f"libspecc_cpu-{name}.so").write_bytes(b"")
    return tmp_path


def test_the_best_that_is_there(installed: Path) -> None:
    assert library_path() == installed / "libspecc_cpu-avx512.so"
    (installed / "libspecc_cpu-avx512.so").unlink()
    assert library_path() == installed / "libspecc_cpu-avx2.so"
    assert set(built_libraries()) == {"avx2", "avx512_bf16"}
    (installed / "libspecc_cpu-avx2.so").unlink()
    with pytest.raises(EngineError) as caught:
        library_path()
    assert str(installed) in caught.value.found
    assert "found: avx512_bf16" in caught.value.found
    assert caught.value.needed == "one of avx512, avx2"
    assert "--target specc_cpu_avx512" in caught.value.do


def test_a_set_that_is_asked_for(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECC_ISA", "avx2")
    assert library_path() == installed / "libspecc_cpu-avx2.so"
    monkeypatch.setenv("SPECC_ISA", "")
    assert library_path() == installed / "libspecc_cpu-avx512.so"
    monkeypatch.setenv("SPECC_ISA", "avx512_bf16")
    with pytest.raises(ConfigError) as refused:
        library_path()
    lacking = "SPECC_ISA=avx512_bf16, and a processor without avx512_bf16, avx512_vnni"
    assert refused.value.found == lacking
    assert refused.value.needed == "one of avx512, avx2"
    monkeypatch.setenv("SPECC_ISA", "../avx2")
    with pytest.raises(ConfigError, match=r"SPECC_ISA=\.\./avx2"):
        library_path()
    monkeypatch.setenv("SPECC_ISA", "avx2")
    (installed / "libspecc_cpu-avx2.so").unlink()
    with pytest.raises(EngineError, match=r"libspecc_cpu-avx2\.so"):
        library_path()


def test_sources_that_have_changed(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a checkout nobody computes with a library of older sources; ninja goes by times, too."""
    sources = installed / "cpu"
    sources.mkdir()
    source, library = sources / "linear.cpp", installed / "libspecc_cpu-avx512.so"
    source.write_text("")
    os.utime(source, (1000, 1000))
    os.utime(library, (1000, 1000))
    assert changed_source(library, sources) is None
    os.utime(source, (1001, 1001))
    assert changed_source(library, sources) == source
    monkeypatch.setattr(library_files, "changed_source", lambda path: source)
    with pytest.raises(EngineError, match=r"linear\.cpp is newer than .*avx512\.so"):
        library_path()
    # a wheel has no sources that could change
    monkeypatch.undo()
    monkeypatch.setattr(library_files, "CHECKOUT", installed)
    assert changed_source(library, sources) is None


def test_a_processor_without_any(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_files, "processor_flags", lambda: frozenset({"sse2"}))
    with pytest.raises(EngineError, match="x86-64 processor with AVX2") as caught:
        library_path()
    assert "--backend eager" in caught.value.do


def test_the_build_knows_the_same_sets() -> None:
    text = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    sets = [line.split() for line in re.findall(r"(?m)^  set\(sets (.*)\)$", text)]
    assert sets == [list(known_sets("x86_64")), list(known_sets("aarch64"))]
    flags = dict(re.findall(r"(?m)^  set\(of_(\w+) (.*)\)$", text))
    assert set(flags) == {name for names in sets for name in names}
    # what it may assume is what is asked of a processor
    assert all("x86-64-v3" in flags[name] for name in ("avx2",))
    for name in ("avx512", "avx512_vnni", "avx512_bf16"):
        assert "-march=x86-64-v4" in flags[name]
        assert ("-mavx512vnni" in flags[name]) == ("avx512_vnni" in known_sets("x86_64")[name])
        assert ("-mavx512bf16" in flags[name]) == ("avx512_bf16" in known_sets("x86_64")[name])


def test_the_script_names_the_best_set_without_the_package() -> None:
    """As the build calls it, where nothing is installed."""
    script = ROOT / "kernels" / "library_files.py"
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(script)], capture_output=True, text=True, cwd="/"
    )
    if usable_sets():
        assert done.stdout.split() == usable_sets()[:1]
    else:
        assert done.returncode == 1


LOADED = """
import torch
from specc.kernels import native
native.load()
x = torch.ops.specc_cpu.embedding_of_blocks
lines = open("/proc/self/maps").read().split("\\n")
print(*sorted({line.split()[-1] for line in lines if "libgomp" in line or "specc_cpu" in line}))
"""


@pytest.mark.skipif(not built_libraries(), reason="no library is built here")
@pytest.mark.parametrize(
    "name", every(9, [name for name in usable_sets() if name in built_libraries()])
)
def test_one_openmp_in_the_process(name: str) -> None:
    """Two spin against each other: the library takes the one that torch has loaded."""
    environment = {**os.environ, "SPECC_ISA": name}
    done = subprocess.run(
        [sys.executable, "-P", "-c", LOADED], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.split()
    assert [path for path in loaded if "specc_cpu" in path] == [str(built_libraries()[name])]
    assert len([path for path in loaded if "libgomp" in path]) == 1, loaded
