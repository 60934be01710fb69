"""Products of few rows by quantized weights on a GPU: fragments beside the older forms and bf16.

    python3 -P tests/gpu/sweep_quantized.py --seconds 140 --output FILE     on a GPU
    python3 -P tests/gpu/sweep_quantized.py --dry-run --output FILE         every path without one

First what a device does at all: copies, reads from its cache, and launches that do nothing. Then
every layout is compared with its decoded weight, 50 times over, and rows with the same rows among
others; what differs is not timed. Then the older forms and bfloat16, and tiles of fragments, int4
first. Last, the products of layers one after the other, launched ordinarily and dependently.

Calls of a candidate are one CUDA graph over copies of the weight that no cache holds together. A
candidate whose first replay takes `HOPELESS` times the best of its product is not timed again. If
int4 is at its aim after `FIRST_SHARE` of the time, other layouts get its best tiles only.

A process that dies or hangs is followed by one that goes on with the next candidate; FILE is as
`sweep_tiles` leaves it.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path


def main() -> int:
    options = parse(sys.argv[1:])
    from importlib import util

    spec = util.spec_from_file_location("importable", Path(__file__).with_name("importable.py"))
    assert spec is not None
    assert spec.loader is not None
    importable = util.module_from_spec(spec)
    spec.loader.exec_module(importable)
    with importable.importable() as site:
        from tests.gpu.sweep_lines import run

        return run(__file__, options, work, site)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=140.0)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--most", type=int, help="candidates of a product, at most")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 6, 16])
    parser.add_argument("--is-child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=math.inf, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def work(options: argparse.Namespace) -> None:
    """All that there is time for, and was not begun before."""
    from tests.gpu.graph_timer import Graphs, NoGraphs, launch_nothing
    from tests.gpu.quantized_sweep import Sweep

    if options.dry_run:
        with launch_nothing():
            Sweep(options, NoGraphs()).run()
        return
    Sweep(options, Graphs()).run()


if __name__ == "__main__":
    sys.exit(main())
