"""A Python to start child processes with."""

from __future__ import annotations

import contextlib
import functools
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


@functools.cache
def interpreter() -> str:
    """A Python of this version; where Python is embedded, `sys.executable` may be another program.

    Raises:
        OSError: there is none.
    """
    major, minor = sys.version_info[:2]
    for path in _candidates():
        check = f"import sys; sys.exit(sys.version_info[:2] != ({major}, {minor}))"
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = [path, "-P", "-S", "-c", check]
            null = subprocess.DEVNULL
            done = subprocess.run(command, stdin=null, stdout=null, stderr=null, timeout=30)
            if done.returncode == 0:
                return path
    raise OSError(f"no Python {major}.{minor} in {sys.prefix} or on the PATH")


def _candidates() -> Iterator[str]:
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    # a host program that is none would take the options for its own
    if sys.executable and Path(sys.executable).name.startswith("python"):
        yield sys.executable
    for prefix in dict.fromkeys((sys.prefix, sys.exec_prefix, sys.base_prefix)):
        yield from (str(Path(prefix) / "bin" / own) for own in (name, "python3"))
    yield from filter(None, (shutil.which(own) for own in (name, "python3")))
