"""Tokens a step of levels that are shared out, beside static trees of as many nodes: counts.

`python tests/measure/budgets.py --output out/budgets`, of the demo pair's draft model.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from specc.compiler.build import build
from specc.config import CompileConfig
from specc.runtime.llm import LLM
from specc.sampling_params import SamplingParams
from specc.speculation.dynamic_tree import BudgetTree
from specc.speculation.plans import SpecPlan

PAIR = Path("examples/pair")
PLANS = (
    SpecPlan.from_widths((2, 2, 1, 1)),
    SpecPlan.from_dynamic(BudgetTree.of((2, 4, 4, 4))),
    SpecPlan.from_widths((4, 1, 1, 1)),
    SpecPlan.from_dynamic(BudgetTree.of((4, 4, 4, 4))),
)
RULES = ("greedy", "coupled", "mss", "swor")


def tokens_a_step(llm: LLM, prompts: list[str], rule: str, seeds: range) -> float:
    accepted = steps = 0
    for seed in seeds if rule in ("mss", "swor") else seeds[:1]:
        params = SamplingParams(max_tokens=64, temperature=0.0)
        if rule != "greedy":
            params = SamplingParams(max_tokens=64, temperature=1.0, rule=rule, seed=100 * seed + 7)
        found = [output.metrics for output in llm.generate(prompts, params)]
        accepted += sum(one.num_accepted_tokens for one in found)
        steps += sum(one.num_steps for one in found)
    return 1 + accepted / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    if not given.output.exists():
        config = CompileConfig(plans=PLANS, max_seq_len=512, backend="cpu", probe=False)
        build(PAIR / "target", [PAIR / "draft"], given.output, config)
    lines = (PAIR / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines[: given.num_prompts]]
    for plan in PLANS:
        llm = LLM(given.output, plan=plan.name)
        row = [tokens_a_step(llm, prompts, rule, range(given.seeds)) for rule in RULES]
        print(json.dumps([plan.name, plan.num_nodes, *(round(x, 3) for x in row)]), flush=True)


if __name__ == "__main__":
    main()
