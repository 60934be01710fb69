"""Measure the CPU kernels of recurrences against reading and writing their states once.

    OMP_NUM_THREADS=1 python tests/measure/recurrence.py --json recurrence.json

States of several layers, so that none is in the second-level cache; heads are those of Qwen3-Next
and of a Mamba-2 layer. Calls and passes over a state take turns, and the median of each counts, of
the time that the thread has had a core; a call without a live token is taken off.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specc.kernels import native, native_calls

LAYERS, LENGTH, ROUNDS = 24, 5, 8
# places in the tree of 14 nodes below a root: two children each, three levels
TREE = (-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6)
PARENTS = {"1 token": (-1,), "chain of 4": (-1, 0, 1, 2, 3), "tree of 15": TREE}
CHUNK = 512


@dataclass(frozen=True)
class Heads:
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    decays_rows: bool
    has_beta: bool

    @property
    def columns(self) -> int:
        decays = self.key_dim if self.decays_rows else 1
        of_head = self.value_dim + decays + self.has_beta
        return self.key_heads * self.key_dim + self.heads * of_head


KINDS = {
    "gated delta rule": Heads(8, 16, 128, 128, False, True),
    "KDA": Heads(8, 16, 128, 128, True, True),
    "Mamba-2": Heads(1, 32, 128, 64, False, False),
}


def int32(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def words_of(parents: tuple[int, ...]) -> Tensor:
    words: list[int] = []
    for node, parent in enumerate(parents):
        words.append((words[parent] if parent >= 0 else 0) | 1 << node)
    return torch.tensor(words)[:, None]


class Problem:
    """A layer's tensors, and calls of its operators."""

    def __init__(self, heads: Heads, dtype: torch.dtype) -> None:
        self.heads, self.dtype = heads, dtype
        size = (heads.heads, heads.key_dim, heads.value_dim)
        self.state = torch.randn(LAYERS, 1, *size)
        self.rows = torch.rand(LAYERS, 1, len(TREE), heads.columns) - 1

    def of_pass(self, parents: tuple[int, ...], certain: int) -> Callable[[int], object]:
        """A call with a layer's number; certain -1 is of a token that is dead."""
        heads, count = self.heads, len(parents)
        keys = torch.randn(2, count, heads.key_heads, heads.key_dim)
        q, k = torch.nn.functional.normalize(keys, dim=-1).to(self.dtype)
        decays = (heads.key_dim,) if heads.decays_rows else ()
        inputs = (
            q,
            k,
            torch.randn(count, heads.heads, heads.value_dim).to(self.dtype),
            -torch.rand(count, heads.heads, *decays),
            torch.rand(count, heads.heads).to(self.dtype) if heads.has_beta else None,
        )
        slots = int32(*(LENGTH + node if certain >= 0 else -1 for node in range(count)))
        words = words_of(parents) if count <= len(TREE) else None
        where = (int32(0, count), slots, int32(LENGTH), words, int32([0, certain]))
        return lambda layer: native_calls.call(
            "specc::tree_recurrence", *inputs, self.state[layer], self.rows[layer], *where
        )

    def fold(self, count: int) -> Callable[[int], object]:
        source = int32([LENGTH + 1 + node for node in range(count)])
        where, heads = (source, int32(LENGTH), int32([0, 1])), self.heads
        return lambda layer: native_calls.call(
            "specc::fold_recurrence",
            self.state[layer : layer + 1],
            self.rows[layer : layer + 1],
            *where,
            heads.key_heads,
            heads.has_beta,
        )

    def measured(self) -> Iterator[tuple[str, int, float, float]]:
        """Case, tokens, microseconds, and those over what reading and writing the state takes."""
        cases = {
            name: (self.of_pass(parents, 1), len(parents)) for name, parents in PARENTS.items()
        }
        chunk = tuple(range(-1, CHUNK - 1))
        cases[f"chunk of {CHUNK}"] = (self.of_pass(chunk, CHUNK), CHUNK)
        cases |= {f"fold of {count}": (self.fold(count), count) for count in (1, 4)}
        empty = self.of_pass((-1,), -1)
        for name, (call, count) in cases.items():
            times: dict[str, list[float]] = {"empty": [], "state": [], "call": []}
            for layer in list(range(LAYERS)) * (1 if count == CHUNK else ROUNDS):
                steps = {"empty": empty, "state": lambda i: self.state[i].mul_(1.0), "call": call}
                # each has a layer that none has touched for a while
                for turn, (step, run) in enumerate(steps.items()):
                    place = (layer + turn * LAYERS // len(steps)) % LAYERS
                    begin = time.thread_time()
                    run(place)
                    times[step].append(time.thread_time() - begin)
            median = {step: 1e6 * statistics.median(values) for step, values in times.items()}
            took = median["call"] - median["empty"]
            yield name, count, took, took / median["state"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file to write")
    arguments = parser.parse_args()
    native.load()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows = []
    for kind, heads in KINDS.items():
        for dtype in (torch.float32, torch.bfloat16):
            for name, count, took, ratio in Problem(heads, dtype).measured():
                short = str(dtype).removeprefix("torch.")
                rows.append(
                    [kind, short, name, round(took, 1), round(took / count, 1), round(ratio, 2)]
                )
                print(*rows[-1], sep="\t")
    found = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "torch": torch.__version__,
        "threads": 1,
        "results": {
            "columns": ["kind", "dtype", "case", "us", "us a token", "over reading and writing S"],
            "rows": rows,
        },
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
