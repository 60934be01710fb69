r"""Weights that cannot be read any more while an engine serves requests: what comes of these.

    specc compile --target examples/pair/target --draft examples/pair/draft --segments \
      --tree 3,2,1 -o out/segments
    PYTHONPATH=. python -m tests.runtime.backends.lose_reads out/segments --json lost_reads.json

Likewise of an engine of two ranks (`-tp 2`), whose rank 1 cannot read. Two requests run and two
wait when it happens. Where reads can be right again, they are so as soon as the first request has
got its error. The file that is cut is the engine's own; it is written again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specc.system.machine import describe_machine
from specc.version import __version__
from tests.runtime.backends import broken_disk

KINDS = {
    "fails": "reads return an input/output error",
    "ends": "reads return no more bytes, as at the end of a file",
    "stops": "reads never return",
    "cut": "the file is cut in the middle of the weights",
}
_LETTERS = {"fails": "e", "ends": "z", "stops": "h"}
_SAID = {
    "fails": "cannot be read at byte",
    "ends": "it was cut while the engine was using it",
    "stops": "no byte of the weights was read for 8 seconds",
    "cut": "it was cut while the engine was using it",
}
ENDS_S = 10.0
_NAME = "tests.runtime.backends.lose_reads"
PLAN = "tree-3-2-1"
PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12, 13], [14, 15, 16, 17, 18]]
NUM_RUNNING = 2
NUM_TOKENS = 48


@dataclass(frozen=True)
class Loss:
    """What came of it.

    Args:
        num_ranks: of the engine; of two, rank 1 is the one that cannot read.
        kind: of `KINDS`.
        seconds: until the last request that ran had its error.
        errors: of each request; None: it ended well, with the tokens of an engine that reads.
        health: of the service, when all requests had ended.
    """

    num_ranks: int
    kind: str
    seconds: float
    errors: list[str | None]
    health: str
    log: str

    def check(self) -> None:
        """Raises AssertionError: it is not as docs/guide/offload.md says."""
        assert self.seconds <= ENDS_S, self
        assert self.errors[:NUM_RUNNING] == ["FaultError"] * NUM_RUNNING, self
        assert _SAID[self.kind] in self.log, self
        if self.num_ranks > 1:
            # the others wait in a sum of the same pass, so there is no next one
            assert self.errors == ["FaultError"] * len(PROMPTS), self
            assert self.health == "dead", self
            assert "rank 1 (pid " in self.log, self
        elif self.kind != "stops":
            assert self.errors[NUM_RUNNING:] == [None] * (len(PROMPTS) - NUM_RUNNING), self
            assert self.health == "ok", self


def lose(engine: Path, kind: str, shim: Path) -> Loss:
    """Run an engine whose weights stay in its file, and break that; see `KINDS`.

    Args:
        shim: of `broken_disk.build_shim`.
    """
    from specc.artifact.directory import read_manifest

    num_ranks = read_manifest(engine).num_ranks
    name, switch = "rank-1.weights" if num_ranks > 1 else "target/weights", shim.parent / "switch"
    switch.write_text("")
    extra = {"LD_PRELOAD": str(shim), "BROKEN_DISK": str(switch)}
    done = subprocess.run(
        [sys.executable, "-m", _NAME, str(engine.resolve()), "--one", kind],
        cwd=Path(__file__).resolve().parents[3],
        env=os.environ | extra | {"BROKEN_NAME": name},
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    said = dict.fromkeys(
        line.replace(f"{engine.resolve()}/", "")
        for line in done.stderr.splitlines()
        if "found:" in line
    )
    return Loss(
        num_ranks, kind, found["seconds"], found["errors"], found["health"], "\n".join(said)
    )


def run(engine_dir: Path, kind: str) -> dict[str, Any]:
    """Requests of a service, before and after reads end, in this process."""
    from specc.artifact.offload import least_budget, read_pieces
    from specc.artifact.segments import SegmentedModel
    from specc.runtime.core import EngineCore
    from specc.runtime.engine import Engine
    from specc.runtime.llm import LLM
    from specc.runtime.service.service import Service
    from specc.sampling.params import SamplingParams

    name = os.environ["BROKEN_NAME"].removeprefix("target/")
    file = next((engine_dir / "target").glob(f"{name}*.safetensors"))
    model = SegmentedModel.from_json(json.loads((engine_dir / "target/segments.json").read_text()))
    pieces, _ = read_pieces(model, file)
    engine = Engine.load(
        engine_dir,
        offload_weights=least_budget(pieces),
        max_num_seqs=NUM_RUNNING,
        oversubscribes=True,
    )
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    llm = LLM(engine, plan=PLAN, shares_prefixes=False)
    wanted = [list(out.outputs[0].token_ids) for out in llm.generate(PROMPTS, params)]
    data = file.read_bytes() if kind == "cut" else b""
    switch = Path(os.environ["BROKEN_DISK"])
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    errors: list[str | None] = [None] * len(PROMPTS)
    ended = [threading.Event() for _ in PROMPTS]
    begun_s, last_s = 0.0, 0.0

    def break_it() -> None:
        nonlocal begun_s
        begun_s = time.monotonic()
        if kind == "cut":
            os.truncate(file, pieces[len(pieces) // 2].offset)
        else:
            switch.write_text(_LETTERS[kind])

    def repair() -> None:
        switch.write_text("")
        if kind == "cut" and file.stat().st_size < len(data):
            with file.open("r+b") as opened:
                opened.write(data)

    def update_of(number: int) -> Any:
        def update(news: Any) -> None:
            nonlocal last_s
            tokens[number] += news.token_ids
            # both run
            if not begun_s and all(tokens[:NUM_RUNNING]):
                break_it()
            if news.error is not None:
                errors[number] = type(news.error).__name__
                if kind != "stops":
                    repair()
                if number < NUM_RUNNING:
                    last_s = time.monotonic()
            if news.is_last:
                ended[number].set()

        return update

    service = Service(EngineCore(engine, PLAN))
    try:
        for number, prompt in enumerate(PROMPTS):
            service.submit(prompt, params, update_of(number))
        # those that wait where reads never return get their errors one iteration after the other
        assert all(event.wait(60.0) for event in ended), errors
    finally:
        # what never returns is its last reader's
        if kind != "stops":
            repair()
    for number, error in enumerate(errors):
        if error is None and tokens[number] != wanted[number]:
            errors[number] = "other tokens"
    return {
        "seconds": round(last_s - begun_s, 2),
        "errors": errors,
        "health": service.health.value,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engines", nargs="+", type=Path, help="engine directories, of segments")
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--one", choices=KINDS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(run(args.engines[0], args.one)), flush=True)
        with contextlib.suppress(BrokenPipeError):
            sys.stderr.flush()
        # a read that never returns is no reason to stay
        os._exit(0)
    losses = []
    with tempfile.TemporaryDirectory() as directory:
        shim = broken_disk.build_shim(Path(directory))
        for engine in args.engines:
            for kind in KINDS:
                loss = lose(engine, kind, shim)
                print(loss.num_ranks, kind, loss.seconds, loss.errors, loss.health, flush=True)
                loss.check()
                losses.append(loss)
    if args.json:
        report = {
            "command": "python -m tests.runtime.backends.lose_reads ENGINES --json FILE",
            "date": time.strftime("%Y-%m-%d"),
            "machine": describe_machine(),
            "versions": {"specc": __version__},
            "load_average": os.getloadavg()[0],
            "kinds": KINDS,
            "losses": [asdict(loss) for loss in losses],
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
