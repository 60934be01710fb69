"""Objects are kept by what they are made of, and only they."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("cached_compiler.py")
# says what it was asked for, and "compiles"
COMPILER = """#!/bin/sh
echo "$@" >> {log}
while [ "$1" != -o ]; do shift; done
echo made > "$2"
"""


def test_a_source_is_compiled_again_where_it_has_changed(tmp_path):
    log, compiler, source = (tmp_path / name for name in ("log", "compiler", "a.cpp"))
    compiler.write_text(COMPILER.format(log=log), encoding="utf-8")
    compiler.chmod(0o755)
    source.write_text('#include "b.h"\nint a = MACRO;\n', encoding="utf-8")
    (tmp_path / "b.h").write_text('#include "c.h"\n', encoding="utf-8")

    def num_compiled(*flags: str, output: str = "a.o", cwd: Path = tmp_path) -> int:
        made = tmp_path / output
        made.unlink(missing_ok=True)
        command = [sys.executable, SCRIPT, compiler, tmp_path / "objects", *flags]
        subprocess.run([*command, "-c", source, "-o", made], check=True, cwd=cwd)
        assert made.read_text(encoding="utf-8") == "made\n"
        return len(log.read_text(encoding="utf-8").splitlines())

    assert num_compiled("-O1") == num_compiled("-O1", output="other.o") == 1
    assert num_compiled("-O2") == 2
    # a macro counts where it is used
    assert num_compiled("-O1", "-DOTHER=1") == 2
    assert num_compiled("-O1", "-DMACRO=1") == 3
    assert num_compiled("-O1", "-DMACRO=2") == 4
    (tmp_path / "c.h").write_text("int c;\n", encoding="utf-8")
    assert num_compiled("-O1") == 5
    source.write_text("int a;\n", encoding="utf-8")
    assert num_compiled("-O1") == 6
    # the list of what it is made of is kept along
    listed, again = tmp_path / "one" / "a.o.d", tmp_path / "other" / "a.o.d"
    for path in (listed, again):
        path.parent.mkdir()
        if path == listed:
            path.write_text("a.o: a.cpp\n", encoding="utf-8")
        assert num_compiled("-O1", "-MD", "-MF", "a.o.d", cwd=path.parent) == 7
    assert again.read_text(encoding="utf-8") == "a.o: a.cpp\n"
    # what makes no object is passed on
    subprocess.run([sys.executable, SCRIPT, compiler, tmp_path, "-o", tmp_path / "x"], check=True)
    assert len(log.read_text(encoding="utf-8").splitlines()) == 8
