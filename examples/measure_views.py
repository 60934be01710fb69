"""Tokens a step of self-drafts by window and context, beside those of a draft model.

    python examples/measure_views.py --json out/views_pair.json

    python examples/measure_views.py --target examples/long/target --corpus \
        --contexts 1024 2048 4096 8000 --windows 64 128 256 512 1024 \
        --draft-kv window=64 window=512 --json out/views_long.json

    python examples/measure_views.py --windows --budgets --selves skip=5 skip=4-5 layers=0-3 \
        --times --json out/layers_pair.json

The demo target drafts chains with windows of its own cache, and with as many rows of which some are
the blocks that it attended to most. A context is held-out prompts of `examples/pair`, joined until
they have so many tokens; no two contexts share a prompt. With `--corpus` it is the end of a stretch
of held-out files, joined: contexts of all lengths end at the same places. Output is greedy, or
seeded at `--temperature`, and compared with plain decoding, token by token. Counts can be repeated
exactly; no times are taken but with `--times`: those of a pass over one token by each self-draft
that is a program of its own, in turn with one of the target. Text that loops is easy to draft, so
the share of distinct 4-grams of the outputs stands beside each context.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

# matrices this small gain nothing from a second thread, and lose where cores are shared
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from specc.compiler.build import build
from specc.config import CompileConfig
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan
from specc.speculation.self_drafts import SelfDraft
from specc.speculation.views import View
from specc.system.machine import describe_machine

PAIR = Path(__file__).resolve().parent / "pair"
FILES = ("prompts.jsonl", "prompts_unused.jsonl")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, default=PAIR / "target")
    parser.add_argument("--draft", type=Path, default=PAIR / "draft", help="to compare with")
    parser.add_argument("--windows", type=int, nargs="*", default=[16, 64, 128, 256, 512])
    parser.add_argument(
        "--budgets", type=int, nargs="*", default=[64, 128, 256, 512], help="with chosen blocks"
    )
    parser.add_argument("--sink", type=int, default=4)
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 512, 900])
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=6, help="at most, of each context")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--backend", default=None)
    parser.add_argument(
        "--draft-kv",
        nargs="+",
        default=[],
        metavar="window=W",
        help="a draft for each: past its positions it needs a window",
    )
    parser.add_argument(
        "--selves", nargs="+", default=[], metavar="skip=N", help="other self-drafts, without self:"
    )
    parser.add_argument("--times", action="store_true", help="seconds of passes, too")
    parser.add_argument("--corpus", action="store_true", help="contexts are held-out files")
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser.parse_args()


def contexts_of(engine: Engine, length: int, count: int) -> list[list[int]]:
    """Token ids of joined prompts, none of them in two contexts."""
    assert engine.tokenizer is not None
    found: list[list[int]] = [[]]
    for file in FILES:
        for line in (PAIR / file).read_text(encoding="utf-8").splitlines():
            if len(found[-1]) >= length:
                found.append([])
            found[-1] += engine.tokenizer.encode(json.loads(line)["prompt"]).ids
    return [ids[:length] for ids in found if len(ids) >= length][:count]


def stretches_of(engine: Engine, longest: int, length: int, count: int) -> list[list[int]]:
    """Token ids before as many places of the held-out files, far enough apart to share none."""
    # it wants a corpus on this machine, which not every run does
    from pair_data import END, load_corpus

    assert engine.tokenizer is not None
    end = engine.tokenizer.token_to_id(END)
    ids: list[int] = []
    for file in load_corpus()[1]:
        ids += [end, *engine.tokenizer.encode(file.text).ids]
    places = range(longest, len(ids), max(longest, (len(ids) - longest) // count))
    return [ids[place - length : place] for place in places][:count]


def distinct(outputs: list[list[int]]) -> float:
    """Share of different 4-grams."""
    grams = [tuple(ids[i : i + 4]) for ids in outputs for i in range(len(ids) - 3)]
    return len(set(grams)) / len(grams)


def measure(engine: Engine, options: argparse.Namespace, length: int) -> dict[str, Any]:
    """All plans on the contexts of one length."""
    if options.corpus:
        prompts = stretches_of(engine, max(options.contexts), length, options.sequences)
    else:
        prompts = contexts_of(engine, length, options.sequences)
    params = [
        SamplingParams(
            max_tokens=options.tokens, ignore_eos=True, temperature=options.temperature, seed=seed
        )
        for seed in range(len(prompts))
    ]

    def run(plan: str) -> tuple[list[list[int]], Any]:
        if engine.plans[plan].chooses_blocks:
            # queries of a prompt vote while its rows are computed
            engine.cache.allocator.forget_all()
        llm = LLM(engine, plan=plan)
        outputs = llm.generate([list(ids) for ids in prompts], params)
        return [output.outputs[0].token_ids for output in outputs], llm.get_metrics()

    # rows of prompts are computed once for all plans
    engine.cache.allocator.forget_all()
    wanted, _ = run("off")
    rows = []
    for plan in engine.plans.values():
        if not plan.speculates:
            continue
        outputs, stats = run(plan.name)
        rows.append(
            {
                "plan": plan.name,
                "tokens_a_step": round(stats.mean_acceptance_length, 3),
                "accepted_per_depth": [round(share, 3) for share in stats.accepted_per_depth],
                "num_spec_steps": stats.num_spec_steps,
                "equal_outputs": sum(a == b for a, b in zip(outputs, wanted, strict=True)),
            }
        )
        print(f"{length:6} {plan.name:24} {rows[-1]['tokens_a_step']:.2f}", flush=True)
    return {
        "context": length,
        "num_sequences": len(prompts),
        "distinct_4_grams": round(distinct(wanted), 3),
        "plans": rows,
    }


def pass_ratios(engine: Engine, context: int, rounds: int = 101) -> dict[str, float]:
    """Self-draft → seconds of a pass over one token, over those of the target next to it: medians.

    Args:
        engine: with nobody else at work.
        context: committed rows of the sequence; what they hold does not matter.
        rounds: pairs of passes; the first one counts for nothing.
    """
    cache = engine.cache
    blocks = cache.allocator.allocate(cache.shape.blocks_per_sequence)
    slot = torch.tensor([context], dtype=torch.int32)
    inputs = (
        torch.zeros(1, dtype=torch.int64), slot.long(), torch.tensor([0, 1], dtype=torch.int32),
        slot, slot, torch.ones(1, 1, dtype=torch.int64), cache.block_table([blocks]),
        torch.tensor([0]),
    )  # fmt: skip
    ratios: dict[str, list[float]] = {name: [] for name in engine.self_drafts}
    with torch.inference_mode():
        for _ in range(rounds):
            for name, program in engine.self_drafts.items():
                seconds = []
                for one in (program, engine.target):
                    begin = time.perf_counter()
                    one(*inputs)
                    seconds.append(time.perf_counter() - begin)
                ratios[name].append(seconds[0] / seconds[1])
    cache.allocator.free(blocks)
    return {name: round(statistics.median(found[1:]), 3) for name, found in ratios.items()}


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    chain = (1,) * options.num_speculative_tokens
    views = [View(window, options.sink).name for window in options.windows]
    views += [draft.name for x in options.selves if (draft := SelfDraft.parse(f"self:{x}"))]
    for budget in options.budgets:
        for window in (budget // 2, budget // 4):
            views.append(View(window, options.sink, budget - window).name)
    windows = options.draft_kv or ["full"]
    models = [f"draft_{number}" for number in range(len(windows))]
    plans = tuple(SpecPlan.from_widths(chain, (name,)) for name in [*views, *models])
    config = CompileConfig(
        plans=plans,
        max_batch_size=options.sequences,
        # the shortest that the tables of docs/guide/drafts.md were measured with
        max_seq_len=max(1024, max(options.contexts) + options.tokens),
        draft_kv=tuple(options.draft_kv),
        backend=options.backend,
        probe=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "engine"
        build(options.target, [options.draft] * len(windows), path, config)
        engine = Engine.load(path)
        figures = [measure(engine, options, length) for length in options.contexts]
        if options.times:
            for one in figures:
                one["pass_over_targets"] = pass_ratios(engine, one["context"])
                print(one["context"], one["pass_over_targets"], flush=True)
    report = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": describe_machine(),
        "torch_version": torch.__version__,
        "backend": engine.backend,
        "dtype": "float32",
        "block_size": config.block_size,
        "tokens": options.tokens,
        "temperature": options.temperature,
        "num_speculative_tokens": options.num_speculative_tokens,
        "sink": options.sink,
        "draft_kv": dict(zip(models, windows, strict=True)),
        "contexts": figures,
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
