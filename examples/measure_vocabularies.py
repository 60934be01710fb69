"""Tokens a step of drafts that have the target's tokenizer, and of one that has another.

    python examples/measure_vocabularies.py --json out/other_vocabulary.json

The demo target is compiled with its own draft and with those of `train_other_vocabulary.py`, whose
tokenizer is Llama's kind. Chains of each draft continue the same prompts, greedily and at
temperature 1 by each rule; outputs of rules whose seeds hold for every plan are compared with plain
decoding, token by token. Counts alone, no times. Text that loops is easy to draft, so the share of
distinct 4-grams of the outputs stands beside them. Of the tokens of the target's own outputs, the
share that a draft can propose bounds what it can have accepted.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

# matrices this small gain nothing from a second thread, and lose where cores are shared
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from safetensors.torch import load_file

from specc.compiler.build import build
from specc.config import CompileConfig
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan
from specc.system.machine import describe_machine

PAIR = Path(__file__).resolve().parent / "pair"
FILES = {"held out": "prompts.jsonl", "unused": "prompts_unused.jsonl"}
# greedy, and at temperature 1 by each rule; those of seeds that hold for every plan are compared
RULES = (None, "coupled", "delta", "mss", "swor")
COMPARED = (None, "coupled", "delta")
BATCH = 8


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--target", type=Path, default=PAIR / "target")
    add("--drafts", type=Path, nargs="+", default=[PAIR / "draft", PAIR / "draft-llama"])
    add("--num-speculative-tokens", type=int, default=4)
    add("--prompts", type=int, default=40, help="at most, of each file")
    add("--tokens", type=int, default=128)
    add("--backend", default="cpu")
    add("--json", type=Path, help="write the figures here")
    return parser.parse_args()


def compiled(args: argparse.Namespace, directory: Path) -> Path:
    """An engine of all drafts, each with a plan of its own."""
    chain = (1,) * args.num_speculative_tokens
    names = [f"draft_{number}" for number in range(len(args.drafts))]
    config = CompileConfig(
        plans=tuple(SpecPlan.from_widths(chain, (name,)) for name in names),
        max_batch_size=BATCH,
        max_seq_len=512,
        backend=args.backend,
        probe=False,
    )
    print("compiling", file=sys.stderr)
    made = build(args.target, args.drafts, directory / "engine", config)
    for text in made.warnings:
        print(text, file=sys.stderr)
    return directory / "engine"


def continued(
    engine: Engine, plan: str, prompts: list[str], tokens: int, rule: str | None
) -> tuple[list[list[int]], float]:
    """Outputs, and tokens a step."""
    llm = LLM(engine, plan=plan)
    params = [
        SamplingParams(
            max_tokens=tokens,
            ignore_eos=True,
            temperature=0.0 if rule is None else 1.0,
            rule=rule,
            seed=seed,
        )
        for seed in range(len(prompts))
    ]
    outputs = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]
    return outputs, llm.get_metrics().mean_acceptance_length


def covered(directory: Path, outputs: list[list[int]]) -> dict[str, float]:
    """Of drafts of other tokens, the share of these tokens that they can propose."""
    ids = torch.tensor([token for output in outputs for token in output])
    found = {}
    for file in sorted(directory.glob("draft-*/weights.safetensors")):
        lacking = load_file(file).get("constant.vocabulary_lacking")
        if lacking is not None:
            found[file.parent.name.replace("-", "_")] = 1 - lacking[ids].float().mean().item()
    return found


def distinct(outputs: list[list[int]]) -> float:
    """Share of distinct 4-grams among those of each output."""
    grams = [[tuple(o[i : i + 4]) for i in range(len(o) - 3)] for o in outputs]
    return sum(len(set(row)) for row in grams) / sum(map(len, grams))


def rows_of(directory: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One of each file of prompts, rule and draft."""
    engine, rows = Engine.load(directory), []
    plans = [plan for plan in engine.plans.values() if plan.speculates]
    for where, file in FILES.items():
        lines = (PAIR / file).read_text(encoding="utf-8").splitlines()[: args.prompts]
        prompts = [json.loads(line)["prompt"] for line in lines]
        plain: dict[bool, list[list[int]]] = {}
        for rule in RULES:
            is_sampled = rule is not None
            if is_sampled not in plain:
                plain[is_sampled] = continued(engine, "off", prompts, args.tokens, rule)[0]
            for plan, draft in zip(plans, args.drafts, strict=True):
                outputs, length = continued(engine, plan.name, prompts, args.tokens, rule)
                row: dict[str, Any] = {
                    "prompts": f"{where}, {len(prompts)}",
                    "rule": rule or "greedy",
                    "draft": draft.name,
                    "tokens_per_step": round(length, 3),
                    "distinct_4_grams": round(distinct(outputs), 3),
                }
                if rule in COMPARED:
                    row["equal_to_off"] = outputs == plain[is_sampled]
                share = covered(directory, plain[is_sampled]).get(plan.drafts[0])
                if share is not None:
                    row["share_it_can_propose"] = round(share, 4)
                rows.append(row)
                print(json.dumps(row), file=sys.stderr)
    return rows


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        directory = compiled(args, Path(temporary))
        drafts = Engine.load(directory).manifest.models[1:]
        facts = {
            "command": shlex.join(["python", *sys.argv]),
            "date": datetime.date.today().isoformat(),
            "machine": describe_machine(),
            "torch": torch.__version__,
            "chain": args.num_speculative_tokens,
            "tokens": args.tokens,
            "backend": args.backend,
            "vocabularies": {
                path.name: draft.vocabulary and vars(draft.vocabulary)
                for path, draft in zip(args.drafts, drafts, strict=True)
            },
            "rows": rows_of(directory, args),
        }
    text = json.dumps(facts, indent=1) + "\n"
    if args.json:
        args.json.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
