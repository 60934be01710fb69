"""Evaluation of the small hybrid target with the pair's draft, its loss curve and its README.

As for the pair, the speculative loop here is a reference: no cache, every position from scratch.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

from pair_data import read_prompts
from pair_eval import (
    folder_bytes,
    load_model,
    measure_models,
    plot_loss,
    read_losses,
    readme_figures,
    write_report,
)
from transformers import AutoTokenizer

PANELS = (
    ("corpus", "loss", "Next-token loss"),
    ("corpus", "teacher_kl", "KL from the pair's target, corpus"),
    ("policy", "teacher_kl", "The same along its greedy text"),
)

README = """# Hybrid target

A target of {target_parameters:,} parameters in transformers' Qwen3.5 form (`qwen3_5_text`, dense):
three layers of gated delta net, which keep a state, and one of full attention. It has the demo
pair's tokenizer, and `examples/pair/draft` drafts for it. It exists so that speculative decoding
over states can be tried and tested without a download, and is no useful assistant.

| | hybrid | pair's draft |
| --- | --- | --- |
| parameters | {target_parameters:,} | {draft_parameters:,} |
| folder, bytes | {target_bytes:,} | {draft_bytes:,} |
| loss on held-out text, nats per token | {target_loss:.3f} | {draft_loss:.3f} |

Greedy decoding, the pair's {prompts} held-out prompts, {new_tokens} new tokens, chain of {depth},
by transformers alone, every position from scratch:

| | |
| --- | --- |
| mean acceptance length (bonus token included) | {acceptance:.2f} |
| share of steps that accept depth 1, 2, 3, 4 | {depths} |
| output identical to the hybrid's own greedy output | yes |
| distinct 4-grams in the outputs | {distinct:.3f} |
| the same in held-out text | {distinct_text:.3f} |
| draft's first choice is the hybrid's, held-out text | {top_1:.3f} |
| hybrid's choice among the draft's first three, held-out text | {top_3:.3f} |

Text that repeats itself is easy to draft: of {loops} of the outputs less than half of the 4-grams
are distinct.

`eval.json` has the rest; `python examples/training/train_hybrid.py --eval` measures it again. What
engines make of it is in [the notebook](../../docs/notebook/hybrids.md).

## Training

| | |
| --- | --- |
| command | `{command}` |
| date | {date} |
| Python, torch | {python}, {torch} |
| seed | {seed} |
| corpus, that of the pair | {corpus_tokens:,} training tokens, {held_out_tokens:,} held out |
| begins with | embedding, last norm and every other MLP of `examples/pair/target` |
| tokens seen, first stage | {first_tokens:,} |
| tokens seen, second stage | {second_tokens:,}, of {pool_tokens:,} tokens of greedy text |
| held-out loss after each stage, bfloat16 products | {first_loss:.3f}, {second_loss:.3f} |
| wall time, one thread of a machine shared with other jobs | {minutes:.0f} minutes |

In the first stage it learns the next token, and the distribution that the pair's target computes of
it; in the second that distribution along the target's greedy text. The stages may end by the clock,
so a repeat with the same seed gives a like hybrid, not the same one. `loss.csv` and `loss.svg` hold
the loss curves.

{note}

## Source and license

Its text is the Python standard library's, as the [pair's](../pair/README.md) is.
"""


def evaluate_hybrid(out: Path, pair: Path) -> None:
    """Measure the hybrid in ``out`` with the pair's draft on held-out text, and write eval.json."""
    tokenizer = AutoTokenizer.from_pretrained(out / "target")
    folders = {"target": out / "target", "draft": pair / "draft"}
    models = {name: load_model(path) for name, path in folders.items()}
    entries = read_prompts(pair / "prompts.jsonl")
    report, _ = measure_models(models["target"], models["draft"], tokenizer, entries)
    report["bytes"] = {name: folder_bytes(path) for name, path in folders.items()}
    write_report(report, out)


def plot_hybrid_loss(out: Path) -> None:
    """Draw loss.csv as loss.svg."""
    plot_loss(out, PANELS)


def write_hybrid_readme(out: Path) -> None:
    """Write the README from training.json, loss.csv and eval.json."""
    facts = json.loads((out / "training.json").read_text(encoding="utf-8"))
    report = json.loads((out / "eval.json").read_text(encoding="utf-8"))
    # of each stage, the last row has the loss on held-out text
    ends = {row["stage"]: row for row in read_losses(out)}
    first, second = ends["corpus"], ends["policy"]
    page = README.format(
        **facts | {"note": textwrap.fill(facts.get("note", ""), 100)},
        **readme_figures(report),
        loops=report["greedy_decoding"]["outputs_below_half_distinct"],
        first_tokens=int(first["tokens"]),
        second_tokens=int(second["tokens"]),
        first_loss=float(first["held_out_loss"]),
        second_loss=float(second["held_out_loss"]),
        minutes=float(second["seconds"]) / 60,
    )
    (out / "README.md").write_text(page, encoding="utf-8")
