"""Compile the demo pair, generate from held-out prompts, and measure what speculation did.

    make demo                                     # or
    python examples/demo.py --prompts 33 --tokens 128 --json out/pair.json

Every figure is measured in this run, on this machine.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path

# matrices this small gain nothing from a second thread, and lose where cores are shared
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parent.parent
PAIR = Path("examples/pair")
ENGINE = Path("out/demo-engine")
NUM_STREAMED = 2
# two best logits that are closer than this may change places with the width of a pass
NEAR_TIE = 1e-4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=20, help="held-out prompts to use")
    parser.add_argument("--tokens", type=int, default=96, help="output tokens of each")
    parser.add_argument(
        "--prompts-file", type=Path, default=PAIR / "prompts.jsonl", help="one `prompt` a line"
    )
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    start = time.perf_counter()
    os.chdir(ROOT)

    compile_pair()
    with open(args.prompts_file, encoding="utf-8") as file:
        prompts = [json.loads(line)["prompt"] for line in file][: args.prompts]
    figures, is_lossless = generate(prompts, args.tokens)
    if args.json:
        write_json(args, figures)
    threads = os.environ["OMP_NUM_THREADS"]
    print(f"\ndemo: {time.perf_counter() - start:.0f} s, OMP_NUM_THREADS={threads}")
    return 0 if is_lossless else 1


def compile_pair() -> None:
    """Run the command that a user would type."""
    ENGINE.parent.mkdir(exist_ok=True)
    options = ["--target", PAIR / "target", "--draft", PAIR / "draft"]
    options += ["--num-speculative-tokens", 4, "-o", ENGINE, "--force"]
    command = ["specc", "compile", *map(str, options)]
    print(f"$ {shlex.join(command)}", flush=True)
    subprocess.run([Path(sys.executable).parent / command[0], *command[1:]], check=True)


def write_json(args: argparse.Namespace, figures: dict) -> None:
    """Write the figures with what is needed to repeat them."""
    import torch

    report = {
        "command": f"python examples/demo.py --prompts {args.prompts} --tokens {args.tokens}"
        f" --prompts-file {args.prompts_file.as_posix()}",
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "omp_num_threads": os.environ["OMP_NUM_THREADS"],
        **figures,
    }
    args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def generate(prompts: list[str], num_tokens: int) -> tuple[dict, bool]:
    """Decode every prompt with and without speculation; print both and compare."""
    from specc import LLM, Engine, SamplingParams

    engine = Engine.load(ENGINE, max_num_seqs=1)
    speculative, plain = LLM(engine), LLM(engine, plan="off")
    params = SamplingParams(temperature=0, max_tokens=num_tokens)
    outputs, expected = [], []
    for number, prompt in enumerate(prompts):
        is_shown = number < NUM_STREAMED
        if is_shown:
            print(f"\n--- prompt {number + 1}, then what the pair writes\n{prompt}", end="")
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
    return figures, compare(prompts, outputs, expected)


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


def compare(prompts: list[str], outputs: list[list[int]], expected: list[list[int]]) -> bool:
    """Report whether speculation changed an output; a near tie of the target's is explained."""
    same = sum(got == want for got, want in zip(outputs, expected, strict=True))
    print(f"{'equal to plain decoding':<24}{same} of {len(outputs)} outputs, token for token")
    is_lossless = True
    for number, (got, want) in enumerate(zip(outputs, expected, strict=True), start=1):
        if got == want:
            continue
        place = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), None)
        gap = None if place is None else logit_gap(prompts[number - 1], want[:place])
        is_tie = gap is not None and gap < NEAR_TIE
        reason = (
            f"the target's two best logits differ by {gap:.1e}" if gap is not None else "length"
        )
        print(f"  prompt {number} from token {place}: {reason}{'' if is_tie else ': NOT LOSSLESS'}")
        is_lossless &= is_tie
    return is_lossless


def logit_gap(prompt: str, tokens: list[int]) -> float:
    """Gap between the target's two best logits after this text, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(PAIR / "target")(prompt)["input_ids"] + tokens
    with torch.inference_mode():
        best = model(torch.tensor([ids])).logits[0, -1].topk(2).values
    return float(best[0] - best[1])


if __name__ == "__main__":
    sys.exit(main())
