"""Products of few rows by quantized weights: fragments beside the older forms and bfloat16.

First what a device does at all: copies, reads from its cache, and launches that do nothing. Then
every layout is compared with its decoded weight, 50 times over, and rows with the same rows among
others; what differs is not timed. Then the older forms and bfloat16, and tiles of fragments, int4
first. Last, the products of layers one after the other, launched ordinarily and dependently.

Calls of a candidate are one CUDA graph over copies of the weight that no cache holds together. A
candidate whose first replay takes `HOPELESS` times the best of its product is not timed again. If
int4 is at its aim when its share of the time is over, other layouts get its best tiles only.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from specc.kernels.cuda.few_rows_tiles import Tile, quantized_tiles
from specc.kernels.cuda.launch import dependent_launches
from tests.gpu.graph_timer import launch_nothing
from tests.gpu.quantized_products import (
    CHECKED_ROWS,
    DTYPE,
    FIRST,
    KINDS,
    NORMED_MOST,
    NORMED_ROWS,
    OUTPUTS,
    SHAPES,
    Weight,
    candidates,
    compile_candidate,
    name_of,
)
from tests.gpu.results import Device, Results
from tests.gpu.sweep import Sweep

CHECKED = ("8b o", "8b down")
# bytes of the copies of a weight, at least: several times a cache of 60 MB
LEAST_BYTES = 240 << 20
LEAST_CALLS = 16
# where a norm is rounded before a product, or is not
MOST_OFF = {True: 1.2e-2, False: 8e-3}
REPLAYS = 50
HOPELESS = 1.3
# microseconds of "8b down", one row, at which int4 is where it should be, and the share of the
# seconds after which that is asked
AIM_US, FIRST_SHARE = 12.0, 0.45
# seconds of compiling beforehand, at most
COMPILE_S = 25.0
LAYERS = 8
NORMED = "norm in front"
# candidates of a product, at most
MOST: int | None = None


def measure(
    results: Results, device: Device, seconds: float, rows: Sequence[int] = (1, 6, 16)
) -> None:
    """All that there is time for.

    Args:
        rows: of products.
    """
    device.prepare()
    if device.kind == "cuda":
        QuantizedSweep(results, device, seconds, rows).run()
        return
    with launch_nothing():
        QuantizedSweep(results, device, seconds, rows).run()


class QuantizedSweep(Sweep):
    """See `measure`."""

    def __init__(
        self, results: Results, device: Device, seconds: float, rows: Sequence[int]
    ) -> None:
        super().__init__(results, device, seconds)
        self.rows, self._is_cuda = tuple(rows), device.kind == "cuda"
        self._first_until = time.monotonic() + FIRST_SHARE * seconds
        self._weights: dict[tuple[str, str], Weight] = {}

    def run(self) -> None:
        self.results.note(**self.graphs.facts())
        self.results.check("device", self.device_facts)
        kinds = [kind for kind in KINDS if self.is_right(kind)]
        if self._is_cuda:
            self.results.check("compile", partial(self.compile, kinds))
        for kind, shape, rows in itertools.product(kinds, SHAPES, self.rows):
            self.older_forms(kind, shape, rows)
        for kind in kinds:
            self.sweep(kind)
        for kind, model, rows in itertools.product(kinds[:2], ("8b", "1b"), self.rows[:2]):
            for is_dependent in (False, True):
                self.measure_layers(kind, model, rows, is_dependent)
        self.note_best()

    def device_facts(self) -> dict[str, float]:
        """TB/s of copies, in memory and in a cache, and microseconds of a launch."""
        device, calls, found = self.graphs.device, 20, {}
        for name, size in (("copy 2 GB", 1 << 30), ("copy 240 MB", 120 << 20), ("L2", 20 << 20)):
            source = torch.zeros(size, dtype=torch.uint8, device=device)
            target = torch.empty_like(source)
            target.copy_(source)
            run = partial(_times, calls, partial(target.copy_, source))
            found[name] = round(2 * size * calls / self.graphs.microseconds(run) / 1e6, 3)
        one = torch.zeros(1, device=device)
        one.add_(1)
        us = self.graphs.microseconds(partial(_times, 100, partial(one.add_, 1))) / 100
        return found | {"us of a launch": round(us, 3)}

    def is_right(self, kind: str) -> bool:
        """Compare the table's tiles with the decoded weight; a row with itself among others."""
        found: list[bool] = []
        for shape in CHECKED:
            name = f"{kind} {shape} is right"
            self.results.check(name, partial(self._check, kind, shape, found))
            if name in self.results.known:
                found.append(self.results.known[name]["is_right"])
        return len(found) == len(CHECKED) and all(found)

    def _check(self, kind: str, shape: str, right: list[bool]) -> dict[str, Any]:
        weight, x = self.weight(kind, shape), self.x(shape, max(CHECKED_ROWS))
        alone: dict[Any, Tensor] = {}
        items = []
        for rows in CHECKED_ROWS:
            wanted = x[:rows].float() @ weight.values.T
            wanted = wanted.repeat(1, SHAPES[shape][0] // OUTPUTS).to(DTYPE)
            tile = candidates(kind, rows)[0]
            found = weight.multiply(x[:rows], tile)
            again = [weight.multiply(x[:rows], tile) for _ in range(REPLAYS)]
            first = alone.setdefault((tile.num_warps, tile.block_k), found[:1])
            items.append({
                "rows": rows, "tile": name_of(tile), "off": self.graphs.off([found], [wanted]),
                "repeats": self.graphs.same(again, found),
                "row is the same alone": self.graphs.same([found[:1]], first),
            })  # fmt: skip
        if SHAPES[shape][1] <= NORMED_MOST:
            items += self._check_normed(weight, x)
        is_right = all(
            item["off"] <= MOST_OFF[item["tile"] == NORMED] and item["repeats"] for item in items
        )
        right.append(is_right)
        return {"is_right": is_right, "cases": items}

    def _check_normed(self, weight: Weight, x: Tensor) -> list[dict[str, Any]]:
        items, alone = [], None
        gamma = x[0] + 1
        for rows in NORMED_ROWS:
            operands = x[:rows], x[:rows].roll(1, 1), gamma
            found = weight.normed(*operands)
            again = [weight.normed(*operands) for _ in range(REPLAYS)]
            alone = found[:1] if alone is None else alone
            items.append({
                "rows": rows, "tile": NORMED,
                "off": self.graphs.off([found], [weight.normed_values(*operands)]),
                "repeats": self.graphs.same(again, found),
                "row is the same alone": self.graphs.same([found[:1]], alone),
            })  # fmt: skip
        return items

    def compile(self, kinds: Sequence[str]) -> dict[str, float]:
        """What the sweep launches, in as many processes as there are cores."""
        jobs = [
            (kind, rows, number)
            for kind in kinds
            for rows in self.rows
            for number in range(len(candidates(kind, rows)[:MOST]))
        ]
        begin, failed, done = time.monotonic(), 0, 0
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
            for future in [pool.submit(compile_candidate, *job) for job in jobs]:
                left = begin + COMPILE_S - time.monotonic()
                if left < 0:
                    break
                try:
                    future.result(timeout=left)
                except Exception:
                    failed += 1
                done += 1
            pool.shutdown(wait=False, cancel_futures=True)
        return {"of": len(jobs), "compiled": done - failed, "failed": failed}

    def older_forms(self, kind: str, shape: str, rows: int) -> None:
        """bfloat16 as the library multiplies it, and every form of blocks."""
        if kind == FIRST:
            self.time("bfloat16", shape, rows, "library", None, False)
        if rows in (1, 16) and "down" in shape:
            for number, tile in enumerate(quantized_tiles(kind, DTYPE, rows)):
                self.time(kind, shape, rows, f"{tile.form}-{number}", number, False)

    def sweep(self, kind: str) -> None:
        """Tiles of all products in turns, then the best launched dependently."""
        products = list(itertools.product(SHAPES, self.rows))
        is_first, queues = kind == FIRST, []
        for shape, rows in products:
            tiles = candidates(kind, rows)[:MOST]
            if not is_first and self.is_at_aim():
                best = self.best(FIRST, shape, rows)[:3]
                tiles = [tile for tile in tiles if _is_alike(name_of(tile), best)] or tiles[:3]
            queues.append([(shape, rows, tile) for tile in tiles])
        for turn in itertools.zip_longest(*queues):
            for shape, rows, tile in filter(None, turn):
                if not (is_first and time.monotonic() > self._first_until):
                    self.time(kind, shape, rows, name_of(tile), tile, False)
        for shape, rows in products:
            named = {name_of(tile): tile for tile in candidates(kind, rows)}
            for name in self.best(kind, shape, rows)[:2]:
                self.time(kind, shape, rows, name, named[name], True)

    def is_at_aim(self) -> bool:
        return any(us < AIM_US for us in self._tiles(FIRST, "8b down", 1).values())

    def best(self, kind: str, shape: str, rows: int) -> list[str]:
        """Names of tiles that ran, the fastest first."""
        return list(self._tiles(kind, shape, rows))

    def _tiles(self, kind: str, shape: str, rows: int) -> dict[str, float]:
        times = self.times(f"{kind} {shape}", rows)
        return {name: us for name, us in times.items() if name.startswith("fragments")}

    def time(
        self,
        kind: str,
        shape: str,
        rows: int,
        name: str,
        tile: Tile | int | None,
        is_dependent: bool,
    ) -> None:
        time_it = partial(self._time, kind, shape, rows, tile, is_dependent)
        self.measure(f"{kind} {shape}", rows, name, is_dependent, time_it)

    def _time(
        self, kind: str, shape: str, rows: int, tile: Tile | int | None, is_dependent: bool
    ) -> dict[str, Any]:
        x = self.x(shape, rows)
        if kind == "bfloat16":
            weights = self.plain(shape)
            copies, size = len(weights), weights[0].nbytes
            call: Callable[[int], object] = lambda i: linear(x, weights[i % copies])  # noqa: E731
        else:
            weight = self.weight(kind, shape)
            copies, size = len(weight.stored), weight.stored[0].nbytes
            call = lambda i: weight.multiply(x, tile, i % copies)  # noqa: E731
        calls = copies * math.ceil(min(LEAST_CALLS, 4 * copies) / copies)
        most = HOPELESS * calls * min(self._tiles(kind, shape, rows).values(), default=math.inf)
        with dependent_launches(is_dependent):
            call(0)
            us = self.graphs.microseconds(partial(_counted, calls, call), most) / calls
        return {"us": round(us, 3), "of_floor": round(us * 4.19e6 / size, 3)}

    def measure_layers(self, kind: str, model: str, rows: int, is_dependent: bool) -> None:
        """The four products of layers one after the other, each with its best tile."""
        names = [shape for shape in SHAPES if shape.startswith(model)]
        tiles = {}
        for shape in names:
            named = {name_of(tile): tile for tile in candidates(kind, rows)}
            best = self.best(kind, shape, rows)
            tiles[shape] = named[best[0]] if best else candidates(kind, rows)[0]

        # a captured graph has no copies from the host
        made = {shape: (self.weight(kind, shape), self.x(shape, rows)) for shape in names}

        def run() -> None:
            for layer, shape in itertools.product(range(LAYERS), names):
                weight, x = made[shape]
                weight.multiply(x, tiles[shape], layer % len(weight.stored))

        def time_it() -> dict[str, Any]:
            with dependent_launches(is_dependent):
                run()
                us = self.graphs.microseconds(run) / LAYERS
            return {"us": round(us, 3), "tiles": {n: name_of(t) for n, t in tiles.items()}}

        self.measure(f"layer of {model} {kind}", rows, "best", is_dependent, time_it)

    def x(self, shape: str, rows: int) -> Tensor:
        dice = torch.Generator().manual_seed(7)
        rows_of = torch.randn(max(CHECKED_ROWS), SHAPES[shape][1], generator=dice)
        return rows_of[:rows].to(self.graphs.device, DTYPE).contiguous()

    def weight(self, kind: str, shape: str) -> Weight:
        """Copies of it; those of other layouts are given up."""
        if (kind, shape) not in self._weights:
            self._weights = {key: item for key, item in self._weights.items() if key[0] == kind}
            copies = max(2, math.ceil(LEAST_BYTES / Weight.bytes_of(kind, SHAPES[shape])))
            made = Weight.make(kind, SHAPES[shape], copies, self.graphs.device)
            self._weights[kind, shape] = made
        return self._weights[kind, shape]

    def plain(self, shape: str) -> list[Tensor]:
        outputs, columns = SHAPES[shape]
        copies = max(2, math.ceil(LEAST_BYTES / (2 * outputs * columns)))
        return [
            torch.zeros(outputs, columns, dtype=DTYPE, device=self.graphs.device)
            for _ in range(copies)
        ]


def _is_alike(name: str, others: Sequence[str]) -> bool:
    """Whether a tile has the blocks, warps and stages of one of another layout."""

    def parts(name: str) -> list[str]:
        return [part for part in name.split("-") if part[0] != "k"]

    return any(parts(other) == parts(name) for other in others)


def _times(count: int, call: Callable[[], object]) -> None:
    for _ in range(count):
        call()


def _counted(count: int, call: Callable[[int], object]) -> None:
    for i in range(count):
        call(i)
