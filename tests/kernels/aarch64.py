"""The tests of the CPU operators against the library for aarch64, in an emulator.

    make aarch64 PYTEST_ARGS="--isa neon tests/kernels/test_commit_kv.py"

Needs a cross compiler and QEMU's user emulation (Debian: g++-aarch64-linux-gnu, qemu-user). The
library is built as by the package, in build/aarch64; Python and the oracles run on this machine.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORK = ROOT / "build" / "aarch64"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
SYSROOT = Path("/usr/aarch64-linux-gnu")
# tests of operators that call them through `implementation` or `native_operators`
FILES = (
    "test_accept_winners.py", "test_attend_expanded.py", "test_block_mass.py",
    "test_column_winners.py", "test_commit_kv.py", "test_node_winners.py", "test_slab_rows.py",
    "test_tree_attention.py", "test_tree_conv.py", "test_tree_expand.py",
    "test_tree_recurrence.py", "cpu/test_grouped_linear.py",
    "cpu/test_grouped_q.py", "cpu/test_tree_attention.py",
)  # fmt: skip


def missing() -> str | None:
    """What is not here; None where all is."""
    for program in (COMPILER, EMULATOR, "cmake", "ninja"):
        if shutil.which(program) is None:
            return program
    return None if SYSROOT.is_dir() else str(SYSROOT)


def build(isa: str) -> str:
    """The command that serves calls of a set's library.

    Raises:
        CalledProcessError: it cannot be built.
    """
    cmake = ["cmake", "-S", str(ROOT), "-B", str(WORK), "-G", "Ninja"]
    cmake += ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64"]
    cmake += [f"-DCMAKE_CXX_COMPILER={COMPILER}", f"-DSPECC_OUTPUT={WORK / 'lib'}"]
    subprocess.run([*cmake, "-DSPECC_ISAS=all"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", str(WORK), "--target", f"specc_cpu_{isa}"], check=True)
    server = WORK / "call_server"
    source = Path(__file__).with_name("call_server.cpp")
    include = f"-I{ROOT / 'kernels' / 'cpu'}"
    subprocess.run(
        [COMPILER, "-std=c++20", "-O1", include, str(source), "-o", str(server), "-ldl"], check=True
    )
    library = WORK / "lib" / f"libspecc_cpu-{isa}.so"
    return shlex.join([EMULATOR, "-cpu", "max", "-L", str(SYSROOT), str(server), str(library)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--isa", default="neon_i8mm")
    args, rest = parser.parse_known_args()
    if (absent := missing()) is not None:
        print(f"found:  no {absent}", file=sys.stderr)
        print("needed: a cross compiler and an emulator for aarch64", file=sys.stderr)
        print("do:     apt-get install g++-aarch64-linux-gnu qemu-user", file=sys.stderr)
        return 2
    environment = {**os.environ, "SPECC_TEST_REMOTE": build(args.isa), "OMP_NUM_THREADS": "1"}
    files = [str(Path(__file__).parent / name) for name in FILES]
    pytest = str(Path(sys.executable).with_name("pytest"))
    command = [pytest, "-k", "not reference", *(rest or files)]
    return subprocess.run(command, env=environment, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
