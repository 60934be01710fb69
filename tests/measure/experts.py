"""Measure the CPU kernel of `specc::grouped_linear` beside what torch offers for float experts.

    OMP_NUM_THREADS=1 python tests/measure/experts.py --threads 1 2 --json experts.json

A turn of a method computes both products of some mixtures, one after the other, of which each token
has its own choice of experts: gate and up [E, 2 I, H], then down [E, H, I]. Mixtures are as many as
take 200 MB, so that weights come from memory. The methods take turns. Reported is the median over
rounds of a method's time over specc's in the same round: above 1, specc is faster.

`mm` is `specc::grouped_mm`, a product of torch for each expert that has rows, which engines call
where experts are not in blocks; `_grouped_mm` is torch's own.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specc.artifact.weight_layout import to_blocks
from specc.kernels import native, ops
from specc.system.machine import describe_machine

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
METHODS = ("specc", "mm", "_grouped_mm")
TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2}
NUM_BYTES = 200_000_000
Turn = Callable[[], list[Tensor]]


@dataclass(frozen=True)
class Mixture:
    """E experts, K of them for a token; H columns of a token, I between an expert's products."""

    experts: int
    top_k: int
    hidden: int
    inner: int

    @property
    def name(self) -> str:
        return f"{self.experts}/{self.top_k} {self.hidden}/{self.inner}"

    def matrices(self, dtype: torch.dtype) -> list[Tensor]:
        """[E, 2 I, H] and [E, H, I] of each mixture, in turn."""
        shapes = (2 * self.inner, self.hidden), (self.hidden, self.inner)
        size = sum(n * k for n, k in shapes) * self.experts * dtype.itemsize
        return [
            torch.randn(self.experts, n, k).div_(k**0.5).to(dtype)
            for _ in range(max(1, round(NUM_BYTES / size)))
            for n, k in shapes
        ]

    def ends(self, tokens: int) -> Tensor:
        """Where each expert's rows end, of tokens that choose at random."""
        chosen = torch.rand(tokens, self.experts).topk(self.top_k).indices
        counts = torch.bincount(chosen.flatten(), minlength=self.experts)
        return counts.cumsum(0).to(torch.int32)


MIXTURES = (Mixture(8, 2, 512, 1024), Mixture(64, 6, 512, 256))


def make_turn(method: str, weights: list[Tensor], calls: list[tuple[Tensor, Tensor]]) -> Turn:
    """All products with one method."""
    if method == "specc":
        blocks, linear = [to_blocks(w) for w in weights], torch.ops.specc_cpu.grouped_linear
        rows = [w.shape[1] for w in weights]
        triples = list(zip(blocks, rows, calls, strict=True))
        return lambda: [linear(x, w, ends, n) for w, n, (x, ends) in triples]
    product = ops.grouped_mm if method == "mm" else torch._grouped_mm
    pairs = [(w.transpose(1, 2), *call) for w, call in zip(weights, calls, strict=True)]
    return lambda: [product(x, w, ends) for w, x, ends in pairs]


@torch.inference_mode()
def measure(mixture: Mixture, dtype: str, tokens: int, rounds: int) -> dict[str, float]:
    """Milliseconds of specc's turn, and of each other method the ratio to it."""
    weights = mixture.matrices(DTYPES[dtype])
    ends = [mixture.ends(tokens) for _ in weights[::2]]
    calls = [
        (torch.randn(tokens * mixture.top_k, w.shape[2]).to(w.dtype), ends[i // 2])
        for i, w in enumerate(weights)
    ]
    turns: dict[str, Turn] = {}
    for method in METHODS:
        turn = make_turn(method, weights, calls)
        try:
            found = turn()
        except (RuntimeError, NotImplementedError):
            if method != "_grouped_mm":
                raise
            continue  # torch has no such product for this processor
        turns[method] = turn
        for got, want in zip(found, turns["specc"](), strict=True):
            torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    seconds: dict[str, list[float]] = {method: [] for method in turns}
    for number in range(rounds):
        names = list(turns)
        for method in names[number % len(names) :] + names[: number % len(names)]:
            start = time.perf_counter()
            turns[method]()
            seconds[method].append(time.perf_counter() - start)
    own = seconds.pop("specc")
    ratios = {
        method: statistics.median(a / b for a, b in zip(other, own, strict=True))
        for method, other in seconds.items()
    }
    return {"specc_ms": statistics.median(own) * 1e3, **ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    native.load()
    cases = []
    for threads, mixture, dtype, tokens in itertools.product(
        arguments.threads, MIXTURES, DTYPES, arguments.tokens
    ):
        torch.set_num_threads(threads)
        case = {"threads": threads, "mixture": mixture.name, "dtype": dtype, "tokens": tokens}
        found = measure(mixture, dtype, tokens, arguments.rounds)
        cases.append(case | {name: round(value, 3) for name, value in found.items()})
        print(*(f"{name} {value}" for name, value in cases[-1].items()), flush=True)
    if arguments.json is not None:
        facts = {
            "command": shlex.join(["python", *sys.argv]),
            "date": datetime.date.today().isoformat(),
            "machine": describe_machine(),
            "load_average": [round(value, 1) for value in os.getloadavg()],
            "torch": torch.__version__,
            "isa": native.isa_flags(),
        }
        arguments.json.write_text(json.dumps(facts | {"cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
