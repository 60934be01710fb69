"""How CMakeLists.txt compiles the kernels, for tests that compile some of them on their own."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from specc.kernels.native import SOURCE_DIR as SOURCE_DIR

ROOT = Path(__file__).parents[1]
# a source that another one includes has no object of its own
_INCLUDED = re.compile(r'(?m)^#include "(\w+\.cpp)"$')


def kernel_flags(source: str, isa: str = "native") -> list[str]:
    """Flags of the compiler for a source of kernels/cpu, as a shared library.

    Args:
        source: its name; it may be part of a unit.
        isa: for `-march`.
    """
    text = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    common = re.search(r"add_compile_options\(([^$]*)", text)
    rounded = re.search(r'COMPILE_OPTIONS\s+"([^"]*)"', text)
    assert common is not None
    assert rounded is not None
    flags = ["-std=c++20", "-fPIC", "-fopenmp", f"-march={isa}", *common[1].split()]
    return [*flags, *rounded[1].split(";")] if unit_of(source) in rounded_units() else flags


def rounded_units() -> set[str]:
    """Sources whose sums have the bits of an oracle: compiled as they are written."""
    text = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    found = re.search(r"set\(rounded_as_written ([^)]*)\)", text)
    assert found is not None
    return set(found[1].split())


def units() -> dict[str, list[str]]:
    """Source that the compiler is called on → the sources that it consists of."""
    names = sorted(path.name for path in SOURCE_DIR.glob("*.cpp"))
    parts = {name: _INCLUDED.findall((SOURCE_DIR / name).read_text("utf-8")) for name in names}
    included = {part for each in parts.values() for part in each}
    return {name: parts[name] or [name] for name in names if name not in included}


def unit_of(source: str) -> str:
    return next(unit for unit, parts in units().items() if source in parts)


def run_compiler(command: list[str]) -> None:
    """Run it; what it says is in the error where it fails."""
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[:4000]
