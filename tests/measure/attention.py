"""Measure the CPU kernel of `specc::tree_attention` against torch's attention.

    OMP_NUM_THREADS=2 python tests/measure/attention.py --json attention.json

torch gets what favors it: contiguous K and V without paging or writes, a float mask that is built
beforehand, and the query rows that share a KV head packed into one matrix. A padded call computes
all sequences of a batch at the length of the longest. The contenders of a case take turns, and the
median of all turns counts.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from specc.kernels import native

NEG_INF = float("-inf")
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
RAGGED = (128, 512, 1024, 4096)
BLOCK_SIZE = 16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}


@dataclass(frozen=True)
class Case:
    """T tokens each of sequences with these many committed rows; causal is a prefill chunk."""

    name: str
    dtype: str
    num_tokens: int
    lengths: tuple[int, ...]
    causal: bool = False


class Problem:
    """The tensors of a case, as specc and as torch take them."""

    def __init__(self, case: Case) -> None:
        self.case = case
        dtype, batch, count = DTYPES[case.dtype], len(case.lengths), case.num_tokens
        self.q = torch.randn(batch, count, HEADS, HEAD_DIM).to(dtype)
        self.k, self.v = (torch.randn(2, batch, count, KV_HEADS, HEAD_DIM)).to(dtype)
        size = max(case.lengths) + count
        # every sequence has a chain of tokens: each sees the prefix, its ancestors and itself
        self.keys = torch.randn(batch, KV_HEADS, size, HEAD_DIM).to(dtype)
        self.values = torch.randn(batch, KV_HEADS, size, HEAD_DIM).to(dtype)
        self.mask = torch.full((batch, 1, count, size), NEG_INF)
        for b, length in enumerate(case.lengths):
            self.keys[b, :, length : length + count] = self.k[b].transpose(0, 1)
            self.values[b, :, length : length + count] = self.v[b].transpose(0, 1)
            self.mask[b, 0] = torch.full((count, size), NEG_INF).triu(length + 1)
        self.mask = self.mask.to(dtype)
        self.packed_mask = self.mask.repeat(1, 1, HEADS // KV_HEADS, 1).contiguous()
        self.packed_q = self.q.transpose(1, 2).reshape(batch, KV_HEADS, -1, HEAD_DIM).contiguous()
        self.slices = [
            (
                self.packed_q[b : b + 1],
                self.keys[b : b + 1, :, : length + count].contiguous(),
                self.values[b : b + 1, :, : length + count].contiguous(),
                self.packed_mask[b : b + 1, ..., : length + count].contiguous(),
            )
            for b, length in enumerate(case.lengths)
        ]
        self.paged, self.dense = (self._arguments(size_) for size_ in (BLOCK_SIZE, 0))

    def _arguments(self, block_size: int) -> tuple:
        case, size = self.case, self.keys.shape[2]
        batch, count = len(case.lengths), case.num_tokens
        block_size = block_size or size
        per_sequence = -(-size // block_size)
        table = torch.randperm(batch * per_sequence).view(batch, per_sequence)
        caches = []
        for source in (self.keys, self.values):
            rows = source.new_zeros(batch, per_sequence * block_size, KV_HEADS, HEAD_DIM)
            rows[:, :size] = source.transpose(1, 2)
            cache = torch.empty_like(rows).view(-1, block_size, KV_HEADS, HEAD_DIM)
            cache[table.flatten()] = rows.view_as(cache)
            caches.append(cache)
        slots = torch.tensor(case.lengths)[:, None] + torch.arange(count)
        words = torch.tensor([[(1 << node + 1) - 1] for node in range(min(count, 62))])
        return (
            *(x.flatten(0, 1).transpose(0, 1) for x in (self.q, self.k, self.v)),
            *caches,
            torch.arange(batch + 1, dtype=torch.int32) * count,
            slots.flatten(),
            slots.flatten().int(),
            torch.tensor(case.lengths, dtype=torch.int32),
            None if case.causal else words.repeat(batch, 1),
            table.int(),
        )

    def contenders(self) -> dict[str, Callable[[], Tensor]]:
        scale = HEAD_DIM**-0.5

        def packed_loop() -> Tensor:
            return [sdpa(q, k, v, attn_mask=mask) for q, k, v, mask in self.slices][-1]

        def packed() -> Tensor:
            return sdpa(self.packed_q, self.keys, self.values, attn_mask=self.packed_mask)

        calls = {
            "specc paged": lambda: torch.ops.specc_cpu.tree_attention(*self.paged, scale=scale),
            "specc dense": lambda: torch.ops.specc_cpu.tree_attention(*self.dense, scale=scale),
            "packed SDPA": packed,
        }
        q = self.q.transpose(1, 2).contiguous()
        if self.case.causal:
            calls["causal SDPA"] = lambda: sdpa(
                q, self.keys, self.values, is_causal=True, enable_gqa=True
            )
        else:
            calls["SDPA"] = lambda: sdpa(
                q, self.keys, self.values, attn_mask=self.mask, enable_gqa=True
            )
        if len(self.case.lengths) > 1:
            calls["packed loop"] = packed_loop
        return calls

    def check(self) -> None:
        """A claim of speed needs equal numbers."""
        expected = sdpa(
            self.q.transpose(1, 2).float(),
            self.keys.float(),
            self.values.float(),
            attn_mask=self.mask.float(),
            enable_gqa=True,
        ).transpose(0, 1)
        for arguments in (self.paged, self.dense):
            out = torch.ops.specc_cpu.tree_attention(*arguments, scale=HEAD_DIM**-0.5)
            tolerance = TOLERANCE[self.case.dtype]
            torch.testing.assert_close(
                out.float(), expected.flatten(1, 2), rtol=tolerance, atol=tolerance
            )


def measure(calls: dict[str, Callable[[], Tensor]], seconds: float) -> dict[str, float]:
    """Median microseconds of each call; the calls take turns of about a millisecond."""
    counts, times = {}, {name: [] for name in calls}
    for name, call in calls.items():
        for _ in range(3):
            call()
        start = time.perf_counter()
        call()
        counts[name] = max(1, int(1e-3 / (time.perf_counter() - start)))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(counts[name]):
                call()
            times[name].append((time.perf_counter() - start) / counts[name])
    return {name: round(statistics.median(values) * 1e6, 1) for name, values in times.items()}


def cases() -> list[Case]:
    result = []
    for dtype in DTYPES:
        for count, length in ((1, 1024), (8, 1024), (8, 4096), (32, 1024)):
            result.append(Case(f"T {count}, L {length}", dtype, count, (length,)))
        for count in (1, 8):
            result.append(Case(f"T {count}, ragged", dtype, count, RAGGED))
        result.append(Case("prefill 512", dtype, 512, (0,), causal=True))
    return result


def main() -> None:
    """Print a table, and write JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=1.5, help="of one case")
    parser.add_argument("--only", default="", help="cases whose name or dtype contains this")
    arguments = parser.parse_args()
    native.load()
    torch.manual_seed(0)
    results = []
    columns = ("specc paged", "specc dense", "packed SDPA", "SDPA", "causal SDPA", "packed loop")
    print(f"microseconds: H {HEADS}, HK {KV_HEADS}, D {HEAD_DIM}; ragged is {RAGGED}")
    print(" | ".join(("threads", "dtype", f"{'case':12s}", *columns, "packed SDPA / paged")))
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for case in cases():
            if arguments.only not in f"{case.dtype} {case.name}":
                continue
            problem = Problem(case)
            problem.check()
            times = measure(problem.contenders(), arguments.seconds)
            ratio = times["packed SDPA"] / times["specc paged"]
            cells = [f"{times.get(name, ''):>{len(name)}}" for name in columns]
            row = (f"{threads:7d}", f"{case.dtype:5s}", f"{case.name:12s}", *cells, f"{ratio:.2f}")
            print(" | ".join(row), flush=True)
            results.append({"threads": threads, **vars(case), "us": times})
    if arguments.json:
        report = {
            "date": datetime.date.today().isoformat(),
            "command": "python tests/measure/attention.py",
            "machine": {"processor": platform.machine(), "cores": os.cpu_count()},
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "shape": {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM},
            "results": results,
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
