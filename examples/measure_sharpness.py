"""Tokens a step of sampled requests, with drafts as they are and with the factors that suit them.

    python examples/measure_sharpness.py --json out/sharpness.json

The demo target is compiled with each of its drafts. Factors are learned from what it puts out at
temperature 1 after the held-out prompts, as `specc tune` learns them. Then plans with and without
them continue those prompts and others, which they were not learned from, by every rule. Outputs of
rules whose seeds hold for every plan are compared with plain decoding. Counts alone, no times.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from measure_vocabularies import BATCH, COMPARED, FILES, PAIR, continued, distinct

from specc.compiler.build import build
from specc.compiler.extend import extend_engine
from specc.config import CompileConfig
from specc.runtime.engine import Engine
from specc.speculation.plans import OFF, DynamicTree, SpecPlan
from specc.speculation.sharpness import sharpened
from specc.system.machine import describe_machine
from specc.tune.acceptance import sharpened_acceptance
from specc.tune.options import TuneOptions
from specc.tune.outputs import own_outputs

# greedy, and at temperature 1 by each rule that looks at the draft's distribution
RULES = (None, "coupled", "mss", "swor")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--target", type=Path, default=PAIR / "target")
    names = ("draft", "draft-boosted", "draft-llama")
    add("--drafts", type=Path, nargs="+", default=[PAIR / name for name in names])
    add("--files", nargs="+", choices=list(FILES), default=list(FILES))
    add("--prompts", type=int, default=40, help="at most, of each file")
    add("--tokens", type=int, default=128)
    add("--temperature", type=float, default=1.0)
    add("--backend", default="cpu")
    add("--json", type=Path, help="write the figures here")
    return parser.parse_args()


def plans_of(name: str) -> list[SpecPlan]:
    """A chain, a tree and a dynamic one."""
    widths = [SpecPlan.from_widths(x, (name,)) for x in ((1, 1, 1, 1), (1, 1, 3, 1, 1))]
    return [*widths, SpecPlan.from_dynamic(DynamicTree(16, 4, 4), name)]


def prompts_of(file: str, args: argparse.Namespace) -> list[str]:
    lines = (PAIR / file).read_text(encoding="utf-8").splitlines()[: args.prompts]
    return [json.loads(line)["prompt"] for line in lines]


def learned(directory: Path, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Factors of each draft by depth, and the acceptance of chains that they promise."""
    engine, found = Engine.load(directory), {}
    options = TuneOptions(temperature=args.temperature, max_tokens=args.tokens)
    _, outputs = own_outputs(engine, prompts_of(FILES["held out"], args), options)
    for number in range(len(args.drafts)):
        table, factors = sharpened_acceptance(engine, number, outputs, 4, 5)
        first = [round(row[0], 3) for row in table]
        found[f"draft_{number}"] = {"factors": factors, "first_children": first}
        print(f"draft_{number}: {found[f'draft_{number}']}", file=sys.stderr)
    return found


def rows_of(
    directory: Path, pairs: list[tuple[SpecPlan, SpecPlan]], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """One for each file of prompts, rule and plan."""
    engine, rows = Engine.load(directory), []
    for where in args.files:
        prompts = prompts_of(FILES[where], args)
        given = (args.tokens,)
        plain: dict[bool, list[list[int]]] = {}
        for rule in RULES:
            is_sampled = rule is not None
            if is_sampled not in plain:
                plain[is_sampled] = continued(engine, "off", prompts, *given, rule)[0]
            for before, after in pairs:
                if rule in ("mss", "swor") and before.dynamic is not None:
                    continue
                row: dict[str, Any] = {
                    "prompts": f"{where}, {len(prompts)}",
                    "rule": rule or "greedy",
                    "draft": args.drafts[int(before.drafts[0].removeprefix("draft_"))].name,
                    "plan": before.name,
                    "distinct_4_grams": round(distinct(plain[is_sampled]), 3),
                }
                for key, plan in (("before", before), ("after", after)):
                    outputs, length = continued(engine, plan.name, prompts, *given, rule)
                    row[key] = round(length, 3)
                    if rule in COMPARED:
                        row[f"{key}_equal_to_off"] = outputs == plain[is_sampled]
                rows.append(row)
                print(json.dumps(row), file=sys.stderr)
    return rows


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    names = [f"draft_{number}" for number in range(len(args.drafts))]
    plans = [plan for name in names for plan in plans_of(name)]
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary) / "engine"
        config = CompileConfig(
            plans=tuple(plans), max_batch_size=BATCH, max_seq_len=512, backend=args.backend,
            probe=False,
        )  # fmt: skip
        print("compiling", file=sys.stderr)
        manifest = build(args.target, args.drafts, directory, config).manifest
        factors = learned(directory, args)
        given = {name: one["factors"] for name, one in factors.items()}
        pairs = [(plan, sharpened(plan, given)) for plan in plans]
        pairs = [(before, after) for before, after in pairs if before != after]
        every = dict.fromkeys(plan for pair in pairs for plan in pair)
        with extend_engine(directory, manifest) as extension:
            extension.try_plans([*every, OFF])
            facts = {
                "command": shlex.join(["python", *sys.argv]),
                "date": datetime.date.today().isoformat(),
                "machine": describe_machine(),
                "torch": torch.__version__,
                "tokens": args.tokens,
                "temperature": args.temperature,
                "backend": args.backend,
                "learned": {
                    path.name: factors[name] for path, name in zip(args.drafts, names, strict=True)
                },
                "rows": rows_of(extension.directory, pairs, args),
            }
    text = json.dumps(facts, indent=1) + "\n"
    if args.json:
        args.json.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
