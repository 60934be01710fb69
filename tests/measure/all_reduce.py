"""Measure `specc::all_reduce` between processes of this machine: shared memory, TCP, gloo.

    OMP_NUM_THREADS=1 python tests/measure/all_reduce.py --json all_reduce.json

Methods take turns, a block of calls each, in the same processes; times are those of rank 0, one
call each, the operator's dispatch included. `sockets` is specc's operator over TCP, whose sums have
the order of ranks; `torch` is torch.distributed.all_reduce over gloo, whose sums have gloo's order,
and which adds up in place.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from specc.kernels import native
from specc.percentile import percentile
from specc.runtime.ranks.group import SharedGroup
from specc.runtime.ranks.sockets import join_sockets
from specc.system.machine import describe_machine

SHAPES = ((1, 2048), (8, 2048), (64, 2048))
METHODS = ("shared", "torch", "sockets")
BLOCK = 50  # calls; those of a block come right after each other, as in a pass


def measure(rank: int, num_ranks: int, port: int, rounds: int) -> dict[str, list[float]]:
    """Microseconds of each call, by method and shape."""
    import torch.distributed as dist

    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=num_ranks)
    inputs = {shape: input_of(rank, shape) for shape in SHAPES}
    expected = {shape: input_of(0, shape) for shape in SHAPES}
    for shape in SHAPES:
        for other in range(1, num_ranks):
            expected[shape] = expected[shape] + input_of(other, shape)

    def reduce_by_torch(x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    times: dict[str, list[float]] = {}
    for number in range(rounds + 1):  # the first one warms up
        group = open_shared(rank, num_ranks)
        for shape, x in inputs.items():
            assert torch.equal(torch.ops.specc_cpu.all_reduce(x), expected[shape])
            shared = run_block(torch.ops.specc_cpu.all_reduce, x)
            by_torch = run_block(reduce_by_torch, x.clone())
            if number:
                times.setdefault(f"shared {shape}", []).extend(shared)
                times.setdefault(f"torch {shape}", []).extend(by_torch)
        dist.barrier()
        group.close()
        group = join_sockets(free_address(rank), rank, num_ranks)
        for shape, x in inputs.items():
            assert torch.equal(torch.ops.specc_cpu.all_reduce(x), expected[shape])
            by_sockets = run_block(torch.ops.specc_cpu.all_reduce, x)
            if number:
                times.setdefault(f"sockets {shape}", []).extend(by_sockets)
        group.close()
    dist.destroy_process_group()
    return times


def input_of(rank: int, shape: tuple[int, int]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


def open_shared(rank: int, num_ranks: int) -> SharedGroup:
    import torch.distributed as dist

    tickets: list[str | None] = [None]
    if rank == 0:
        group = SharedGroup.create(num_ranks)
        tickets = [group.ticket]
    dist.broadcast_object_list(tickets)
    if rank:
        assert tickets[0] is not None
        group = SharedGroup.open(tickets[0], rank, num_ranks)
    group.wait_for_all(60)
    return group


def free_address(rank: int) -> str:
    """One of this machine, of all ranks alike."""
    import torch.distributed as dist

    chosen: list[str | None] = [None]
    if rank == 0:
        chosen = [f"tcp://127.0.0.1:{free_port()}"]
    dist.broadcast_object_list(chosen)
    return str(chosen[0])


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_block(function: Callable[[Tensor], Tensor], x: Tensor) -> list[float]:
    times = []
    for _ in range(BLOCK):
        begin = time.perf_counter()
        function(x)
        times.append((time.perf_counter() - begin) * 1e6)
    return times


def start(num_ranks: int, rounds: int) -> dict[str, list[float]]:
    """Run the ranks as processes; the times that rank 0 writes."""
    port = free_port()
    command = [sys.executable, "-P", __file__, "--rounds", str(rounds), "--ranks", str(num_ranks)]
    processes = [
        subprocess.Popen([*command, "--rank", str(rank), "--port", str(port)], stdout=pipe)
        for rank in range(num_ranks)
        for pipe in [subprocess.PIPE if rank == 0 else None]
    ]
    said, _ = processes[0].communicate()
    assert all(process.wait() == 0 for process in processes)
    return json.loads(said)


def summary(num_ranks: int, times: dict[str, list[float]]) -> list[dict]:
    rows = []
    for shape in SHAPES:
        calls = len(times[f"shared {shape}"])
        row: dict = {"ranks": num_ranks, "shape": list(shape), "calls": calls}
        for method in METHODS:
            values = sorted(times[f"{method} {shape}"])
            row[f"{method}_us"] = {
                "p10": round(percentile(values, 10), 1),
                "median": round(percentile(values, 50), 1),
                "p90": round(percentile(values, 90), 1),
            }
        for other in ("torch", "sockets"):
            ratio = row["shared_us"]["median"] / row[f"{other}_us"]["median"]
            row[f"shared_over_{other}"] = round(ratio, 3)
        rows.append(row)
    return rows


def main() -> None:
    """Print a table, and write JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    native.load()
    torch.set_num_threads(1)
    if arguments.rank is not None:
        times = measure(arguments.rank, arguments.ranks[0], arguments.port, arguments.rounds)
        if arguments.rank == 0:
            json.dump(times, sys.stdout)
        return
    load_before = os.getloadavg()
    rows = []
    for num_ranks in arguments.ranks:
        for row in summary(num_ranks, start(num_ranks, arguments.rounds)):
            rows.append(row)
            cells = [
                f"{method} {row[f'{method}_us']['p10']:.1f} / {row[f'{method}_us']['median']:.1f}"
                for method in METHODS
            ]
            print(f"{num_ranks} ranks, {row['shape']}: " + " | ".join(cells) + " us", flush=True)
    if arguments.json:
        report = {
            "command": "OMP_NUM_THREADS=1 python tests/measure/all_reduce.py --json …",
            "date": datetime.date.today().isoformat(),
            "machine": describe_machine(),
            "load_before_and_after": [round(x[0], 2) for x in (load_before, os.getloadavg())],
            "torch": torch.__version__,
            "dtype": "float32",
            "results": rows,
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
