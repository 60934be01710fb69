"""Measure latent attention with cached latents beside expanded keys and values, on the CPU.

    OMP_NUM_THREADS=1 python examples/measure_latent.py --json latent_attention.json

What differs between the two of one layer is timed: of expanded rows, the projection of the latent
to keys and values, and attention over all heads; of absorbed latents, the products of queries with
Wk, attention over one head, and the products of what it returns with Wv. What engines do with
latents is timed as a third where it is something else: for a pass of many tokens they expand them.
Sizes are those of DeepSeek V2 Lite. They take turns, each over the caches of as many layers as do
not fit in the processor's, and medians over the rounds count. Keys, values and weights are random;
results are compared first, on numbers that belong together.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from specc.kernels import native

HEADS, OWN, SHARED, VALUE, RANK = 16, 128, 64, 128, 512
SCALE = (OWN + SHARED) ** -0.5
BLOCK_SIZE = 16
# context, tokens of a pass: decoding, a tree, and a chunk of a prompt
CASES = ((1024, 1), (8192, 1), (8192, 4), (0, 512), (4096, 512))
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# tokens of a sequence up to which an engine absorbs, see passes/rewrite/expand_prompts.py
MOST_ROWS = math.ceil(RANK * (OWN + VALUE) / (2 * RANK - OWN - VALUE))
TOLERANCE = {"float32": 1e-4, "bfloat16": 4e-2}


class Layers:
    """Rows of a context in several layers, as latents and expanded, and one pass over them."""

    def __init__(self, context: int, count: int, dtype: torch.dtype, num_bytes: int) -> None:
        self.context, self.count = context, count
        draw = lambda *shape: torch.randn(shape).to(dtype)  # noqa: E731
        # spread as what a norm leaves, and weights that keep that
        self.up = draw(HEADS * (OWN + VALUE), RANK) * RANK**-0.5
        heads = self.up.view(HEADS, OWN + VALUE, RANK)
        self.wk, self.wv = heads[:, :OWN], heads[:, OWN:]
        self.own, self.turned = draw(HEADS, count, OWN), draw(HEADS, count, SHARED)
        self.latent, self.shared = draw(count, RANK), draw(1, count, SHARED)
        blocks = -(-(context + count) // BLOCK_SIZE)
        rows = blocks * BLOCK_SIZE
        row_bytes = (RANK + SHARED) * dtype.itemsize
        # a layer of expanded rows is some ten times as large
        most = 1 + num_bytes // (rows * row_bytes)
        kept = draw(rows, RANK + SHARED)
        self.latents = [kept.view(blocks, BLOCK_SIZE, 1, -1).clone() for _ in range(most)]
        keys, values = self._expand(kept[:, :RANK], kept[None, :, RANK:])
        whole = torch.cat([keys, values], -1).transpose(0, 1)
        whole = whole.reshape(blocks, BLOCK_SIZE, HEADS, -1)
        fewer = 1 + num_bytes // (whole.numel() * dtype.itemsize)
        self.expanded = [whole.clone() for _ in range(fewer)]
        places = torch.arange(context, context + count)
        self.inputs = (
            torch.tensor([0, count], dtype=torch.int32),
            places,
            places.int(),
            torch.tensor([context], dtype=torch.int32),
            None,
            torch.arange(blocks, dtype=torch.int32)[None],
            None,
            None,
        )

    def _expand(self, latent: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [H, T, n + r] and values [H, T, v] of latents [T, R] and shared parts [1, T, r]."""
        heads = linear(latent, self.up).view(len(latent), HEADS, OWN + VALUE).transpose(0, 1)
        own, values = heads.split([OWN, VALUE], -1)
        return torch.cat([own, shared.expand(HEADS, -1, -1)], -1), values

    def over_expanded(self, layer: int) -> Tensor:
        """[H, T, v]."""
        rows = self.expanded[layer % len(self.expanded)]
        keys, values = self._expand(self.latent, self.shared)
        queries = torch.cat([self.own, self.turned], -1)
        caches = rows.split([OWN + SHARED, VALUE], -1)
        attend = torch.ops.specc_cpu.tree_attention
        return attend(queries, keys, values, *caches, *self.inputs, scale=SCALE)

    def over_latents(self, layer: int) -> Tensor:
        """[H, T, v], as engines compute it."""
        absorbed = self.absorbed(layer, MOST_ROWS)
        if self.count <= MOST_ROWS:
            return absorbed
        rows, queries = self.latents[layer % len(self.latents)], [self.own, self.turned]
        operands = absorbed, torch.cat(queries, -1), rows, self.wk, self.wv, *self.inputs[:6]
        attend = torch.ops.specc_cpu.attend_expanded
        return attend(*operands, most_rows=MOST_ROWS, scale=SCALE)

    def absorbed(self, layer: int, most_rows: int = 0) -> Tensor:
        """[H, T, v]."""
        rows = self.latents[layer % len(self.latents)]
        queries = torch.cat([torch.bmm(self.own, self.wk), self.turned], -1)
        keys = torch.cat([self.latent[None], self.shared], -1)
        attend = torch.ops.specc_cpu.tree_attention
        caches = rows, rows[..., :RANK]
        operands = queries, keys, self.latent[None], *caches, *self.inputs
        found = attend(*operands, scale=SCALE, most_rows=most_rows)
        # as in engines of bfloat16
        wv = self.wv if self.wv.dtype == torch.float32 else self.wv.contiguous()
        return torch.bmm(found, wv.transpose(1, 2))


def measure(context: int, count: int, dtype: str, num_bytes: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of a layer, medians over rounds in turns."""
    layers = Layers(context, count, DTYPES[dtype], num_bytes)
    forms: dict[str, Callable[[int], Tensor]] = {
        "expanded": layers.over_expanded,
        "latent": layers.over_latents,
    }
    if count > MOST_ROWS:
        forms["absorbed"] = layers.absorbed
    first, *others = (form(0).float() for form in forms.values())
    error = max(float((first - other).abs().max() / first.abs().max()) for other in others)
    if error > TOLERANCE[dtype]:
        raise SystemExit(f"{dtype}, {context} + {count}: results differ by {error:.1e}")
    turn = max(1, 24 // count)
    times: dict[str, list[float]] = {name: [] for name in forms}
    for number in range(rounds):
        for name, form in forms.items():
            start = time.perf_counter()
            for i in range(turn):
                form(number * turn + i)
            times[name].append((time.perf_counter() - start) / turn * 1e3)
    found = {name: round(statistics.median(values), 3) for name, values in times.items()}
    ratios = [a / b for a, b in zip(times["expanded"], times["latent"], strict=True)]
    return {
        "dtype": dtype, "context": context, "tokens": count, "ms": found,
        "expanded_over_latent": round(statistics.median(ratios), 2), "error": float(f"{error:.2g}"),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--megabytes", type=int, default=200, help="of caches that a form goes over"
    )
    options = parser.parse_args()
    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    native.load()
    results = []
    with torch.inference_mode():
        for dtype in DTYPES:
            for context, count in CASES:
                sizes = options.megabytes * 1_000_000, options.rounds
                results.append(measure(context, count, dtype, *sizes))
                print(results[-1], flush=True)
    if options.json is not None:
        data = {
            "date": datetime.date.today().isoformat(),
            "command": " ".join(["python", *sys.argv]),
            "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
            "load": round(os.getloadavg()[0], 1),
            "torch": torch.__version__,
            "threads": threads,
            "sizes": {"heads": HEADS, "own": OWN, "shared": SHARED, "value": VALUE, "rank": RANK},
            "results": results,
        }
        options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
