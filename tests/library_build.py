"""The library of the CPU's operators beside the installed one: of other flags or sources."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def cmake() -> str | None:
    """The program, of this environment or the system; None where there is none."""
    own = Path(sys.executable).with_name("cmake")
    return str(own) if own.is_file() else shutil.which("cmake")


class LibraryBuild:
    """Objects of a checkout's library; what has not changed is not compiled again.

    Args:
        output: for the libraries, `SPECC_LIBRARY_DIR` of who is to use them.
        options: of CMake, such as `-DSPECC_FLAGS=-g`.
        environment: of all commands; None: this process's.
    """

    def __init__(
        self,
        root: Path,
        folder: Path,
        output: Path,
        options: Sequence[str] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        self.root, self.folder, self.output = root, folder, output
        self._options = [*options, f"-DSPECC_OUTPUT={output}"]
        self._options += [f"-DPython_EXECUTABLE={sys.executable}"]
        # ninja of this environment, too
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        self._environment = {**(environment or os.environ), "PATH": path}

    def build(self, *sets: str) -> subprocess.CompletedProcess[str]:
        """Build the libraries of these sets, or that of the best one.

        Returns:
            how the build ended, with all that was said.
        """
        program = cmake()
        assert program is not None, "cmake is what an installation has built the library with"
        if not (self.folder / "build.ninja").is_file():
            command = [program, "-S", str(self.root), "-B", str(self.folder), "-G", "Ninja"]
            done = self._run([*command, *self._options])
            if done.returncode:
                return done
        targets = [word for name in sets for word in ("--target", f"specc_cpu_{name}")]
        return self._run([program, "--build", str(self.folder), *targets])

    def _run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._environment,
        )
