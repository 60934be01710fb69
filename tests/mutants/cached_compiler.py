"""A C++ compiler that keeps what it makes of each source, so that a mutant compiles one file.

    cached_compiler.py COMPILER DIRECTORY ARGUMENT…

Stands for COMPILER. Of a call that makes one object of one source, the object is kept under a hash
of the arguments, the source, and the headers beside it that it includes; every other call is passed
on. A macro that the command line defines counts only for sources in whose text it stands.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path


def main(compiler: str, directory: Path, arguments: list[str]) -> int:
    """Do what the compiler would do; returns its exit status."""
    source = next((Path(a) for a in arguments if a.endswith(".cpp")), None)
    if source is None or "-c" not in arguments or "-o" not in arguments:
        os.execvp(compiler, [compiler, *arguments])
    made = Path(arguments[arguments.index("-o") + 1])
    kept = directory / f"{_key(source, made, arguments)}.o"
    pairs = [(made, kept)]
    if "-MF" in arguments:
        # the list of what the object is made of, which ninja reads
        pairs.insert(0, (Path(arguments[arguments.index("-MF") + 1]), kept.with_suffix(".d")))
    if kept.exists():
        for target, own in pairs:
            shutil.copyfile(own, target)
        return 0
    status = subprocess.run([compiler, *arguments], check=False).returncode
    if status == 0:
        directory.mkdir(parents=True, exist_ok=True)
        for target, own in pairs:
            draft = own.with_suffix(f"{own.suffix}.{os.getpid()}")
            shutil.copyfile(target, draft)
            draft.replace(own)
    return status


def _key(source: Path, made: Path, arguments: list[str]) -> str:
    digest, texts = hashlib.sha256(), _texts(source)
    for argument in arguments:
        macro = argument.removeprefix("-D").partition("=")[0] if argument[:2] == "-D" else None
        if macro and not any(macro in text for text in texts.values()):
            continue
        if argument == str(made):
            continue
        # wherever the copy is; a list of its files belongs to it
        own = "-MF" not in arguments and argument in (str(source), str(source.parent))
        digest.update((Path(argument).name if own else argument).encode() + b"\0")
    for name, text in sorted(texts.items()):
        digest.update(name.encode() + b"\0" + text.encode() + b"\0")
    return digest.hexdigest()[:24]


def _texts(source: Path) -> dict[str, str]:
    """Text by name of a source and of all that it includes of its own directory."""
    found: dict[str, str] = {}
    waiting = [source.name]
    while waiting:
        name = waiting.pop()
        path = source.with_name(name)
        if name in found or not path.is_file():
            continue
        found[name] = path.read_text(encoding="utf-8")
        waiting += re.findall(r'^\s*#include "([^"]+)"', found[name], re.MULTILINE)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
