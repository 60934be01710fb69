"""Launch parameters of `attend`, measured: which tile, warps, stages and splits suit which case.

    PYTHONPATH=. python3 -P -m tests.gpu.sweep_attend --output FILE [--seconds S]

The tables of `specc.kernels.cuda.attend_config` and of `attend_few` are written by hand from what
this finds. All calls of a case are one graph that goes through several copies of the caches, as in
tests/measure/attention_cuda.py. What fails is noted and passed over; every result is in the file
as soon as it is known. With `--compile` nothing is launched and no GPU needed: Triton compiles for
sm_90 what the sweep launches, into its cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from dataclasses import replace as replace_
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specc.kernels.cuda import attend as operator
from specc.kernels.cuda import attend_few, attend_wide
from specc.kernels.cuda.attend_config import AttendConfig
from specc.kernels.cuda.attend_few import FewConfig
from specc.kernels.cuda.launch import dependent_launches, even_tokens
from specc.speculation.tree import TokenTree
from tests.gpu.compile_only import compile_only

# several times the second-level cache of a large GPU
CACHE_BYTES = 256 << 20
ROUNDS, REPLAYS = 3, 5


@dataclass(frozen=True)
class Case:
    """A batch of sequences with the same tree: bfloat16, 32 query heads, 8 KV heads.

    Args:
        num_nodes: of the tree; 1 is plain decoding, without ancestors.
        context: committed rows.
    """

    batch: int
    num_nodes: int
    context: int
    head_dim: int = 128
    block_size: int = 16

    @property
    def name(self) -> str:
        return (
            f"b{self.batch} n{self.num_nodes} c{self.context} d{self.head_dim} p{self.block_size}"
        )


# of the kernel for all batches, or of that for a single sequence of few rows
Config = AttendConfig | FewConfig
Point = tuple[Case, Config, int | None]


def points() -> list[Point]:
    """Cases, launch parameters and splits (None: chosen on the device), each once."""
    return [*dict.fromkeys(_points())]


def _points() -> Iterator[Point]:
    """What ships first, then by what it may tell."""

    def grid(heights: Any, keys: Any, warps: Any, stages: Any, programs: Any = (2,)) -> Any:
        for values in itertools.product(heights, keys, warps, stages, programs):
            yield AttendConfig(*values)

    one, chain, tree = Case(1, 1, 1024), Case(1, 6, 1024), Case(1, 32, 32 << 10)
    draft = Case(1, 1, 1024, 64)
    shipped: dict[Case, Config] = {
        one: attend_few.config(128, 4),
        chain: attend_few.config(128, 24),
        draft: attend_few.config(64, 4),
        tree: AttendConfig(128, 64, 8, 5, 1),
    }
    for case, c in shipped.items():
        yield case, c, None
    yield from _few(one, chain, draft)
    for splits in (1, 2, 3, 4, 6, 8, 17):
        for c in (
            AttendConfig(16, 64, 4, 5),
            AttendConfig(16, 64, 4, 3),
            AttendConfig(16, 64, 8, 3),
        ):
            yield one, c, splits
    for c in grid((16,), (32, 64), (1, 2, 4, 8), (2, 3)):
        yield one, c, None
        yield one, c, 8
    wide = [
        *grid((128,), (64,), (8,), (5, 6, 7, 4, 3), (1,)),
        *grid((128,), (64,), (4,), (2, 3), (1, 2)),
        *grid((64,), (64,), (4,), (2, 3, 4), (2, 3)), *grid((64,), (64,), (8,), (3, 4), (1, 2)),
        *grid((128,), (32,), (8,), (3, 5), (1, 2)), *grid((64,), (32,), (4,), (4, 5), (2, 3)),
        *grid((32,), (64,), (4,), (3, 4), (2, 3)),
    ]  # fmt: skip
    for c in wide:
        yield tree, c, None
    for splits in (None, 4, 8):
        for c in grid((32,), (32, 64), (2, 4, 8), (2, 3)):
            yield chain, c, splits
    for splits in (None, 4, 8):
        for c in grid((16,), (64,), (1, 2, 4, 8), (2, 3)):
            yield draft, c, splits
    for c in grid((16,), (32, 64), (4, 8), (3, 5), (2, 3, 4)):
        yield Case(16, 1, 16 << 10), c, None
    for c in wide:
        yield Case(16, 32, 16 << 10), c, None
    for case in (one, tree):
        yield Case(case.batch, case.num_nodes, case.context, 128, 64), shipped[case], None
    for c in wide:
        yield Case(1, 32, 1024), c, None


def _few(one: Case, chain: Case, draft: Case) -> Iterator[Point]:
    """Of a single sequence of few rows, and the kernel for all batches beside it."""
    for c in (
        FewConfig(16, 64, 4, 5, 2, 16, 4, 32), FewConfig(16, 64, 8, 5, 1, 32, 8, 32),
        FewConfig(16, 32, 4, 5, 2, 32, 4, 32), FewConfig(16, 64, 4, 5, 2, 32, 4, 32, 2),
    ):  # fmt: skip
        yield one, c, None
        yield draft, c, None
    wide = FewConfig(32, 64, 4, 5, 2, 32, 4, 32)
    for c in (
        FewConfig(16, 64, 4, 5, 2, 16, 8, 16), FewConfig(16, 64, 4, 5, 2, 16, 16, 8, 2),
        FewConfig(16, 64, 4, 5, 2, 9, 8, 16), FewConfig(32, 64, 8, 5, 1, 16, 16, 16), wide,
    ):  # fmt: skip
        yield chain, c, None
    for context in (256, 2048, 4096, 16384, 32768):
        for case, old in (
            (one, AttendConfig(16, 64, 4, 5)),
            (chain, AttendConfig(32, 64, 8, 2, 1)),
            (draft, AttendConfig(16, 64, 4, 5)),
        ):
            own = replace_(case, context=context)
            yield own, attend_few.config(case.head_dim, 4 * case.num_nodes), None
            yield own, old, None
        yield replace_(chain, context=context), wide, None


class Problem:
    """The tensors of a case; without `is_filled` nobody reads them."""

    def __init__(self, case: Case, device: torch.device, is_filled: bool = True) -> None:
        self.case = case
        make: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        draw = torch.randn if is_filled else torch.empty
        batch, nodes = case.batch, case.num_nodes
        pages = -(-(case.context + nodes) // case.block_size)
        shape = (batch * pages, case.block_size, 8, case.head_dim)
        size = 2 * 2 * shape[0] * shape[1] * shape[2] * shape[3]
        count = max(1, min(64, CACHE_BYTES // size)) if is_filled else 1
        self.caches = [(draw(shape, **make), draw(shape, **make)) for _ in range(count)]
        self.q = draw(batch * nodes, 32, case.head_dim, **make).transpose(0, 1)
        tree = TokenTree((-1, *((node - 1) // 2 for node in range(1, nodes))))
        i32: dict[str, Any] = {"dtype": torch.int32, "device": device}
        depths = torch.tensor(tree.depths, device=device).repeat(batch)
        self.all_words = tree.ancestor_words().to(device).repeat(batch, 1)
        self.words = self.all_words if nodes > 1 else None
        table = torch.randperm(batch * pages, device=device).view(batch, pages).int()
        self.arguments = (
            torch.arange(batch + 1, **i32) * nodes,
            case.context + depths.long(),
            case.context + torch.arange(nodes, **i32).repeat(batch),
            torch.full((batch,), case.context, **i32),
            self.words,
            table,
        )

    def call(self, c: Config, splits: int | None, copy: int) -> Tensor:
        """`attend` with these launch parameters, as a captured step calls it."""
        replace: Any = setattr
        before, found, wide = operator.config, attend_few.find, attend_wide.find
        replace(operator, "config", lambda *_: c)
        replace(attend_few, "find", lambda *_: c if isinstance(c, FewConfig) else None)
        # it has no such parameters, and would come first
        replace(attend_wide, "find", lambda *_: None)
        try:
            with even_tokens():
                return operator.attend(
                    self.q, *self.caches[copy], *self.arguments,
                    scale=self.case.head_dim**-0.5, num_splits=splits,
                )  # fmt: skip
        finally:
            replace(operator, "config", before)
            replace(attend_few, "find", found)
            replace(attend_wide, "find", wide)


def measure(problem: Problem, c: Config, splits: int | None, wanted: Tensor) -> float:
    """Microseconds of a call.

    Raises:
        ArithmeticError: its result is another.
    """
    found = problem.call(c, splits, 0).float()
    error = float((found - wanted).norm() / wanted.norm())
    if not error < 1e-2:
        raise ArithmeticError(f"off by {error:.1e}")
    copies = range(len(problem.caches))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for copy in copies:
            problem.call(c, splits, copy)
    graph.replay()
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1000 * begin.elapsed_time(end) / REPLAYS / len(copies))
    return statistics.median(times)


@torch.inference_mode()
def sweep(output: Path, seconds: float) -> None:
    """Measure points until the time is over."""
    end_s = time.perf_counter() + seconds
    device = torch.device("cuda")
    rows: list[dict[str, Any]] = []
    problems: dict[Case, tuple[Problem, Tensor]] = {}
    for case, c, splits in points():
        if time.perf_counter() > end_s:
            rows.append({"cut": case.name})
            break
        if case not in problems:
            # large ones would fill the memory
            problems = {k: v for k, v in problems.items() if k.batch == 1}
            torch.manual_seed(0)
            problem = Problem(case, device)
            first = AttendConfig(16, 32, 4, 2)
            problems[case] = problem, problem.call(first, 1, 0).float()
        problem, wanted = problems[case]
        row = {"case": case.name, **asdict(c), "splits": splits}
        try:
            row["us"] = measure(problem, c, splits, wanted)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
        rows.append(row)
        output.write_text(json.dumps(rows), encoding="utf-8")


def compile_all() -> None:
    """Launch what the sweep launches, once; within `compile_only` that compiles it."""
    replace: Any = setattr
    replace(operator, "machine", lambda device: (90, 132))
    problems: dict[Case, Problem] = {}
    done = set()
    begin = time.perf_counter()
    for case, c, splits in points():
        key = (replace_(c, programs_per_sm=1), case.num_nodes > 1)
        if (key, case.head_dim, case.block_size) in done:
            continue
        done.add((key, case.head_dim, case.block_size))
        if case not in problems:
            problems = {case: Problem(case, torch.device("cpu"), is_filled=False)}
        problem = problems[case]
        # whichever of them a step is to use: with ancestors and without, launched early or not
        is_small = case.batch == 1 and c.block_m <= 32 and case.block_size == 16
        for words in {problem.words, problem.all_words} if is_small else {problem.words}:
            problem.arguments = (*problem.arguments[:4], words, problem.arguments[5])
            for is_dependent in (False, True) if is_small else (False,):
                try:
                    with dependent_launches(is_dependent):
                        problem.call(c, splits, 0)
                except Exception as error:
                    print(case.name, c, f"{type(error).__name__}: {str(error)[:200]}", flush=True)
        print(len(done), f"{time.perf_counter() - begin:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("sweep_attend.json"))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    if options.compile:
        with compile_only():
            compile_all()
    else:
        sweep(options.output, options.seconds)


if __name__ == "__main__":
    main()
