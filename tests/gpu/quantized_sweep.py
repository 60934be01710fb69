"""The measurements of `sweep_quantized`, until their time is over."""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from specc.kernels.cuda.few_rows_tiles import quantized_tiles
from specc.kernels.cuda.launch import dependent_launches
from tests.gpu.quantized_products import (
    DTYPE,
    EVEN_ROWS,
    FIRST,
    KINDS,
    OUTPUTS,
    SHAPES,
    Weight,
    candidates,
    compile_candidate,
    name_of,
)
from tests.gpu.sweep_lines import append, read

CHECKED = ("8b o", "8b down")
# bytes of the copies of a weight, at least: several times a cache of 60 MB
LEAST_BYTES = 240 << 20
LEAST_CALLS = 16
MOST_OFF = 8e-3
REPLAYS = 50
HOPELESS = 1.3
# microseconds of "8b down", one row, at which int4 is where it should be, and the share of the
# seconds after which that is asked
AIM_US, FIRST_SHARE = 12.0, 0.45
LAYERS = 8


class Sweep:
    """Measurements until time is over."""

    def __init__(self, options: argparse.Namespace, graphs: Any) -> None:
        self.graphs, self.most, self.rows = graphs, options.most, options.rows
        self.is_dry = options.dry_run
        lines = Path(f"{options.output}.lines")
        self.until = min(options.until, time.time() + options.seconds)
        self.begin = self.until - options.seconds
        self.seconds = options.seconds
        events = read(lines)
        self.known = {_key(event) for event in events if event["event"] in ("begin", "found")}
        self.found = [event for event in events if event["event"] == "found"]
        self._append = partial(append, lines)
        self._append({"event": "facts", **graphs.facts()})
        self._weights: dict[tuple[str, str], Weight] = {}

    def run(self) -> None:
        self.facts()
        kinds = [kind for kind in KINDS if self.is_right(kind)]
        self.compile(kinds)
        for kind, shape, rows in itertools.product(kinds, SHAPES, self.rows):
            self.older_forms(kind, shape, rows)
        for kind in kinds:
            end = self.begin + FIRST_SHARE * self.seconds if kind == FIRST else self.until
            tiles = None if kind == FIRST or not self.is_at_aim() else 3
            self.sweep(kind, tiles, end)
        for kind, model, rows in itertools.product(kinds[:2], ("8b", "1b"), self.rows[:2]):
            self.measure_layers(kind, model, rows)

    def facts(self) -> None:
        """Bytes a second of copies and of a cache, and microseconds of launches that do nothing."""
        device, calls = self.graphs.device, 20
        for name, size in (("copy 2 GB", 1 << 30), ("copy 240 MB", 120 << 20), ("L2", 20 << 20)):
            source = torch.zeros(size, dtype=torch.uint8, device=device)
            target = torch.empty_like(source)
            target.copy_(source)
            run = partial(_times, calls, partial(target.copy_, source))
            us = self.graphs.microseconds(run) / calls
            self._append({"event": "facts", name: round(2 * size / us / 1e6, 3)})
        one = torch.zeros(1, device=device)
        one.add_(1)
        us = self.graphs.microseconds(partial(_times, 100, partial(one.add_, 1))) / 100
        self._append({"event": "facts", "us of a launch": round(us, 3)})

    def is_right(self, kind: str) -> bool:
        """Compare the table's tiles with the decoded weight; a row with itself among others."""
        wrong = []
        for shape in CHECKED:
            weight = self.weight(kind, shape)
            x = self.x(shape, max(EVEN_ROWS))
            alone: dict[Any, Any] = {}
            for rows in EVEN_ROWS:
                wanted = x[:rows].float() @ weight.values.T
                wanted = wanted.repeat(1, SHAPES[shape][0] // OUTPUTS)
                for tile in candidates(kind, rows)[:1]:
                    found = weight.multiply(x[:rows], tile)
                    off = self.graphs.off([found], [wanted.to(DTYPE)])
                    same = self.graphs.same(
                        [weight.multiply(x[:rows], tile) for _ in range(REPLAYS)], found
                    )
                    first = alone.setdefault((tile.num_warps, tile.block_k), found[:1])
                    item = {
                        "kind": kind,
                        "shape": shape,
                        "rows": rows,
                        "tile": name_of(tile),
                    }
                    item |= {"off": off, "repeats": same}
                    item["row is the same alone"] = self.graphs.same([found[:1]], first)
                    self._append({"event": "checks", **item})
                    if off > MOST_OFF or not same:
                        wrong.append(item)
            torch.cuda.synchronize() if torch.cuda.is_available() else None
        return not wrong

    def compile(self, kinds: Sequence[str]) -> None:
        if self.is_dry:
            return
        jobs = [
            (kind, rows, number)
            for kind in kinds
            for rows in self.rows
            for number in range(len(candidates(kind, rows)[: self.most]))
        ]
        begin = time.time()
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
            futures = [pool.submit(compile_candidate, *job) for job in jobs]
            failed = 0
            for done, future in enumerate(futures):
                try:
                    future.result(timeout=max(1.0, self.begin + 30.0 - time.time()))
                except Exception:
                    failed += 1
                self._append({"event": "facts", "compiled": done + 1, "failed": failed})
                if time.time() > self.begin + 30.0:
                    break
            pool.shutdown(wait=False, cancel_futures=True)
        self._append({"event": "facts", "seconds of compiling": round(time.time() - begin, 1)})

    def older_forms(self, kind: str, shape: str, rows: int) -> None:
        """bfloat16 as the library multiplies it, and every form of blocks."""
        if kind == FIRST:
            self.measure("bfloat16", shape, rows, "library", None, False)
        if rows in (1, 16) and "down" in shape:
            for number, tile in enumerate(quantized_tiles(kind, DTYPE, rows)):
                self.measure(kind, shape, rows, f"{tile.form}-{number}", number, False)

    def sweep(self, kind: str, most: int | None, end: float) -> None:
        """Tiles of all products in turns, then the best launched dependently."""
        products = list(itertools.product(SHAPES, self.rows))
        queues = []
        for shape, rows in products:
            tiles = candidates(kind, rows)[: self.most]
            if most is not None:
                names = self.best(FIRST, shape, rows)[:most]
                # steps of as many columns as a warp has bytes
                tiles = [t for t in tiles if _alike(name_of(t), names)] or tiles[:most]
            queues.append([(shape, rows, tile) for tile in tiles])
        for turn in itertools.zip_longest(*queues):
            for item in turn:
                if item is not None and time.time() < end:
                    shape, rows, tile = item
                    self.measure(kind, shape, rows, name_of(tile), tile, False)
        for shape, rows in products:
            named = {name_of(tile): tile for tile in candidates(kind, rows)}
            for name in self.best(kind, shape, rows)[:2]:
                if name in named and time.time() < self.until:
                    self.measure(kind, shape, rows, name, named[name], True)

    def is_at_aim(self) -> bool:
        best = self.best_us(FIRST, "8b down", 1)
        return best < AIM_US

    def best_us(self, kind: str, shape: str, rows: int) -> float:
        return min((item["us"] for item in self._of(kind, shape, rows)), default=math.inf)

    def best(self, kind: str, shape: str, rows: int) -> list[str]:
        """Names of tiles that ran, the fastest first."""
        return [i["candidate"] for i in sorted(self._of(kind, shape, rows), key=lambda i: i["us"])]

    def _of(self, kind: str, shape: str, rows: int) -> Iterator[dict[str, Any]]:
        wanted = (f"{kind} {shape}", rows)
        for item in self.found:
            is_tile = item["candidate"].startswith("fragments")
            if (item["shape"], item["rows"]) == wanted and "us" in item and is_tile:
                yield item

    def measure(
        self, kind: str, shape: str, rows: int, name: str, tile: Any, is_dependent: bool
    ) -> None:
        """Once, whatever becomes of it."""
        item: dict[str, Any] = {"shape": f"{kind} {shape}", "rows": rows, "candidate": name}
        item["is_dependent"] = is_dependent
        if _key(item) in self.known or time.time() > self.until:
            return
        self._append({"event": "begin", **item})
        x, call = self.x(shape, rows), None
        try:
            if kind == "bfloat16":
                weights = self.plain(shape)
                copies, size = len(weights), weights[0].nbytes
                call = lambda i: linear(x, weights[i % copies])  # noqa: E731
            else:
                weight = self.weight(kind, shape)
                copies, size = len(weight.stored), weight.stored[0].nbytes
                call = lambda i: weight.multiply(x, tile, i % copies)  # noqa: E731
            calls = copies * math.ceil(min(LEAST_CALLS, 4 * copies) / copies)
            with dependent_launches(is_dependent):
                call(0)
                best = self.best_us(kind, shape, rows)
                us = self.graphs.microseconds(
                    partial(_counted, calls, call), HOPELESS * best * calls
                )
            item["us"] = round(us / calls, 3)
            item["of_floor"] = round(item["us"] * 4.19e6 / size, 3)
        except Exception as error:
            item["error"] = f"{type(error).__name__}: {error}"[:300]
        self._append({"event": "found", **item})
        self.found.append(item)
        self.graphs.wait()

    def measure_layers(self, kind: str, model: str, rows: int) -> None:
        """The four products of layers one after the other, each with its best tile."""
        names = [shape for shape in SHAPES if shape.startswith(model)]
        tiles = {}
        for shape in names:
            named = {name_of(tile): tile for tile in candidates(kind, rows)}
            best = [name for name in self.best(kind, shape, rows) if name in named]
            tiles[shape] = named[best[0]] if best else candidates(kind, rows)[0]
        for is_dependent in (False, True):
            if time.time() > self.until:
                return
            item: dict[str, Any] = {"model": f"{model} {kind}", "rows": rows, "choice": "best"}
            item |= {"is_dependent": is_dependent}
            item["tiles"] = {shape: name_of(tile) for shape, tile in tiles.items()}

            def run() -> None:
                for layer in range(LAYERS):
                    for shape in names:
                        weight = self.weight(kind, shape)
                        copy = layer % len(weight.stored)
                        weight.multiply(self.x(shape, rows), tiles[shape], copy)

            try:
                with dependent_launches(is_dependent):
                    run()
                    item["us"] = round(self.graphs.microseconds(run) / LAYERS, 3)
            except Exception as error:
                item["error"] = f"{type(error).__name__}: {error}"[:300]
            self._append({"event": "layers", **item})
            self.graphs.wait()

    def x(self, shape: str, rows: int) -> Tensor:
        dice = torch.Generator().manual_seed(7)
        rows_of = torch.randn(max(EVEN_ROWS), SHAPES[shape][1], generator=dice)
        return rows_of[:rows].to(self.graphs.device, DTYPE).contiguous()

    def weight(self, kind: str, shape: str) -> Weight:
        """Copies of it; those of other layouts are given up."""
        if (kind, shape) not in self._weights:
            self._weights = {key: item for key, item in self._weights.items() if key[0] == kind}
            size = Weight.bytes_of(kind, SHAPES[shape])
            copies = max(2, math.ceil(LEAST_BYTES / size))
            self._weights[kind, shape] = Weight.make(
                kind, SHAPES[shape], copies, self.graphs.device
            )
        return self._weights[kind, shape]

    def plain(self, shape: str) -> list[Tensor]:
        outputs, columns = SHAPES[shape]
        copies = max(2, math.ceil(LEAST_BYTES / (2 * outputs * columns)))
        return [
            torch.empty(outputs, columns, dtype=DTYPE, device=self.graphs.device)
            for _ in range(copies)
        ]


def _alike(name: str, others: Sequence[str]) -> bool:
    """Whether a tile has the blocks, warps and stages of one of another layout."""
    parts = name.split("-")
    return any(
        [p for p in other.split("-") if p[0] != "k"] == [p for p in parts if p[0] != "k"]
        for other in others
    )


def _times(count: int, call: Callable[[], object]) -> None:
    for _ in range(count):
        call()


def _counted(count: int, call: Callable[[int], object]) -> None:
    for i in range(count):
        call(i)


def _key(item: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(item[name] for name in ("shape", "rows", "candidate", "is_dependent"))
