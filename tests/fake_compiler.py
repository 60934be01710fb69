"""Compilers that only say that they are some, and count how often they are called."""

from __future__ import annotations

from pathlib import Path

# writes its last input where -o says
FAKE_BUILD = """
while [ $# -gt 0 ]; do
  case "$1" in -o) out="$2"; shift;; *) last="$1";; esac
  shift
done
echo "$out" >> "$(dirname "$0")/runs"
echo "made of $last" > "$out"
"""


def fake_compiler(folder: Path, version: str, script: str = FAKE_BUILD, name: str = "g++") -> Path:
    """Make an executable in `folder` that says this version, and runs this script otherwise."""
    path = folder / name
    folder.mkdir(exist_ok=True)
    answer = f'if [ "$1" = --version ]; then echo "{version}"; exit 0; fi\n' if version else ""
    path.write_text(f"#!/bin/sh\n{answer}{script}")
    path.chmod(0o755)
    return path
