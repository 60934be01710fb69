"""What conditional scores are worth: block drafters of the demo target, trained alike.

One block drafter with the score of DFlash (none: marginals; with a causal block JetSpec), DSpark,
DFlash 2 and LiLiCorr: the same texts in the same order, as many steps, one seed, the same layers,
and a mask for each token that is proposed. Then tokens a step of their engines along held-out
prompts: chains, best-first trees (greedy, coupled), and trees whose levels are shared out (mss,
swor). Counts: nothing is timed but the training.

    python tests/measure/conditional_scores.py --output out/scores --json out/scores.json
    python tests/measure/conditional_scores.py --output out/scores --kind lilicorr

The second trains and measures one kind, as processes beside each other may; what is in --output is
used again, and the table is of all kinds that are there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# matrices this small gain nothing from a second thread, and lose where cores are shared
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from specc.artifact.manifest import MANIFEST_FILE
from specc.compiler.build import build
from specc.config import CompileConfig
from specc.draw.svg import check_picture, svg_plot
from specc.fit.documents import Document, Encoder
from specc.fit.drafters.block import BlockFitter
from specc.fit.drafters.block_scores import LILICORR, MARGINAL, MARKOV, SELECTOR
from specc.fit.drafters.fitter import DraftShape, LayerShape
from specc.fit.optimizer import Schedule
from specc.fit.target import Target
from specc.fit.texts import TextStore
from specc.fit.trainer import Checkpoint, TrainerConfig, train
from specc.fit.training_data import Budget, TrainingData
from specc.passes.frontend.hf_tokenizer import HfTokenizer
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.dynamic_tree import BudgetTree, DynamicTree
from specc.speculation.plans import OFF, SpecPlan
from specc.system.machine import describe_machine

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TARGET, PAIR = EXAMPLES / "pair" / "target", EXAMPLES / "pair"
PROMPTS = (PAIR / "prompts.jsonl", PAIR / "prompts_unused.jsonl")
SCORES = {
    "dflash": (MARGINAL, "DFlash (marginals)", "#8a8f98"),
    "jetspec": (MARGINAL, "JetSpec (marginals, causal)", "#b5532a"),
    "dspark": (MARKOV, "DSpark", "#1f6feb"),
    "dflash2": (SELECTOR, "DFlash 2", "#c9a227"),
    "lilicorr": (LILICORR, "LiLiCorr", "#4c9f70"),
}
DEPTH, CHILDREN, SIZES = 5, 8, (8, 16, 32, 64)
# of trees as large as those, levels that are shared out
LEVELS = ((2, 2, 1, 1, 1), (4, 4, 3, 2, 2), (7, 8, 7, 5, 4), (8, 16, 15, 13, 11))
CHAIN = SpecPlan.from_widths((1,) * DEPTH)
BEST_FIRST = [SpecPlan.from_dynamic(DynamicTree(size, CHILDREN, DEPTH)) for size in SIZES]
SHARED = [SpecPlan.from_dynamic(BudgetTree.of(levels)) for levels in LEVELS]
PLANS = (CHAIN, *BEST_FIRST, *SHARED)
# the first two hold for any tree
RULES = {"greedy": BEST_FIRST, "coupled": BEST_FIRST, "swor": SHARED, "mss": SHARED}
# tokens of texts; of a text, and of a step of training
_LENGTH, _BATCH, _RATES = 256, 2048, (0.02, 4e-3)


@dataclass(frozen=True)
class Counts:
    """Of one plan and rule: steps and tokens of each prompt, in order."""

    steps: list[int]
    tokens: list[int]

    @property
    def mean(self) -> float:
        """Tokens a step."""
        return sum(self.tokens) / sum(self.steps)

    def off(self) -> list[float]:
        """What each prompt adds to the error of the mean, a ratio of two sums."""
        each = zip(self.tokens, self.steps, strict=True)
        return [(t - self.mean * s) / sum(self.steps) for t, s in each]


def standard_error(off: Sequence[float]) -> float:
    """Of a sum over prompts, which are drawn independently."""
    count = len(off)
    return math.sqrt(sum(x * x for x in off) * count / (count - 1))


def read_prompts(number: int | None) -> list[str]:
    """The first so many prompts of each file."""
    lines = [path.read_text(encoding="utf-8").splitlines()[:number] for path in PROMPTS]
    return [json.loads(line)["prompt"] for part in lines for line in part]


def write_texts(root: Path, write: int, read: int, seed: int) -> tuple[Target, TextStore]:
    """What all kinds learn from: the standard library without files that hold a prompt."""
    sys.path.insert(0, str(EXAMPLES / "training"))
    from pair_data import training_files

    target = Target.load(str(TARGET), "cpu", lambda *_: None)
    store = TextStore(root / "texts")
    if not (root / "complete").exists():
        documents = [Document(file.name, file.text) for file in training_files(PROMPTS)]
        encoder = Encoder(HfTokenizer.load(TARGET), None)
        boundaries = target.sizes.default_taps()
        data = TrainingData(target, boundaries, encoder, store, _LENGTH, seed)
        for fill, count in ((data.write, write), (data.read, read)):
            fill(documents, Budget(math.inf, count, 6 << 30), _tell)
        (root / "complete").touch()
    return target, store


def train_kind(
    kind: str, root: Path, steps: int, seed: int, target: Target, store: TextStore
) -> None:
    """Train a drafter, and write its files and what came of it."""
    sizes, boundaries = target.sizes, target.sizes.default_taps()
    fitter = BlockFitter(DEPTH, SCORES[kind][0], from_anchor=False, is_causal=kind == "jetspec")
    longest = max(part.length for name in store.kinds() for part in store.parts(name))
    layer, mask = LayerShape.of_width(sizes.width), sizes.eos_token_id or 0
    kept = torch.arange(sizes.vocab_size)
    torch.manual_seed(seed)
    drafter = fitter.build(sizes, DraftShape(layer, boundaries, DEPTH, longest, kept, mask))
    schedule = Schedule(steps, 1e6, decay=0.7)
    config = TrainerConfig(schedule, _RATES, _BATCH, seed, target.device)
    checkpoint = Checkpoint(root / f"{kind}.pt", {"--kind": kind, "--steps": steps, "--seed": seed})
    begin = time.process_time()
    result = train(drafter, lambda *x: fitter.losses(drafter, *x), store, config, checkpoint, _tell)
    facts = {
        "steps": result.steps,
        "cpu_minutes": round((time.process_time() - begin) / 60, 2),
        "parameters": sum(p.numel() for p in drafter.parameters()),
        "loss": result.loss,
        "agreements": result.agreements,
    }
    fitter.end(drafter)
    fitter.save(drafter, sizes, boundaries, root / kind)
    (root / kind / "training.json").write_text(json.dumps(facts, indent=1) + "\n")
    checkpoint.path.unlink()


def measure_kind(kind: str, root: Path, given: argparse.Namespace) -> None:
    """Steps and tokens of each prompt, by rule and plan; what a file has of them stays."""
    engine, path = root / f"{kind}-engine", root / f"{kind}.json"
    if not (engine / MANIFEST_FILE).exists():
        config = CompileConfig(
            plans=PLANS, max_seq_len=512, max_batch_size=8, backend="cpu", probe=False
        )
        build(TARGET, [root / kind], engine, config)
    prompts, loaded = read_prompts(given.num_prompts), Engine.load(engine, num_threads=1)
    counts = json.loads(path.read_text())["counts"] if path.exists() else {}
    plain: list[list[int]] = []
    for rule, trees in RULES.items():
        names = {f"{rule} {plan.name}": plan for plan in (CHAIN, *trees)}
        for name, plan in names.items():
            if name in counts:
                continue
            if rule == "greedy":
                plain = plain or run(loaded, OFF, prompts, given, rule)[1]
            counts[name], tokens = run(loaded, plan, prompts, given, rule)
            if rule == "greedy":
                assert tokens == plain, f"{kind}, {plan.name}: other tokens than those of off"
            print(kind, name, round(Counts(**counts[name]).mean, 3), flush=True)
            training = json.loads((root / kind / "training.json").read_text())
            result = {"training": training, "num_prompts": len(prompts), "counts": counts}
            path.write_text(json.dumps(result) + "\n")


def run(
    engine: Engine, plan: SpecPlan, prompts: list[str], given: argparse.Namespace, rule: str
) -> tuple[dict[str, list[int]], list[list[int]]]:
    """Fields of `Counts`, and the tokens of the outputs of the last seed."""
    llm, steps, tokens = LLM(engine, plan=plan.name), [0] * len(prompts), [0] * len(prompts)
    for seed in range(given.seeds if rule != "greedy" else 1):
        how: dict[str, Any] = {"temperature": 0.0}
        if rule != "greedy":
            how = {"temperature": 1.0, "rule": rule, "seed": 1000 * seed + 7}
        outputs = llm.generate(prompts, SamplingParams(max_tokens=given.tokens, **how))
        for number, output in enumerate(outputs):
            steps[number] += output.metrics.num_steps
            tokens[number] += output.metrics.num_steps + output.metrics.num_accepted_tokens
    return {"steps": steps, "tokens": tokens}, [list(x.outputs[0].token_ids) for x in outputs]


def table(results: dict[str, Any]) -> list[list[Any]]:
    """A row for each kind, rule and plan: tokens a step, standard error, and what it has more than
    the drafter of marginals along the same prompts, with its standard error.
    """
    rows: list[list[Any]] = []
    for kind, result in results.items():
        for name, own in result["counts"].items():
            counts, (rule, plan) = Counts(**own), name.split()
            row = [kind, rule, plan, round(counts.mean, 3), round(standard_error(counts.off()), 3)]
            base = results.get("dflash", {}).get("counts", {}).get(name)
            if base and kind != "dflash":
                base = Counts(**base)
                off = [a - b for a, b in zip(counts.off(), base.off(), strict=True)]
                row += [round(counts.mean - base.mean, 3), round(standard_error(off), 3)]
            else:
                row += [None, None]
            rows.append(row)
    return rows


def draw(rows: list[list[Any]], path: Path) -> None:
    """Tokens a step over nodes, greedy and at temperature 1, a color for each kind."""
    names = {plan.name: plan.num_nodes for plan in PLANS}
    title = f"demo target, drafters trained alike, {DEPTH} tokens a pass; a bar is a standard error"
    with svg_plot(path, 7, 4.6, title) as axes:
        for rule, line, said in (
            ("greedy", "-", "greedy, best-first"),
            ("coupled", "--", "T 1, coupled, best-first"),
            ("swor", ":", "T 1, swor, shared levels"),
        ):
            for kind, (_, label, color) in SCORES.items():
                own = [row for row in rows if row[:2] == [kind, rule] and row[2] != CHAIN.name]
                if not own:
                    continue
                axes.errorbar(
                    [names[row[2]] for row in own],
                    [row[3] for row in own],
                    [row[4] for row in own],
                    color=color, linestyle=line, marker="o", markersize=3, capsize=2,
                    label=label if rule == "greedy" else None,
                )  # fmt: skip
            axes.plot([], [], color="black", linestyle=line, label=said)
        axes.set_xscale("log", base=2)
        axes.set_xticks(SIZES, [str(size) for size in SIZES])
        axes.set_xlabel("nodes of a tree")
        axes.set_ylabel("tokens a step")
        axes.legend(frameon=False, fontsize=8)


def _tell(done: int, total: int, what: str = "") -> None:
    if sys.stderr.isatty() or done % 20 == 0:
        print(f"{done} of {total}: {what}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, required=True, help="directory of texts, drafters and engines")
    add("--kind", choices=SCORES, action="append", help="this one alone; repeatable")
    add("--texts-only", action="store_true", help="write what they learn from, and end")
    add("--steps", type=int, default=450, help="of training, of each kind")
    add("--write", type=int, default=80_000, help="tokens that the target writes to learn from")
    add("--read", type=int, default=250_000, help="tokens of the texts themselves")
    add("--num-prompts", type=int, default=17, help="of each file of held-out prompts")
    add("--tokens", type=int, default=64, help="of an output")
    add("--seeds", type=int, default=1, help="outputs of a prompt at temperature 1")
    add("--seed", type=int, default=20261129)
    add("--json", type=Path, default=None, help="file of the table")
    add("--plot", type=Path, default=None, help="picture, .svg")
    given = parser.parse_args()
    if given.plot is not None:
        check_picture(given.plot, "--plot")
    torch.set_num_threads(1)
    root = given.output
    target, store = write_texts(root, given.write, given.read, given.seed)
    for kind in () if given.texts_only else given.kind or SCORES:
        if not (root / kind / "training.json").exists():
            train_kind(kind, root, given.steps, given.seed, target, store)
        measure_kind(kind, root, given)
    paths = {kind: root / f"{kind}.json" for kind in SCORES}
    results = {kind: json.loads(path.read_text()) for kind, path in paths.items() if path.exists()}
    rows = table(results)
    columns = ["drafter", "rule", "plan", "tokens_per_step", "standard_error"]
    report = {
        "machine": describe_machine(),
        "torch": torch.__version__,
        "training": {kind: result["training"] for kind, result in results.items()},
        "num_prompts": [result["num_prompts"] for result in results.values()][:1],
        "columns": [*columns, "over_marginals", "standard_error_of_that"],
        "rows": rows,
    }
    if given.json is not None:
        given.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if given.plot is not None:
        draw(rows, given.plot)
    for row in rows:
        print(*row)


if __name__ == "__main__":
    main()
