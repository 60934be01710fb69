"""Which tile is fastest for products of few rows: Llama shapes of 8B and 1B, in bfloat16.

Calls of a candidate are one CUDA graph over copies of the weight that no cache holds together.
Candidates of all shapes take turns until four fifths of the time are over; the best of each shape
are then launched dependently, and layers without attention are measured with the library's
products, with the tiles of the product's tables, and with the best ones, both ways.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor

from specc.kernels.cuda.few_rows_tiles import Tile
from specc.kernels.cuda.launch import dependent_launches
from tests.gpu.graph_timer import launch_nothing
from tests.gpu.results import Device, Results
from tests.gpu.sweep import Sweep
from tests.gpu.tile_calls import Layers, Problem
from tests.gpu.tile_candidates import MODELS, SHAPES, Shape, candidates, current, name_of

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
# candidates of a shape, at most
MOST: int | None = None


def measure(results: Results, device: Device, seconds: float) -> None:
    """All that there is time for."""
    device.prepare()
    if device.kind == "cuda":
        TileSweep(results, device, seconds).run()
        return
    with launch_nothing():
        TileSweep(results, device, seconds).run()


class TileSweep(Sweep):
    """See `measure`."""

    def __init__(self, results: Results, device: Device, seconds: float) -> None:
        super().__init__(results, device, seconds)
        self._sweep_until = time.monotonic() + SWEEP_SHARE * seconds
        self._pool = self.graphs.weights(POOL_BYTES)
        place = self.graphs.device
        self._problems = {
            (shape, rows): Problem(shape, rows, place) for shape in SHAPES for rows in ROWS
        }
        self._wanted: dict[Any, tuple[Tensor, ...]] = {}

    def run(self) -> None:
        self.results.note(**self.graphs.facts())
        for shape, rows in self._problems:
            self.time(shape, rows, "library", None, False)
            self.time(shape, rows, "product", None, False)
        for shape, rows, candidate in self._in_turns():
            if time.monotonic() > self._sweep_until:
                break
            self.time(shape, rows, name_of(candidate), candidate, False)
        for shape, rows in self._problems:
            best = self._best(shape, rows, False)
            for candidate in [*best[:FINALISTS], *self._current(shape, rows)[:1]]:
                self.time(shape, rows, name_of(candidate), candidate, True)
        self.measure_layers()
        self.note_best()

    def _in_turns(self) -> Iterator[tuple[Shape, int, Tile]]:
        queues = [
            [(shape, rows, item) for item in candidates(shape, rows)[:MOST]]
            for shape, rows in self._problems
        ]
        for turn in itertools.zip_longest(*queues):
            yield from (item for item in turn if item is not None)

    def time(
        self, shape: Shape, rows: int, name: str, tile: Tile | None, is_dependent: bool
    ) -> None:
        if name not in self.times(shape.name, rows, is_dependent):
            time_it = partial(self._time, shape, rows, name, tile, is_dependent)
            self.measure(shape.name, rows, name, is_dependent, time_it)

    def _time(
        self, shape: Shape, rows: int, name: str, tile: Tile | None, is_dependent: bool
    ) -> dict[str, Any]:
        problem = self._problems[shape, rows]
        copies = max(2, math.ceil(LEAST_BYTES / shape.bytes))
        weights = self.weights(shape, copies)
        calls, found = copies * math.ceil(min(LEAST_CALLS, 4 * copies) / copies), {}

        def call(weight: Tensor) -> tuple[Tensor, ...]:
            is_product = name == "product"
            return problem.product_alone(weight) if is_product else problem.call(tile, weight)

        def run() -> None:
            for i in range(calls):
                call(weights[i % copies])

        with dependent_launches(is_dependent):
            result = call(weights[0])
            if name != "product":
                # a product alone has another result
                found["off"] = round(self.graphs.off(result, self.wanted(shape, rows)), 6)
                if found["off"] > MOST_OFF:
                    raise ArithmeticError(f"results differ by {found['off']}")
            us = self.graphs.microseconds(run) / calls
        return found | {"us": round(us, 3), "of_floor": round(us * 4.19e6 / shape.bytes, 3)}

    def wanted(self, shape: Shape, rows: int) -> tuple[Tensor, ...]:
        """The library's results."""
        if (shape, rows) not in self._wanted:
            (weight,) = self.weights(shape, 1)
            self._wanted[shape, rows] = self._problems[shape, rows].call(None, weight)
        return self._wanted[shape, rows]

    def weights(self, shape: Shape, count: int, begin: int = 0) -> list[Tensor]:
        """Matrices of the pool, from this element on; they overlap where it is too small."""
        size = shape.n * shape.k
        places = (begin + i * size for i in range(count))
        room = self._pool.numel() - size
        return [
            self._pool[place % (room + 1) // 1024 * 1024 :][:size].view(shape.n, shape.k)
            for place in places
        ]

    def _best(self, shape: Shape, rows: int, is_dependent: bool) -> list[Tile]:
        """Candidates that ran, the fastest first."""
        named = {name_of(item): item for item in candidates(shape, rows)}
        times = self.times(shape.name, rows, is_dependent)
        return [named[name] for name in times if name in named]

    def _current(self, shape: Shape, rows: int) -> list[Tile]:
        """Those of the product's tables."""
        tiles = current(shape, rows)
        return [item for item in self._best(shape, rows, False) if item in tiles]

    def measure_layers(self) -> None:
        """A layer without attention, of several in a row, with one choice of tiles or another."""
        for (model, shapes), rows in itertools.product(MODELS.items(), ROWS):
            qkv, o, gate_up, down, _ = shapes
            layer = (qkv, o, gate_up, down)
            chosen: dict[str, dict[Shape, Tile | None]] = {"library": dict.fromkeys(layer)}
            chosen["tables"] = {s: next(iter(self._current(s, rows)), None) for s in layer}
            chosen["best"] = {s: next(iter(self._best(s, rows, False)), None) for s in layer}
            chosen["best dependent"] = {
                s: next(iter(self._best(s, rows, True)), chosen["best"][s]) for s in layer
            }
            for (name, choice), is_dependent in itertools.product(chosen.items(), (False, True)):
                time_it = partial(self._time_layer, layer, rows, choice, is_dependent)
                self.measure(f"layer of {model}", rows, name, is_dependent, time_it)

    def _time_layer(
        self,
        layer: tuple[Shape, ...],
        rows: int,
        choice: dict[Shape, Tile | None],
        is_dependent: bool,
    ) -> dict[str, Any]:
        size = sum(shape.n * shape.k for shape in layer)
        weights: list[dict[Shape, Tensor]] = []
        for i in range(LAYERS):
            begin, found = i * size, {}
            for shape in layer:
                (found[shape],) = self.weights(shape, 1, begin)
                begin += shape.n * shape.k
            weights.append(found)
        layers = Layers(layer, rows, self.graphs.device)

        def run() -> Tensor:
            return layers.run(choice, weights)

        with dependent_launches(False):
            wanted = run()
        with dependent_launches(is_dependent):
            off = self.graphs.off([run()], [wanted])
            us = self.graphs.microseconds(run) / LAYERS
        tiles = {s.name: name_of(tile) if tile else "library" for s, tile in choice.items()}
        of_floor = round(us * 4.19e6 / (2 * size), 3)
        return {"off": off, "us": round(us, 3), "of_floor": of_floor, "tiles": tiles}
