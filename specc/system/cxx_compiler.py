"""The C++ compiler of this machine: which one it is, and how old."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

from specc.errors import CompilerError
from specc.system.file_cache import FileCache

# the oldest versions whose C++20 reads torch's headers
_NEEDED_COMPILERS = {"gcc": (11,), "clang": (14,)}


def find_compiler() -> str:
    """Path of a C++ compiler: `CXX`, else g++ or clang++.

    A `CXX` of several words, like `ccache g++`, becomes a script in the cache, since Inductor
    takes the path of one executable.

    Raises:
        CompilerError: there is none, or it is too old.
    """
    explicit = os.environ.get("CXX")
    names = [explicit] if explicit else ["g++", "clang++"]
    path = next((found for name in names if (found := shutil.which(name))), None)
    if path is None and explicit:
        path = _as_executable(explicit)
    if path is None:
        raise CompilerError(
            f"no C++ compiler (looked for {', '.join(names)})",
            "g++ 11 or newer, or clang++ 14 or newer",
            "apt-get install g++, set CXX, or compile with --backend eager",
        )
    kind, version = compiler_version(path)
    needed = _NEEDED_COMPILERS[kind]
    if version < needed:
        raise CompilerError(
            f"{path} is {kind} {'.'.join(map(str, version))}",
            f"{kind} {needed[0]} or newer",
            "install a newer one, set CXX to it, or compile with --backend eager",
        )
    return path


def _as_executable(command: str) -> str | None:
    """Path that stands for a command with arguments; None where its program is not found.

    Raises:
        CompilerError: it does not answer, or the cache cannot be written.
    """
    try:
        words = shlex.split(command)
    except ValueError:  # a quotation that does not end
        return None
    program = shutil.which(words[0]) if words else None
    if program is None or len(words) == 1:
        return program
    words[0] = program
    # Inductor tells compilers apart by their names, too
    name = "clang++" if _version(tuple(words))[0] == "clang" else "g++"
    text = f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n'
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    cache, place = FileCache(), f"compilers/{key}/{name}"

    def make(scratch: Path) -> Path:
        made = scratch / name
        try:
            made.write_text(text, encoding="utf-8")
            made.chmod(0o755)
        except OSError as error:
            raise cache.error(made, error) from error
        return made

    cache.obtain(place, make)
    return str(cache.path(place))


def compiler_version(path: str) -> tuple[str, tuple[int, ...]]:
    """`("gcc", (12, 2, 0))` of a compiler.

    Raises:
        CompilerError: it does not answer.
    """
    return _version((path,))


@functools.cache
def _version(command: tuple[str, ...]) -> tuple[str, tuple[int, ...]]:
    try:
        result = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise CompilerError(
            f"{shlex.join(command)} --version failed: {error}",
            "a working C++ compiler",
            "repair it, set CXX to another, or compile with --backend eager",
        ) from error
    first = result.stdout.splitlines()[0] if result.stdout else ""
    found = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", first.rsplit(")", 1)[-1] or first)
    version = tuple(int(part) for part in found.groups(default="0")) if found else (0,)
    return ("clang" if "clang" in first else "gcc"), version
