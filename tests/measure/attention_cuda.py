"""Measure the Triton kernel of `specc::attend` against torch's masked attention, on a GPU.

    python tests/measure/attention_cuda.py --json attention_cuda.json

Tree nodes of several sequences attend to a committed prefix and to their ancestors. torch gets what
favors it: K and V without paging, contiguous by head, padded to whole tiles, and masks that are
built beforehand. SDPA runs with a mask for each query head and with the query heads of a KV head
packed into one matrix; FlexAttention is compiled, with a block mask. All calls of a contender are
one CUDA graph that goes through several copies of the caches, so that none of them stays in the
second-level cache. What is read counts K and V once, queries and output.

Without a GPU the kernel runs in Triton's interpreter: `--only tiny` checks that all agree.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton

from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from specc.bench.device import describe_device, make_clock, measure_copy_bandwidth
from specc.kernels.cuda.attend import attend
from specc.speculation.tree import TokenTree

BLOCK_SIZE = 16
# sequences are padded to whole tiles for torch
TILE = 128
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# norm of the difference over the norm of the result
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 2e-3}
# caches of one measurement: several times the second-level cache of a large GPU
CACHE_BYTES = 512 << 20
MOST_COPIES = 64


@dataclass(frozen=True)
class Case:
    """A batch of sequences with the same tree.

    Args:
        num_nodes: of the tree; 1 is plain decoding.
        context: committed rows.
        heads: query heads and KV heads.
    """

    name: str
    batch: int
    num_nodes: int
    context: int
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    dtype: str = "bf16"

    @property
    def num_keys(self) -> int:
        return self.context + self.num_nodes

    @property
    def cache_bytes(self) -> int:
        row = 2 * self.heads[1] * self.head_dim * DTYPES[self.dtype].itemsize
        return self.batch * self.num_keys * row

    @property
    def bytes(self) -> int:
        """K and V of all sequences, queries and output."""
        row = 2 * self.heads[0] * self.head_dim * DTYPES[self.dtype].itemsize
        return self.cache_bytes + self.batch * self.num_nodes * row


CASES = (
    Case("batch 16, 32 nodes, 16k", 16, 32, 16 << 10),
    Case("batch 1, 32 nodes, 32k", 1, 32, 32 << 10),
    Case("batch 1, 32 nodes, 1k", 1, 32, 1 << 10),
    Case("batch 1, 32 nodes, 128k", 1, 32, 128 << 10),
    Case("batch 1, 1 node, 1k", 1, 1, 1 << 10),
    Case("batch 16, 1 node, 16k", 16, 1, 16 << 10),
)
TINY = (
    Case("tiny tree", 2, 5, 37, (4, 2), 16, "fp32"),
    Case("tiny token", 3, 1, 20, (4, 2), 16, "fp16"),
)


# torch's SDPA takes no time to prepare; FlexAttention is compiled for each case
CONTENDERS = ("specc", "SDPA", "packed SDPA", "FlexAttention")


class Problem:
    """The tensors of a case, as specc and as torch take them."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case = case
        self.device = device
        dtype, (num_heads, num_kv_heads) = DTYPES[case.dtype], case.heads
        batch, nodes, dim = case.batch, case.num_nodes, case.head_dim
        self.size = -(-case.num_keys // TILE) * TILE
        make = {"device": device, "dtype": dtype}
        self.q = torch.randn(batch, num_heads, nodes, dim, **make)
        self.tree = TokenTree((-1, *((node - 1) // 2 for node in range(1, nodes))))
        self.mask = self._mask()
        group = num_heads // num_kv_heads
        self.packed_q = self.q.reshape(batch, num_kv_heads, group * nodes, dim)
        self.packed_mask = self.mask.repeat(1, 1, group, 1).contiguous()
        count = min(MOST_COPIES, max(1, CACHE_BYTES // case.cache_bytes))
        if device.type != "cuda":
            count = 1
        shape = (batch, num_kv_heads, self.size, dim)
        self.dense = [(torch.randn(shape, **make), torch.randn(shape, **make))]
        self.dense += [tuple(x.clone() for x in self.dense[0]) for _ in range(count - 1)]
        self.table = self._table()
        self.paged = [tuple(map(self._pages, pair)) for pair in self.dense]
        self.scale = dim**-0.5

    def _mask(self) -> Tensor:
        """[B, 1, N, S]: the prefix, and ancestors and the node itself after it."""
        case = self.case
        mask = torch.zeros(case.num_nodes, self.size, dtype=torch.bool)
        mask[:, : case.context] = True
        for node in range(case.num_nodes):
            at = node
            while at >= 0:
                mask[node, case.context + at] = True
                at = self.tree.parents[at]
        return mask.expand(case.batch, 1, -1, -1).contiguous().to(self.device)

    def _table(self) -> Tensor:
        pages = -(-self.case.num_keys // BLOCK_SIZE)
        order = torch.randperm(self.case.batch * pages, device=self.device)
        return order.view(self.case.batch, pages).int()

    def _pages(self, rows: Tensor) -> Tensor:
        """Rows [B, HK, S, D] as blocks in the order of the table."""
        case, pages = self.case, self.table.shape[1]
        heads, dim = rows.shape[1], rows.shape[3]
        # S is a multiple of the block size
        used = rows[:, :, : pages * BLOCK_SIZE].transpose(1, 2)
        cache = rows.new_empty(case.batch * pages, BLOCK_SIZE, heads, dim)
        cache[self.table.flatten().long()] = used.reshape(-1, BLOCK_SIZE, heads, dim)
        return cache

    def contenders(self, names: Sequence[str]) -> dict[str, Callable[[int], Tensor]]:
        """Name → call for one copy of the caches; each returns [B, H, N, D]."""
        case = self.case
        shape = (case.batch, case.heads[0], case.num_nodes, case.head_dim)
        i32 = {"dtype": torch.int32, "device": self.device}
        nodes = torch.arange(case.num_nodes, **i32).repeat(case.batch)
        depths = torch.tensor(self.tree.depths, device=self.device).repeat(case.batch)
        words = self.tree.ancestor_words().to(self.device).repeat(case.batch, 1)
        arguments = (
            torch.arange(case.batch + 1, **i32) * case.num_nodes,
            case.context + depths.long(),
            case.context + nodes,
            torch.full((case.batch,), case.context, **i32),
            words if case.num_nodes > 1 else None,
            self.table,
        )
        # [H, B * N, D], as a projection leaves it
        flat = self.q.transpose(1, 2).flatten(0, 1).contiguous().transpose(0, 1)

        def specc(copy: int) -> Tensor:
            out = attend(flat, *self.paged[copy], *arguments, scale=self.scale)
            return out.transpose(0, 1).unflatten(0, (case.batch, -1)).transpose(1, 2)

        def masked(copy: int) -> Tensor:
            return sdpa(self.q, *self.dense[copy], attn_mask=self.mask, enable_gqa=True)

        def packed(copy: int) -> Tensor:
            out = sdpa(self.packed_q, *self.dense[copy], attn_mask=self.packed_mask)
            return out.reshape(shape)

        calls = {"specc": specc, "SDPA": masked, "packed SDPA": packed}
        if "FlexAttention" in names:
            calls["FlexAttention"] = self._flex()
        return {name: calls[name] for name in names}

    def _flex(self) -> Callable[[int], Tensor]:
        context, mask = self.case.context, self.mask[0, 0, :, self.case.context :].contiguous()
        last = mask.shape[1] - 1

        def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k < context) | mask[q, (k - context).clamp(0, last)]

        block_mask = create_block_mask(
            sees, None, None, self.case.num_nodes, self.size, device=self.device
        )
        # on a CPU as it is: compiling there takes longer than the check
        run = torch.compile(flex_attention, dynamic=False) if self._on_gpu else flex_attention
        return lambda copy: run(self.q, *self.dense[copy], block_mask=block_mask, enable_gqa=True)

    @property
    def _on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def reference(self) -> Tensor:
        """[B, H, N, D] in float32, from dense rows and the mask."""
        dense = (x.float() for x in (self.q, *self.dense[0]))
        return sdpa(*dense, attn_mask=self.mask, enable_gqa=True)


def check(case: Case, found: Tensor, wanted: Tensor) -> float:
    """Relative error of a contender; a claim of speed needs equal numbers.

    Raises:
        AssertionError: it is larger than rounding explains.
    """
    error = float((found.float() - wanted).norm() / wanted.norm())
    if not error <= TOLERANCE[case.dtype]:
        raise AssertionError(f"the result is off by {error:.1e}")
    return error


def measure(problem: Problem, call: Callable[[int], Tensor], rounds: int) -> list[float]:
    """Microseconds of a call in each round; one round goes through all copies of the caches."""
    clock, copies = make_clock(problem.device), range(len(problem.dense))

    def work() -> None:
        for copy in copies:
            call(copy)

    for _ in range(3):
        work()
    run = _capture(work) if problem.device.type == "cuda" else work
    times = []
    for _ in range(rounds):
        begin = clock.mark()
        run()
        end = clock.mark()
        clock.wait()
        times.append(1000 * clock.ms(begin, end) / len(copies))
    return times


def _capture(work: Callable[[], None]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    return graph.replay


def run_case(
    case: Case,
    device: torch.device,
    rounds: int,
    copy_gb_s: float,
    names: Sequence[str] = CONTENDERS,
) -> dict[str, Any]:
    """Figures of one case: microseconds, GB/s and its share of the copy bandwidth by contender."""
    problem = Problem(case, device)
    found: dict[str, Any] = {}
    with torch.inference_mode():
        wanted = problem.reference()
        for name, call in problem.contenders(names).items():
            try:
                error = check(case, call(0), wanted)
                times = measure(problem, call, rounds)
            except Exception as failure:  # what fails loses nobody else's figures
                found[name] = {"error": f"{type(failure).__name__}: {str(failure)[:300]}"}
                continue
            us = statistics.median(times)
            gb_s = case.bytes / us / 1000
            found[name] = {
                "us": us,
                "us_min": min(times),
                "us_max": max(times),
                "gb_s": gb_s,
                "copy_share": gb_s / copy_gb_s,
                "relative_error": error,
            }
    best = min(
        (name for name in found if name != "specc" and "us" in found[name]),
        key=lambda name: found[name]["us"],
        default=None,
    )
    own = found["specc"]
    return {
        **vars(case),
        "bytes": case.bytes,
        "num_copies": len(problem.dense),
        "contenders": found,
        "best_of_torch": best,
        "speedup_over_torch": found[best]["us"] / own["us"] if best and "us" in own else None,
    }


def print_row(result: dict[str, Any]) -> None:
    """One line a case: microseconds of each, and what the bars ask for."""
    cells = []
    for name, item in result["contenders"].items():
        cells.append(f"{name} {item['us']:.1f} µs" if "us" in item else f"{name}: {item['error']}")
    own = result["contenders"]["specc"]
    if "us" in own:
        cells.append(f"{own['gb_s']:.0f} GB/s, {own['copy_share']:.0%} of copy bandwidth")
    if (ratio := result["speedup_over_torch"]) is not None:
        cells.append(f"{ratio:.2f} × {result['best_of_torch']}")
    print(f"{result['name']:24s} | " + " | ".join(cells), flush=True)


def run(cases: tuple[Case, ...], rounds: int, copy_bytes: int | None = None) -> dict[str, Any]:
    """Measure cases on the GPU where there is one; the report as JSON."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    bandwidth = measure_copy_bandwidth(device, copy_bytes)
    results = []
    for case in cases:
        result = run_case(case, device, rounds, bandwidth["gb_s"])
        print_row(result)
        results.append(result)
        torch.compiler.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": "python tests/measure/attention_cuda.py",
        "device": describe_device(device),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        },
        "copy_bandwidth": bandwidth,
        "results": results,
    }


def main() -> None:
    """Print a line a case, and write JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default="batch", help="cases whose name contains this")
    options = parser.parse_args()
    cases = tuple(case for case in (*CASES, *TINY) if options.only in case.name)
    report = run(cases, options.rounds)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
