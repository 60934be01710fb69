r"""Ranks of a cut engine that are killed or stopped while it serves a request: what comes of it.

`test_cut_ranks.py` looks at some cases in every run of the tests. All of them, with times:

    specc compile --target examples/pair/target --draft examples/pair/draft -tp 2 \
      --backend eager --tree 3,2,1 -o out/two-ranks
    PYTHONPATH=. python -m tests.runtime.ranks.lose_ranks out/two-ranks --json out.json
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from specc.system.machine import describe_machine
from specc.version import __version__
from tests.runtime.ranks.processes import ENDS_S, LedProcess, wait_gone

# where rank 0 waits while it happens; the others have the order already, and wait in a collective
STAGES = ("prefill", "draft", "verify", "idle")
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
# of the ranks: a rank that stands still is found after it
TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Loss:
    """What came of a rank that was lost.

    Args:
        num_ranks: of the engine.
        rank: that was lost.
        pid: its process.
        signal: that it got.
        stage: in which.
        seconds: until no process of the job was left.
        exit_code: of rank 0.
        error: that the open request got, or the next one; None where rank 0 was lost.
        health: of the service then.
        log: what the processes wrote of it.
    """

    num_ranks: int
    rank: int
    pid: int
    signal: str
    stage: str
    seconds: float
    exit_code: int
    error: str | None
    health: str | None
    log: str

    def check(self) -> None:
        """Raises AssertionError: it is not as docs/ranks.md says."""
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
    stage: str,
    num_requests: int = 1,
) -> Loss:
    """Start an engine that serves a request, and take a rank from it.

    Args:
        engine: cut for `num_ranks`.
        num_ranks: of it.
        rank: that gets the signal.
        number: the signal.
        stage: of the request: one of `STAGES`.
        num_requests: that are open, all of which have to get the same error.
    Raises:
        AssertionError: a process is left.
    """
    ranks = {"num_ranks": num_ranks, "timeout_s": TIMEOUT_S}
    options = {"stage": stage, "is_service": True, "num_requests": num_requests}
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
    if rank and stage != "idle":
        assert errors == [(error, health)] * num_requests, errors
    return Loss(
        num_ranks,
        rank,
        led.pids[rank],
        number.name,
        stage,
        round(seconds, 2),
        code,
        error,
        health,
        "\n".join(log),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engines", nargs="+", type=Path, help="engine directories, cut for ranks")
    parser.add_argument("--stages", nargs="+", default=STAGES, choices=STAGES, help="all, or some")
    parser.add_argument("--json", type=Path, help="file to write; what it holds stays")
    args = parser.parse_args()
    from specc.artifact.directory import read_manifest

    losses = []
    for engine in args.engines:
        num_ranks = read_manifest(engine).num_ranks
        for stage in args.stages:
            for number in SIGNALS:
                for rank in range(num_ranks):
                    loss = lose(engine, num_ranks, rank, number, stage)
                    loss.check()
                    losses.append(loss)
                    print(num_ranks, stage, number.name, rank, loss.seconds, loss.error, flush=True)
    if args.json:
        before = json.loads(args.json.read_text())["losses"] if args.json.exists() else []
        found = {
            "machine": describe_machine(),
            "versions": {"specc": __version__, "torch": torch.__version__},
            "date": time.strftime("%Y-%m-%d"),
            "timeout_s": TIMEOUT_S,
            "load_average": os.getloadavg()[0],
            "losses": [*before, *(asdict(loss) for loss in losses)],
        }
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
