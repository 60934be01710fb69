"""An installed wheel has the CPU operators: python -P tests/wheel.py, with that wheel's Python.

Each library that this processor can run is opened, in a process of its own and with no compiler to
be found, and computes; `[tool.cibuildwheel]` calls this.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import specc
from specc.kernels.library_files import built_libraries, usable_sets

CALL = """
import torch
from specc.kernels import native
native.load()
found = native.operator_names()
assert "specc::linear" in found, found
with open("/proc/self/maps") as maps:
    used = sorted({line.split()[-1] for line in maps if "libgomp" in line or "specc_cpu" in line})
assert len(used) == 2, used
rows = torch.tensor([5, 3, 4, 1, 2], dtype=torch.float32)
assert native.sum_floats(rows) == 15.0
print(*used)
"""


def main() -> int:
    root = Path(specc.__file__).parent
    built = built_libraries()
    print(f"{root}: {', '.join(built) or 'no library'}")
    if not set(built) & set(usable_sets()):
        print(f"needed: one of {', '.join(usable_sets())}", file=sys.stderr)
        return 1
    for name in usable_sets():
        if name in built:
            environment = {**os.environ, "SPECC_ISA": name, "PATH": "/nowhere"}
            subprocess.run([sys.executable, "-P", "-c", CALL], check=True, env=environment)
    return 0


if __name__ == "__main__":
    sys.exit(main())
