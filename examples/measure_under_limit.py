r"""One model in too little memory: llama.cpp, which maps its file, beside offloaded weights.

    python examples/measure_under_limit.py engine/ --target T --draft examples/pair/draft \
      --limit 700M --budget 350M --output out/under_limit.json

The engine is that of `measure_offload.py`; the checkpoints are those that it was compiled of, and
become GGUF files of the same type. Needs llama-cpp-python and gguf (the extra `peers`), and
permission to make a group of processes with a limit of memory: cgroup v1 here, a group below that
of this process. Pages of files that a group has read count towards its limit, so that both sides
have the same room for weights. Each case is a process of its own; greedy decoding of one prompt
after the other.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specc.system.files import parse_bytes

PROMPTS = Path(__file__).parent / "pair" / "prompts.jsonl"
DEPTH = 4


@contextlib.contextmanager
def limited_group(limit: int) -> Iterator[Path]:
    """A group of processes that together have so many bytes of memory, files' pages included."""
    lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    own = next((line.split(":")[2] for line in lines if line.split(":")[1] == "memory"), None)
    if own is None:
        raise SystemExit("no group of cgroup v1 with a limit of memory on this machine")
    group = Path(f"/sys/fs/cgroup/memory{own}") / f"limited-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit))
        yield group
    finally:
        group.rmdir()


def run_in(group: Path, arguments: argparse.Namespace, case: str) -> dict[str, Any]:
    """One case in a process that joins the group before it loads anything."""
    (group / "memory.max_usage_in_bytes").write_text("0")
    # pages of the weights that others have read would be theirs, and free of charge
    for file in weight_files(arguments):
        drop_cache(file)
    command = [sys.executable, "-P", *sys.argv, "--one", case, "--group", str(group)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    peak = int((group / "memory.max_usage_in_bytes").read_text())
    return {"case": case, **found, "peak_of_group_bytes": peak}


def weight_files(arguments: argparse.Namespace) -> list[Path]:
    return [*arguments.gguf.glob("*.gguf"), *arguments.engine.rglob("*.safetensors")]


def drop_cache(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def read_bytes() -> int:
    """That this process has had from disk."""
    lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def texts(arguments: argparse.Namespace) -> list[str]:
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()[: arguments.num_prompts]
    return [json.loads(line)["prompt"] for line in lines]


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """One case, in this process."""
    (arguments.group / "cgroup.procs").write_text(str(os.getpid()))
    who, _, what = arguments.one.partition(" ")
    return (peer if who == "llama.cpp" else engine)(arguments, what)


def peer(arguments: argparse.Namespace, mode: str) -> dict[str, Any]:
    """llama.cpp, alone or with the draft: its own loops."""
    from tokenizers import Tokenizer

    from specc.bench.peers.llama_cpp import PEER
    from specc.bench.peers.peer import Job

    tokenizer = Tokenizer.from_file(str(arguments.target / "tokenizer.json"))
    job = Job(
        mode=mode,
        target=str(arguments.gguf / "target.gguf"),
        draft=str(arguments.gguf / "draft.gguf") if mode == "assisted" else None,
        dtype="float32",
        threads=arguments.threads,
        batches=[[tokenizer.encode(text).ids] for text in texts(arguments)],
        max_tokens=arguments.tokens if mode == "assisted" else arguments.off_tokens,
        depth=DEPTH,
    )
    loaded = PEER.load(job)
    setting = next(iter(loaded.settings))
    before = read_bytes()
    found = loaded.run(setting)
    return {
        "setting": setting,
        "outputs": found.outputs,
        "tokens_per_s": found.num_decode_tokens / found.decode_s,
        "steps": found.num_steps,
        "read_bytes_per_step": round(
            (read_bytes() - before) / (found.num_steps + len(job.batches))
        ),
    }


def engine(arguments: argparse.Namespace, plan: str) -> dict[str, Any]:
    """An engine with this plan, and weights in its file."""
    from specc.runtime.engine import Engine
    from specc.runtime.llm import LLM
    from specc.sampling.params import SamplingParams

    loaded = Engine.load(
        arguments.engine,
        num_threads=arguments.threads,
        offload_weights=parse_bytes(arguments.budget),
    )
    llm = LLM(loaded, plan=plan, shares_prefixes=False)
    count = arguments.off_tokens if plan == "off" else arguments.tokens
    params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
    before = read_bytes()
    prompts = texts(arguments)
    outputs = [list(llm.generate([p], params)[0].outputs[0].token_ids) for p in prompts]
    stats = llm.get_metrics()
    seconds = stats.draft_s + stats.verify_s + stats.whole_s + stats.commit_s
    passes = stats.num_prefill_passes + stats.num_step_passes
    return {
        "setting": arguments.budget,
        "outputs": outputs,
        # the first token of a prompt is no step's
        "tokens_per_s": (stats.num_output_tokens - len(prompts)) / seconds,
        "steps": stats.num_step_passes,
        "read_bytes_per_step": round((read_bytes() - before) / passes),
    }


def write_gguf(arguments: argparse.Namespace) -> None:
    """Files of both models, in float32, where there are none yet."""
    from specc.bench.peers.gguf_export import export
    from specc.bench.peers.peer import Form

    arguments.gguf.mkdir(parents=True, exist_ok=True)
    for name in ("target", "draft"):
        file = arguments.gguf / f"{name}.gguf"
        if not file.exists():
            export(getattr(arguments, name), Form("float32"), file)


def named(argument: str) -> str:
    """An argument as a report may hold it: paths of the machine by their names alone."""
    return Path(argument).name if Path(argument).is_absolute() else argument


def main() -> None:
    """All cases by turns, and JSON with their medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", type=Path)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--gguf", type=Path, default=Path("gguf"), help="directory of the files")
    parser.add_argument("--limit", default="700M", help="of memory, for everything")
    parser.add_argument("--budget", default="350M", help="of the engine's weights")
    parser.add_argument("--plans", default="off,chain-4,tree-4-2-2-1")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--num-prompts", type=int, default=1)
    parser.add_argument("--off-tokens", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path, default=Path("under_limit.json"))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--group", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments)))
        return
    write_gguf(arguments)
    cases = ["llama.cpp plain", "llama.cpp assisted"]
    cases += [f"specc {plan}" for plan in arguments.plans.split(",")]
    turns: dict[str, list[dict[str, Any]]] = {case: [] for case in cases}
    with limited_group(parse_bytes(arguments.limit)) as group:
        for _ in range(arguments.turns):
            for case in cases:
                turns[case].append(run_in(group, arguments, case))
                # of a process that has ended, its group knows only a moment later
                time.sleep(0.5)
                found = turns[case][-1]
                print(case, f"{found['tokens_per_s']:.2f} tokens/s", flush=True)
    from specc.system.machine import describe_machine
    from specc.version import __version__

    known = turns[cases[-1]][0]["outputs"]
    for found in (turn for of_case in turns.values() for turn in of_case):
        pairs = zip(found.pop("outputs"), known, strict=True)
        found["has_the_same_tokens"] = all(a[: len(b)] == b[: len(a)] for a, b in pairs)
    report = {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", *map(named, sys.argv)]),
        "machine": describe_machine(),
        "load_average": os.getloadavg(),
        "versions": {"specc": __version__, "python": sys.version.split()[0]},
        "cases": [
            turns[case][0]
            | {
                "tokens_per_s": statistics.median(turn["tokens_per_s"] for turn in turns[case]),
                "tokens_per_s_of_turns": [turn["tokens_per_s"] for turn in turns[case]],
            }
            for case in cases
        ],
    }
    arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
