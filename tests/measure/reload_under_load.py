"""Serve an engine, and change its draft's weights, or let it sleep, while clients ask.

    PYTHONPATH=. python tests/measure/reload_under_load.py --engine E --weights DIR --json FILE \
        [--requests 2000] [--every 1] [--sleeps] [--prompts prompts.jsonl]

Every output is compared with what the engine says to the request alone, decoding plainly.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from specc.percentile import percentile
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from tests.reload_load import Address, LoadFigures, run_load

WORDS = (
    "def read_",
    "import ",
    "class Tree",
    "for i in ",
    "return ",
    "# a list of ",
    "x = ",
    "if ",
)


def prompts_of(count: int) -> list[str]:
    return [f"{WORDS[i % len(WORDS)]}{i} {WORDS[(3 * i + 1) % len(WORDS)]}" for i in range(count)]


def start(engine: str, weights: str) -> tuple[subprocess.Popen[str], str]:
    """The server's process, and its URL once it listens."""
    process = subprocess.Popen(
        [
            sys.executable, "-m", "specc", "serve", engine, "--port", "0", "--no-measure",
            "--draft-weights-dir", weights, "--policy", "fixed",
        ],
        env=os.environ | {"SPECC_ADMIN_KEY": "operator", "SPECC_API_KEY": "user"},
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"serving at (http://\S+)", line):
            return process, found[1]
    raise SystemExit("the server does not start")


def figures(found: LoadFigures) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "requests": found.num_requests,
        "equal_to_solo": found.num_requests,
        "reloads": found.num_reloads,
        "sleeps": found.num_sleeps,
        "refused_while_asleep": found.num_refused,
        "seconds": round(found.seconds, 1),
        "latency_p50_s": round(median(found.latencies_s), 3),
        "latency_p99_s": round(percentile(found.latencies_s, 99) or 0.0, 3),
        "reload_p50_s": round(median(found.reload_s), 3),
        "reload_most_s": round(max(found.reload_s), 3),
    }
    if found.rss_bytes:
        names = ("awake", "asleep", "awake_again")
        columns = zip(*found.rss_bytes, strict=True)
        shown["resident_mb"] = {
            name: round(median(column) / 2**20, 1)
            for name, column in zip(names, columns, strict=True)
        }
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", required=True)
    parser.add_argument("--weights", required=True, help="folder of new weights")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--every", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--sleeps", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    prompts = prompts_of(97)
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    with LLM(args.engine, plan="off") as solo:
        texts = [output.outputs[0].text for output in solo.generate(prompts, params)]
    body = {"temperature": 0, "max_tokens": args.max_tokens}
    bodies = [body | {"prompt": prompt} for prompt in prompts]
    files = sorted(path.name for path in Path(args.weights).glob("*.safetensors"))
    process, base = start(args.engine, args.weights)
    try:
        server = Address(base, "user", "operator", process.pid)
        found = run_load(
            server, bodies, texts, files, args.requests, args.every, sleeps=args.sleeps
        )
    finally:
        process.terminate()
        process.wait(60)
    shown = {"date": time.strftime("%Y-%m-%d"), "files": files} | figures(found)
    print(json.dumps(shown, indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(shown, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
