"""Which tile is fastest for products of few rows: Llama shapes of 8B and 1B, in bfloat16.

    python3 -P tests/gpu/sweep_tiles.py --seconds 60 --output FILE     on a GPU
    python3 -P tests/gpu/sweep_tiles.py --dry-run --output FILE        every path without one

Calls of a candidate are one CUDA graph over copies of the weight that no cache holds together.
Candidates of all shapes take turns until four fifths of the time are over; the best of each shape
are then launched dependently, and layers without attention are measured with the library's
products, with the tiles of the product's tables, and with the best ones, both ways.

The work is a process of its own: after one that dies or hangs the next goes on with what follows.
Lines of FILE.lines are written as soon as they are known, FILE at the end: `found` has microseconds
of a call by shape, rows, candidate and `is_dependent`, or `error`; `layers` those of one layer.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROWS = (1, 8)
# bytes of the copies of a weight, at least: several times a cache of 60 MB
LEAST_BYTES = 250 << 20
# of the memory that weights are parts of
POOL_BYTES = 4 << 30
# of a result against the library's, as the choice of products has it
MOST_OFF = 5e-2
# calls of a graph at least
LEAST_CALLS = 16
SWEEP_SHARE = 0.8
# the best of each shape, which are launched dependently, too
FINALISTS = 4
LAYERS = 8


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


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--most", type=int, help="candidates of a shape, at most")
    parser.add_argument("--is-child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=math.inf, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def work(options: argparse.Namespace) -> None:
    """All that there is time for, and was not begun before."""
    from tests.gpu.graph_timer import Graphs, NoGraphs, launch_nothing

    if options.dry_run:
        with launch_nothing():
            Sweep(options, NoGraphs()).run()
        return
    Sweep(options, Graphs()).run()


class Sweep:
    """Measurements until time is over."""

    def __init__(self, options: argparse.Namespace, graphs: Any) -> None:
        from tests.gpu.sweep_lines import append, read
        from tests.gpu.tile_calls import Problem
        from tests.gpu.tile_candidates import SHAPES

        self.graphs, self.most = graphs, options.most
        self.lines = Path(f"{options.output}.lines")
        self.until = min(options.until, time.time() + options.seconds)
        self.sweep_until = self.until - (1 - SWEEP_SHARE) * options.seconds
        events = read(self.lines)
        self.known = {_key(event) for event in events if event["event"] in ("begin", "found")}
        self.found = [event for event in events if event["event"] == "found"]
        self.pool = graphs.weights(POOL_BYTES)
        self.problems = {
            (shape, rows): Problem(shape, rows, graphs.device) for shape in SHAPES for rows in ROWS
        }
        self._wanted: dict[Any, Any] = {}
        self._append = partial(append, self.lines)
        self._append({"event": "facts", **graphs.facts()})

    def run(self) -> None:
        from tests.gpu.tile_candidates import name_of

        for shape, rows in self.problems:
            self.measure(shape, rows, "library", None, False)
            self.measure(shape, rows, "product", None, False)
        for shape, rows, candidate in self._in_turns():
            if time.time() > self.sweep_until:
                break
            self.measure(shape, rows, name_of(candidate), candidate, False)
        for shape, rows in self.problems:
            for candidate in self._best(shape, rows, False)[:FINALISTS]:
                self.measure(shape, rows, name_of(candidate), candidate, True)
            for candidate in self._current(shape, rows)[:1]:
                self.measure(shape, rows, name_of(candidate), candidate, True)
        self.measure_layers()

    def _in_turns(self) -> Iterator[tuple[Any, int, Any]]:
        from tests.gpu.tile_candidates import candidates

        queues = [
            [(shape, rows, item) for item in candidates(shape, rows)[: self.most]]
            for shape, rows in self.problems
        ]
        for turn in itertools.zip_longest(*queues):
            yield from (item for item in turn if item is not None)

    def measure(self, shape: Any, rows: int, name: str, candidate: Any, is_dependent: bool) -> None:
        """Once, whatever becomes of it."""
        from specc.kernels.cuda.launch import dependent_launches

        item: dict[str, Any] = {"shape": shape.name, "rows": rows, "candidate": name}
        item["is_dependent"] = is_dependent
        if _key(item) in self.known or time.time() > self.until:
            return
        self._append({"event": "begin", **item})
        problem = self.problems[shape, rows]
        copies = max(2, math.ceil(LEAST_BYTES / shape.bytes))
        weights = self.weights(shape, copies)
        calls = copies * math.ceil(min(LEAST_CALLS, 4 * copies) / copies)

        def call(weight: Any) -> Any:
            is_product = name == "product"
            return problem.product_alone(weight) if is_product else problem.call(candidate, weight)

        def run() -> None:
            for i in range(calls):
                call(weights[i % copies])

        with dependent_launches(is_dependent):
            try:
                result = call(weights[0])
                if name != "product":
                    # a product alone has another result
                    item["off"] = round(self.graphs.off(result, self.wanted(shape, rows)), 6)
                    if item["off"] > MOST_OFF:
                        raise ArithmeticError(f"results differ by {item['off']}")
                item["us"] = round(self.graphs.microseconds(run) / calls, 3)
                item["of_floor"] = round(item["us"] * 4.19e6 / shape.bytes, 3)
            except Exception as error:
                item["error"] = f"{type(error).__name__}: {error}"[:300]
        self._append({"event": "found", **item})
        self.found.append(item)
        # where a kernel has broken the device this process ends, and another goes on
        self.graphs.wait()

    def wanted(self, shape: Any, rows: int) -> Any:
        """The library's results."""
        if (shape, rows) not in self._wanted:
            (weight,) = self.weights(shape, 1)
            self._wanted[shape, rows] = self.problems[shape, rows].call(None, weight)
        return self._wanted[shape, rows]

    def weights(self, shape: Any, count: int, begin: int = 0) -> list[Any]:
        """Matrices of the pool, from this element on; they overlap where it is too small."""
        size = shape.n * shape.k
        places = (begin + i * size for i in range(count))
        room = self.pool.numel() - size
        return [
            self.pool[place % (room + 1) // 1024 * 1024 :][:size].view(shape.n, shape.k)
            for place in places
        ]

    def _best(self, shape: Any, rows: int, is_dependent: bool) -> list[Any]:
        """Candidates that ran, the fastest first."""
        from tests.gpu.tile_candidates import candidates, name_of

        named = {name_of(item): item for item in candidates(shape, rows)}
        times = {
            item["candidate"]: item["us"]
            for item in self.found
            if (item["shape"], item["rows"]) == (shape.name, rows)
            and item["is_dependent"] == is_dependent
            and "us" in item
        }
        return [named[name] for name in sorted(times, key=lambda n: times[n]) if name in named]

    def _current(self, shape: Any, rows: int) -> list[Any]:
        """Those of the product's tables."""
        from tests.gpu.tile_candidates import current

        tiles = current(shape, rows)
        return [item for item in self._best(shape, rows, False) if item in tiles]

    def measure_layers(self) -> None:
        """A layer without attention, of several in a row, with one choice of tiles or another."""
        from tests.gpu.tile_candidates import MODELS

        for (model, shapes), rows in itertools.product(MODELS.items(), ROWS):
            qkv, o, gate_up, down, _ = shapes
            layer = (qkv, o, gate_up, down)
            chosen: dict[str, dict[Any, Any]] = {"library": dict.fromkeys(layer)}
            chosen["tables"] = {s: next(iter(self._current(s, rows)), None) for s in layer}
            chosen["best"] = {s: next(iter(self._best(s, rows, False)), None) for s in layer}
            chosen["best dependent"] = {
                s: next(iter(self._best(s, rows, True)), chosen["best"][s]) for s in layer
            }
            for (name, choice), is_dependent in itertools.product(chosen.items(), (False, True)):
                self._measure_layer(model, layer, rows, name, choice, is_dependent)

    def _measure_layer(
        self, model: str, layer: Any, rows: int, name: str, choice: Any, is_dependent: bool
    ) -> None:
        from specc.kernels.cuda.launch import dependent_launches
        from tests.gpu.tile_calls import Layers
        from tests.gpu.tile_candidates import name_of

        item: dict[str, Any] = {"model": model, "rows": rows, "choice": name}
        item |= {"is_dependent": is_dependent}
        item["tiles"] = {s.name: name_of(c) if c else "library" for s, c in choice.items()}
        if time.time() > self.until:
            return
        size = sum(shape.n * shape.k for shape in layer)
        weights: list[dict[Any, Any]] = []
        for i in range(LAYERS):
            begin, found = i * size, {}
            for shape in layer:
                (found[shape],) = self.weights(shape, 1, begin)
                begin += shape.n * shape.k
            weights.append(found)
        layers = Layers(layer, rows, self.graphs.device)

        def run() -> Any:
            return layers.run(choice, weights)

        try:
            with dependent_launches(False):
                wanted = run()
            with dependent_launches(is_dependent):
                item["off"] = self.graphs.off([run()], [wanted])
                item["us"] = round(self.graphs.microseconds(run) / LAYERS, 3)
            item["of_floor"] = round(item["us"] * 4.19e6 / (2 * size), 3)
        except Exception as error:
            item["error"] = f"{type(error).__name__}: {error}"[:300]
        self._append({"event": "layers", **item})
        self.graphs.wait()


def _key(item: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(item[name] for name in ("shape", "rows", "candidate", "is_dependent"))


if __name__ == "__main__":
    sys.exit(main())
