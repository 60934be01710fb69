r"""Ranks of a cut engine that are killed or stopped while it serves a request: what comes of it.

`test_cut_ranks.py` and `test_lost_stages.py` look at some cases in every run of the tests. All of
them, with times:

    specc compile --target examples/pair/target --draft examples/pair/draft -tp 2 \
      --backend eager --tree 3,2,1 -o out/two-ranks
    PYTHONPATH=. python -m tests.runtime.ranks.lose_ranks out/two-ranks --json out.json

Likewise for stages: engines of `-pp 2`, and of `-tp 2 -pp 2`. With `--requests 4` a batch is in
each stage.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from specc.artifact.directory import read_manifest
from specc.system.machine import describe_machine
from specc.version import __version__
from tests.runtime.ranks.processes import ENDS_S, LedProcess, wait_gone

# where rank 0 waits while it happens; the others have the order already, and wait in a collective
PHASES = ("prefill", "draft", "verify", "idle")
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
# of the ranks: a rank that stands still is found after it
TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Loss:
    """What came of a rank that was lost.

    Args:
        pid: its process.
        seconds: until no process of the job was left.
        exit_code: of rank 0.
        error: that the open request got, or the next one; None where rank 0 was lost.
        num_stages: of the engine: 1, all ranks have all layers.
        num_requests: that were open, and got this error, all of them.
    """

    num_ranks: int
    rank: int
    pid: int
    signal: str
    phase: str
    seconds: float
    exit_code: int
    error: str | None
    health: str | None
    log: str
    num_stages: int = 1
    num_requests: int = 1

    def check(self) -> None:
        """Raises AssertionError: it is not as docs/design/ranks.md says."""
        assert self.seconds <= ENDS_S, self
        if self.rank == 0:
            # whoever kills it has no say; what is stopped is killed by the others
            assert self.exit_code == -signal.SIGKILL, self
            stopped = f"rank 0 has given no sign of life for {TIMEOUT_S:g} s"
            assert self.signal == "SIGKILL" or stopped in self.log, self
            return
        assert self.exit_code == 1, self
        # at once: no rank comes back
        assert (self.error, self.health) == ("FaultError", "dead"), self
        cause = (
            "was killed by signal 9 (SIGKILL)"
            if self.signal == "SIGKILL"
            else f"has given no sign of life for {TIMEOUT_S:g} s: it is stopped"
        )
        assert f"rank {self.rank} (pid {self.pid}) {cause}" in self.log, self


def lose(
    engine: Path,
    num_ranks: int,
    rank: int,
    number: signal.Signals,
    phase: str,
    num_requests: int = 1,
) -> Loss:
    """Start an engine that serves a request, and take a rank from it.

    Args:
        engine: cut for `num_ranks`.
        rank: that gets the signal.
        phase: of the request: one of `PHASES`.
        num_requests: that are open, all of which have to get the same error.
    Raises:
        AssertionError: a process is left.
    """
    ranks = {"num_ranks": num_ranks, "timeout_s": TIMEOUT_S}
    options = {"stage": phase, "is_service": True, "num_requests": num_requests}
    with LedProcess(engine, ranks, **options) as led:
        led.expect("at")
        assert len(led.pids) == num_ranks
        begin_s = time.monotonic()
        os.kill(led.pids[rank], number)
        if rank:
            led.answer()
        # `ends` gives up on rank 0 after this time, and on the others soon after
        code = led.ends(2 * ENDS_S)
        seconds = time.monotonic() - begin_s
        assert not wait_gone(led.pids, 0)
        errors = [(told["error"], told["health"]) for told in led.said("error")]
        # what is said, not where in the code
        lines = led.errors().splitlines()
        log = [line for line in lines if line.startswith(("rank", "found:"))]
    # the first request of an idle one has ended well
    error, health = errors[-1] if errors and rank else (None, None)
    if rank and phase != "idle":
        assert errors == [(error, health)] * num_requests, errors
    return Loss(
        num_ranks,
        rank,
        led.pids[rank],
        number.name,
        phase,
        round(seconds, 2),
        code,
        error,
        health,
        "\n".join(log),
        max(1, len(read_manifest(engine).stages)),
        num_requests,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engines", nargs="+", type=Path, help="engine directories, cut for ranks")
    parser.add_argument("--phases", nargs="+", default=PHASES, choices=PHASES, help="all, or some")
    parser.add_argument("--requests", type=int, default=1, help="that are open together")
    parser.add_argument("--json", type=Path, help="file to write; what it holds stays")
    args = parser.parse_args()
    losses = []
    for engine in args.engines:
        num_ranks = read_manifest(engine).num_ranks
        for phase, number, rank in itertools.product(args.phases, SIGNALS, range(num_ranks)):
            loss = lose(engine, num_ranks, rank, number, phase, args.requests)
            loss.check()
            losses.append(loss)
            print(num_ranks, phase, number.name, rank, loss.seconds, loss.error, flush=True)
    if args.json:
        before = json.loads(args.json.read_text())["losses"] if args.json.exists() else []
        date = time.strftime("%Y-%m-%d")
        found = {
            "command": "python -m tests.runtime.ranks.lose_ranks ENGINES --json FILE, with --phases"
            " verify for four ranks, and again with --requests 4 --phases draft verify for stages",
            "machine": describe_machine(),
            "versions": {"specc": __version__, "torch": torch.__version__},
            "date": date,
            "timeout_s": TIMEOUT_S,
            "load_average": os.getloadavg()[0],
            "losses": [*before, *({"date": date, **asdict(loss)} for loss in losses)],
        }
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
