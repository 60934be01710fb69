"""Tokens a step of block drafters beside each other: chains, and best-first trees of several sizes.

`python tests/measure/block_drafters.py --output out/block-engines DRAFTER_DIR …`, drafters of the
demo pair's target. Prints a row for each drafter, rule and plan; an engine in --output is used
again. Counts alone: nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from specc.compiler.build import build
from specc.config import CompileConfig
from specc.runtime.llm import LLM
from specc.sampling_params import SamplingParams
from specc.speculation.dynamic_tree import DynamicTree
from specc.speculation.plans import SpecPlan

PAIR = Path("examples/pair")
CHILDREN = 5


def plans_of(depth: int, sizes: list[int]) -> list[SpecPlan]:
    """A chain, and trees of so many nodes, the root among them."""
    chain = SpecPlan.from_widths((1,) * depth)
    trees = [DynamicTree(size, CHILDREN, depth) for size in sizes]
    return [chain, *map(SpecPlan.from_dynamic, trees)]


def tokens_a_step(llm: LLM, prompts: list[str], temperature: float, tokens: int) -> list[float]:
    """The mean over all steps, and half of its 95 % interval over prompts."""
    params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=7)
    found = [output.metrics for output in llm.generate(prompts, params)]
    steps = [one.num_steps for one in found]
    accepted = [one.num_accepted_tokens for one in found]
    mean, count = 1 + sum(accepted) / sum(steps), len(found)
    # of a ratio of two sums: what each prompt is off
    off = [a + s - mean * s for a, s in zip(accepted, steps, strict=True)]
    variance = sum(x * x for x in off) / max(count - 1, 1)
    half = 1.96 * math.sqrt(variance * count) / sum(steps)
    return [round(mean, 3), round(half, 3)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("drafters", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, default=PAIR / "prompts.jsonl")
    parser.add_argument("--num-prompts", type=int, default=33)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 16, 32, 64])
    given = parser.parse_args()
    lines = given.prompts.read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines[: given.num_prompts]]
    plans = plans_of(given.depth, given.sizes)
    for drafter in given.drafters:
        engine = given.output / drafter.name
        if not engine.exists():
            config = CompileConfig(
                plans=tuple(plans), max_seq_len=512, max_batch_size=8, backend="cpu", probe=False
            )
            build(PAIR / "target", [drafter], engine, config)
        for plan in plans:
            llm = LLM(engine, plan=plan.name)
            for temperature in (0.0, 1.0):
                row = tokens_a_step(llm, prompts, temperature, given.tokens)
                print(json.dumps([drafter.name, plan.name, temperature, *row]), flush=True)


if __name__ == "__main__":
    main()
