"""Figures of `boost_tune.py`: what drafts cover, and what merged trees of them accept, by specc.

All trees are plans of one engine that is compiled here; the target's greedy text comes from its
plan off, and every greedy output is compared with it.
"""

from __future__ import annotations

import datetime
import json
import platform
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from pair_data import read_prompts
from pair_eval import distinct_share, mean
from torch import Tensor

from specc.compiler import build as compiler
from specc.config import CompileConfig
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.runtime.outputs.request_output import RequestOutput
from specc.sampling.params import SamplingParams
from specc.speculation.metrics import SpecStats
from specc.speculation.plans import MERGE, OFF, SpecPlan
from specc.system.machine import describe_machine

RESAMPLES = 2000
BEFORE, AFTER, CONTROL, WIDER = "before", "after", "control", "wider"


@dataclass(frozen=True)
class Contestants:
    """Directories of the models to be measured.

    Args:
        target: whose text it is.
        drafts: those before.
        boosted: the new one.
        control: a copy of the first draft that was fine-tuned the ordinary way; None: not made.
    """

    target: Path
    drafts: list[Path]
    boosted: Path
    control: Path | None

    @property
    def models(self) -> list[Path]:
        """Drafts of the engine: those before, a copy of the first, the new one, the control."""
        control = [] if self.control is None else [self.control]
        return [*self.drafts, self.drafts[0], self.boosted, *control]


def plans_of(contestants: Contestants, depth: int) -> dict[str, SpecPlan]:
    """Plans to compare, by what they are called in the report.

    Before, after, control and wider have equally many nodes: the chains of one more draft than
    before, merged, or as many tokens of the first draft alone, as a tree that branches at its root.
    """
    num_before = len(contestants.drafts)
    names = [f"draft_{number}" for number in range(len(contestants.models))]
    before, (copy, boosted, *control) = tuple(names[:num_before]), names[num_before:]
    chain = (1,) * depth
    plans = {f"{name} alone": SpecPlan.from_widths(chain, (name,)) for name in before}
    if num_before > 1:
        plans["drafts before, merged"] = SpecPlan.from_widths(chain, before, MERGE)
    for name, draft in [("boosted", boosted), *(("control", draft) for draft in control)]:
        plans[f"{name} alone"] = SpecPlan.from_widths(chain, (draft,))
    plans[WIDER] = SpecPlan.from_widths((num_before + 1, *chain[1:]))
    added = {BEFORE: copy, AFTER: boosted} | ({CONTROL: control[0]} if control else {})
    for name, draft in added.items():
        plans[name] = SpecPlan.from_widths(chain, (*before, draft), MERGE)
    return plans


def measure(
    contestants: Contestants,
    prompt_files: Sequence[Path],
    depth: int,
    num_tokens: int,
    is_sampled: bool,
    scratch: Path,
    covers: Callable[[int, Tensor, Tensor, int], Tensor],
) -> dict[str, Any]:
    """Compile the models, decode every file of prompts with every plan, and compare.

    Args:
        contestants: who is compared.
        prompt_files: held-out prompts.
        depth: of the chains.
        num_tokens: output tokens of each prompt.
        is_sampled: decode at temperature 1 as well.
        scratch: directory for the engine.
        covers: (number of the draft, tokens [1, length], the target's next tokens [1, length],
            k) → [1, length] bool, where one of the draft's k best tokens is the target's.
    Returns:
        the report, by name of the file.
    """
    plans = plans_of(contestants, depth)
    print(f"compiling {len(contestants.models)} drafts, {len(plans)} plans", flush=True)
    path = scratch / "engine"
    config = CompileConfig(plans=tuple(plans.values()), backend="eager", probe=False)
    compiler.build(contestants.target, contestants.models, path, config)
    engine = Engine.load(path)
    report = {}
    for file in prompt_files:
        prompts = [entry["prompt"] for entry in read_prompts(file)]
        rows = []
        for temperature in (0.0, 1.0) if is_sampled else (0.0,):
            plain = generate(engine, OFF.name, prompts, num_tokens, temperature)
            runs = {}
            for name, plan in plans.items():
                runs[name] = generate(engine, plan.name, prompts, num_tokens, temperature)
                rows.append(row_of(name, plan, temperature, runs[name], plain))
                print(describe(file.name, rows[-1]), flush=True)
            compare(rows[-len(plans) :], runs)
            if temperature == 0:
                coverage = measure_coverage(contestants, plain, covers)
                outputs = [output.outputs[0].token_ids for output in plain]
        report[file.name] = {
            "prompts": len(prompts),
            "tokens": num_tokens,
            "distinct_4_grams": mean([distinct_share(tokens) for tokens in outputs]),
            "coverage": coverage,
            "plans": rows,
        }
    return report


def generate(
    engine: Engine, plan: str, prompts: Sequence[str], num_tokens: int, temperature: float
) -> list[RequestOutput]:
    """Complete all prompts with one plan; seeds are fixed, the rule is coupled."""
    params = [
        SamplingParams(max_tokens=num_tokens, temperature=temperature, seed=seed)
        for seed in range(len(prompts))
    ]
    return LLM(engine, plan=plan).generate(list(prompts), params)


def row_of(
    name: str,
    plan: SpecPlan,
    temperature: float,
    outputs: Sequence[RequestOutput],
    plain: Sequence[RequestOutput],
) -> dict[str, Any]:
    """What one plan did at one temperature."""
    stats = SpecStats()
    for output in outputs:
        stats.merge(output.metrics)
    pairs = zip(outputs, plain, strict=True)
    return {
        "name": name,
        "plan": plan.name,
        "nodes": plan.num_nodes,
        "temperature": temperature,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "accepted_per_depth": stats.accepted_per_depth,
        "steps": stats.num_spec_steps,
        "outputs_equal_to_off": sum(
            a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in pairs
        ),
    }


def compare(rows: list[dict[str, Any]], runs: dict[str, list[RequestOutput]]) -> None:
    """Add to the row of `after` by how much it is better than the others of as many nodes.

    Differences of mean acceptance lengths, with the 95 % interval of a bootstrap over prompts.
    """
    counts = {
        name: torch.tensor(
            [[o.metrics.num_accepted_tokens, o.metrics.num_spec_steps] for o in outputs]
        ).double()
        for name, outputs in runs.items()
    }
    num_prompts = len(counts[AFTER])
    generator = torch.Generator().manual_seed(0)
    draws = torch.randint(num_prompts, (RESAMPLES, num_prompts), generator=generator)

    def lengths(name: str, chosen: Tensor) -> Tensor:
        accepted, steps = counts[name][chosen].sum(-2).unbind(-1)
        return 1 + accepted / steps

    everything = torch.arange(num_prompts)
    row = next(row for row in rows if row["name"] == AFTER)
    for other in (BEFORE, WIDER, CONTROL):
        if other not in runs:
            continue
        resampled = lengths(AFTER, draws) - lengths(other, draws)
        row[f"more_than_{other}"] = {
            "mean": (lengths(AFTER, everything) - lengths(other, everything)).item(),
            "interval_95": torch.quantile(
                resampled, torch.tensor([0.025, 0.975]).double()
            ).tolist(),
        }


def measure_coverage(
    contestants: Contestants,
    plain: Sequence[RequestOutput],
    covers: Callable[[int, Tensor, Tensor, int], Tensor],
) -> dict[str, float]:
    """Share of the target's greedy tokens that drafts propose after the target's own text."""
    num_before = len(contestants.drafts)
    first = range(num_before)
    groups = {
        "drafts before": [(number, 1) for number in first],
        "boosted alone": [(num_before + 1, 1)],
        f"draft_0, best {num_before + 1}": [(0, num_before + 1)],
        "drafts before or boosted": [(number, 1) for number in (*first, num_before + 1)],
    }
    if contestants.control:
        control = num_before + 2
        groups["drafts before or control"] = [(number, 1) for number in (*first, control)]
    hits, total = dict.fromkeys(groups, 0), 0
    for output in plain:
        text = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        tokens, choices = torch.tensor([text[:-1]]), torch.tensor([text[1:]])
        start = len(output.prompt_token_ids) - 1
        total += len(text) - 1 - start
        found = {
            member: covers(member[0], tokens, choices, member[1])[0, start:]
            for member in {member for group in groups.values() for member in group}
        }
        for name, group in groups.items():
            hits[name] += int(torch.stack([found[member] for member in group]).any(0).sum())
    return {name: count / total for name, count in hits.items()}


def describe(file: str, row: dict[str, Any]) -> str:
    """One line of the table."""
    depths = " ".join(f"{share:.1%}" for share in row["accepted_per_depth"])
    return (
        f"{file:24} T {row['temperature']:<4g} {row['name']:22} {row['nodes']:3} nodes"
        f" {row['mean_acceptance_length']:5.2f} a step  {depths}"
    )


def print_summary(report: dict[str, Any]) -> None:
    """Coverage, and what the boosted draft gains."""
    for file, part in report.items():
        for name, share in part["coverage"].items():
            print(f"{file:24} covered by {name:26} {share:.1%}")
        for row in part["plans"]:
            for other in (BEFORE, WIDER, CONTROL):
                if gain := row.get(f"more_than_{other}"):
                    low, high = gain["interval_95"]
                    print(
                        f"{file:24} T {row['temperature']:<4g} after - {other:8}"
                        f" {gain['mean']:+.3f} a step, 95 % in {low:+.3f} … {high:+.3f}"
                    )


def write_report(path: Path, training: Any, report: dict[str, Any], threads: int) -> None:
    """Write the figures with what is needed to repeat them."""
    data = {
        "command": shlex.join(["python", "examples/boost_tune.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "machine": describe_machine(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "threads": threads,
        "training": asdict(training),
        "files": report,
    }
    rounded = json.loads(json.dumps(data), parse_float=lambda text: round(float(text), 5))
    path.write_text(json.dumps(rounded, indent=1) + "\n", encoding="utf-8")
