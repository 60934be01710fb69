"""Measure steps whose weights are held in huge pages, and mapped, in turns.

    python examples/measure_weight_pages.py out/engine-100m --threads 2 --json FILE

A mapped file lies in the system's cache of pages, in pages as large as it was read: in whole
stretches, where file system and Linux do so (ext4 since 6.16), or in pages of 4 KB. `mapped` is the
file read from beginning to end, `mapped small` the file read page by page at random, which is what
every other system has. Rounds go over all ways; each loads the engine anew.
"""

from __future__ import annotations

import argparse
import datetime
import json
import mmap
import os
import platform
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

PROMPTS = Path(__file__).parent / "pair" / "prompts.jsonl"
PAGE = 4096
WAYS = ("mapped small", "mapped", "held")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", type=Path, help="an engine of the backend cpu")
    parser.add_argument("--plan", action="append", help="instead of all plans; repeatable")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of each run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="threads of torch")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    args = parser.parse_args()

    import torch

    from specc.artifact.directory import read_manifest
    from specc.system.machine import describe_machine

    manifest = read_manifest(args.engine)
    plans = args.plan or [plan.name for plan in manifest.plans]
    files = [args.engine / manifest.weights_file(model) for model in manifest.models]
    with open(PROMPTS, encoding="utf-8") as lines:
        prompt = json.loads(next(lines))["prompt"]
    times: dict[str, dict[str, list[float]]] = {plan: {way: [] for way in WAYS} for plan in plans}
    texts: dict[str, set[str]] = {plan: set() for plan in plans}
    for round_ in range(args.rounds):
        for way in WAYS[round_ % 3 :] + WAYS[: round_ % 3]:
            for file in files:
                read_anew(file, by_page=way == "mapped small")
            for plan, (seconds, text) in run(args, way, plans, prompt).items():
                times[plan][way].append(seconds)
                texts[plan].add(text)
        print(f"round {round_ + 1} of {args.rounds}", file=sys.stderr)
    assert all(len(found) == 1 for found in texts.values()), "outputs differ"
    rows = {plan: row_of(times[plan]) for plan in plans}
    print(f"{'median of steps, ms':<20}" + "".join(f"{way:>14}" for way in WAYS))
    for plan, row in rows.items():
        print(f"{plan:<20}" + "".join(f"{row[way]['step_ms']:>14}" for way in WAYS))
    if args.json:
        report = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": shlex.join(["python", *sys.argv]),
            "machine": describe_machine(),
            "kernel": platform.release(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "threads": torch.get_num_threads(),
            "weights_bytes": sum(file.stat().st_size for file in files),
            "plans": rows,
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def read_anew(file: Path, by_page: bool) -> None:
    """Have the system forget a file, and read it again in large stretches or page by page."""
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    if by_page:
        with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as mapped:
            mapped.madvise(mmap.MADV_RANDOM)
            for offset in range(0, len(mapped), PAGE):
                mapped[offset]
    else:
        buffer = bytearray(16 << 20)
        while os.readv(descriptor, [buffer]):
            pass
    os.close(descriptor)


def run(args: Any, way: str, plans: list[str], prompt: str) -> dict[str, tuple[float, str]]:
    """Plan → median seconds of a step, and the text."""
    from specc import LLM, Engine, SamplingParams

    engine = Engine.load(args.engine, num_threads=args.threads, mmap=way != "held")
    found = {}
    for plan in plans:
        llm, step = LLM(engine, plan=plan), engine.steps[plan]
        llm.generate(prompt, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        seconds: list[float] = []
        advance: Any = step.advance

        def timed(*inputs: Any, advance: Any = advance, seconds: Any = seconds) -> Any:
            begin = time.perf_counter()
            result = advance(*inputs)
            seconds.append(time.perf_counter() - begin)
            return result

        step.advance = timed  # type: ignore[method-assign]
        sampling = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
        text = llm.generate(prompt, sampling)[0].outputs[0].text
        del step.advance
        found[plan] = statistics.median(seconds), text
    return found


def row_of(times: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    """Way → median step, and medians of its ratio to `mapped small` of the same round."""
    row: dict[str, dict[str, Any]] = {}
    for way, seconds in times.items():
        ratios = [slow / own for slow, own in zip(times[WAYS[0]], seconds, strict=True)]
        row[way] = {
            "step_ms": round(1e3 * statistics.median(seconds), 2),
            "least_ms": round(1e3 * min(seconds), 2),
            "over_mapped_small": round(statistics.median(ratios), 3),
        }
    return row


if __name__ == "__main__":
    sys.exit(main())
