"""The file of the CPU operators' library that a process opens: for its processor's instructions.

CMakeLists.txt builds a library for each set, `libspecc_cpu-SET.so`, with the flags that it has
there. A wheel has those of all sets, a checkout that of the machine it was installed on, and those
that were built besides. SPECC_ISA chooses another one than the best.

As a script this prints the best set of this machine; the build calls it so, before there is a
package: nothing of specc is imported here unless something is wrong.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

LIBRARY_DIR = Path(__file__).parent / "lib"
SOURCE_DIR = Path(__file__).parent / "cpu"
# resolved: a copy of a checkout has links to its packages
CHECKOUT = Path(__file__).resolve().parents[1]
# where else libraries may lie: of tests with other flags
DIR_VARIABLE = "SPECC_LIBRARY_DIR"
ISA_VARIABLE = "SPECC_ISA"

# of x86-64-v3 and -v4, as /proc/cpuinfo calls them
_V3 = frozenset(("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"))
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_DOTPROD = frozenset(("asimd", "asimddp"))
# machine → set → what a processor has to have; the best set comes first
_SETS: Mapping[str, Mapping[str, frozenset[str]]] = {
    "x86_64": {
        "avx512_bf16": _V4 | {"avx512_vnni", "avx512_bf16"},
        "avx512_vnni": _V4 | {"avx512_vnni"},
        "avx512": _V4,
        "avx2": _V3,
    },
    "aarch64": {
        "neon_i8mm": _DOTPROD | {"i8mm"},
        "neon_dotprod": _DOTPROD,
        "neon": frozenset(),
    },
}
_MACHINES = {"AMD64": "x86_64", "amd64": "x86_64", "arm64": "aarch64"}
_FLAGS = re.compile(r"^(?:flags|Features)\s*:(.*)$", re.MULTILINE)


def known_sets(machine: str | None = None) -> Mapping[str, frozenset[str]]:
    """Set → what a processor has to have, the best one first.

    Args:
        machine: as `platform.machine` says; None: this one.
    """
    name = platform.machine() if machine is None else machine
    return _SETS.get(_MACHINES.get(name, name), {})


def processor_flags(path: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """What this processor and its system can do, by the names of Linux; none where it is not."""
    try:
        match = _FLAGS.search(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        match = None
    return frozenset(match[1].split()) if match else frozenset()


def usable_sets(flags: frozenset[str] | None = None, machine: str | None = None) -> list[str]:
    """The sets of a processor, the best one first.

    Args:
        flags: of it; None: this one's.
        machine: see `known_sets`.
    """
    has = processor_flags() if flags is None else flags
    return [name for name, needs in known_sets(machine).items() if needs <= has]


def chosen_set(built: Mapping[str, Path]) -> str:
    """The set whose library this process opens: what SPECC_ISA says, or the best that is built.

    Args:
        built: set → file.
    Raises:
        ConfigError: SPECC_ISA names no set, or one that this processor lacks.
        EngineError: there is no library for this processor.
    """
    from specc.errors import ConfigError, EngineError

    usable = usable_sets()
    asked = os.environ.get(ISA_VARIABLE)
    if asked:
        if asked not in known_sets():
            raise ConfigError(
                f"{ISA_VARIABLE}={asked}",
                f"one of {', '.join(known_sets()) or 'no set: this machine has none'}",
                f"unset {ISA_VARIABLE}, or choose another one",
            )
        if asked not in usable:
            lacking = ", ".join(sorted(known_sets()[asked] - processor_flags()))
            raise ConfigError(
                f"{ISA_VARIABLE}={asked}, and a processor without {lacking}",
                f"one of {', '.join(usable)}" if usable else "another processor",
                f"unset {ISA_VARIABLE}, or choose another one",
            )
        if asked not in built:
            raise EngineError(
                f"no library of the CPU operators for {asked} in {library_dir()} ({_names(built)})",
                f"libspecc_cpu-{asked}.so",
                _how_to_build(asked),
            )
        return asked
    for name in usable:
        if name in built:
            return name
    raise EngineError(
        f"no library of the CPU operators for this processor in {library_dir()} ({_names(built)})",
        f"one of {', '.join(usable)}" if usable else "an x86-64 processor with AVX2, or aarch64",
        _how_to_build(usable[0]) if usable else "use another machine, or --backend eager",
    )


def library_dir() -> Path:
    """Where this installation's libraries are."""
    return Path(os.environ.get(DIR_VARIABLE) or LIBRARY_DIR)


def built_libraries() -> dict[str, Path]:
    """Set → file, of those that are there."""
    places = {name: library_dir() / f"libspecc_cpu-{name}.so" for name in known_sets()}
    return {name: path for name, path in places.items() if path.is_file()}


def library_path() -> Path:
    """The file that this process opens.

    Raises:
        ConfigError: SPECC_ISA names no set, or one that this processor lacks.
        EngineError: there is no library for this processor, or its sources have changed since.
    """
    built = built_libraries()
    name = chosen_set(built)
    path = built[name]
    if (newer := changed_source(path)) is not None:
        from specc.errors import EngineError

        raise EngineError(
            f"{newer} is newer than {path}", "the library of these sources", _how_to_build(name)
        )
    return path


def changed_source(library: Path, folder: Path = SOURCE_DIR) -> Path | None:
    """A source that is newer than a library; None where there is none, as in wheels."""
    made = library.stat().st_mtime_ns
    if not (CHECKOUT / "CMakeLists.txt").is_file():
        return None
    sources = (path for path in folder.glob("*") if path.suffix in (".cpp", ".h"))
    return next((path for path in sources if path.stat().st_mtime_ns > made), None)


def _names(built: Mapping[str, Path]) -> str:
    return f"found: {', '.join(built)}" if built else "nothing"


def _how_to_build(name: str) -> str:
    if (CHECKOUT / "CMakeLists.txt").is_file():
        return (
            "pip install -e . in the checkout, or there cmake --build build/library"
            f" --target specc_cpu_{name}"
        )
    return "install specc again: its wheels have all of them"


if __name__ == "__main__":
    found = usable_sets()
    if not found:
        needs = next(reversed(list(known_sets().values())), frozenset())
        lacking = ", ".join(sorted(needs - processor_flags())) or platform.machine()
        raise SystemExit(f"found a processor without what specc needs: {lacking}")
    print(found[0])
