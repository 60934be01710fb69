"""A process of `tests.gpu.shapes`: one case."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.gpu.shapes import measure

if __name__ == "__main__":
    measure(sys.argv[1], *map(Path, sys.argv[2:]))
