"""Evaluation of the demo pair, its loss curve and its README.

The speculative loop here is a reference: plain transformers calls, no cache, every position
recomputed in float32. It is slow on purpose, so that its acceptance figures can be trusted.
"""

from __future__ import annotations

import csv
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pair_data import encode_stream, load_corpus, read_prompts
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

DEPTH = 4
NEW_TOKENS = 128
WINDOW = 512


def greedy_choices(model: PreTrainedModel, tokens: Tensor, last: int) -> list[int]:
    """Return the model's first choice after each of the ``last`` final positions."""
    logits = model(input_ids=tokens[None], use_cache=False, logits_to_keep=last).logits
    return logits[0].argmax(-1).tolist()


@torch.inference_mode()
def is_greedy(target: PreTrainedModel, prompt: Tensor, output: list[int]) -> bool:
    """Tell whether every token is the target's first choice after all that precede it."""
    text = torch.cat([prompt, torch.tensor(output)])
    return greedy_choices(target, text, len(output) + 1)[:-1] == output


@torch.inference_mode()
def decode_speculatively(
    target: PreTrainedModel, draft: PreTrainedModel, prompt: Tensor, end: int
) -> tuple[list[int], list[int]]:
    """Return the new tokens, and for each step how many of the draft's tokens were accepted."""
    tokens, accepted = prompt, []
    while len(tokens) < len(prompt) + NEW_TOKENS:
        chain = tokens
        for _ in range(DEPTH):
            chain = torch.cat([chain, torch.tensor(greedy_choices(draft, chain, 1))])
        proposed = chain[len(tokens) :].tolist()
        choices = greedy_choices(target, chain, DEPTH + 1)
        count = 0
        while count < DEPTH and proposed[count] == choices[count]:
            count += 1
        accepted.append(count)
        # The target's own choice after the last accepted token comes free: the bonus token.
        new = choices[: count + 1]
        if end in new:
            tokens = torch.cat([tokens, torch.tensor(new[: new.index(end) + 1])])
            break
        tokens = torch.cat([tokens, torch.tensor(new)])
    return tokens[len(prompt) :].tolist()[:NEW_TOKENS], accepted


def distinct_share(tokens: list[int], n: int = 4) -> float:
    """Return the share of n-grams that are distinct: near 0 for text that loops."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def measure_decoding(
    target: PreTrainedModel, draft: PreTrainedModel, prompts: list[Tensor], end: int
) -> tuple[dict, list[list[int]]]:
    """Decode every prompt; return the figures and the outputs, which are the target's own."""
    accepted: list[int] = []
    per_prompt, outputs = [], []
    for prompt in prompts:
        output, counts = decode_speculatively(target, draft, prompt, end)
        if not is_greedy(target, prompt, output):
            raise AssertionError("speculative decoding changed the target's greedy output")
        outputs.append(output)
        accepted += counts
        per_prompt.append(1 + mean(counts))
    reached = [sum(count >= depth for count in accepted) for depth in range(DEPTH + 1)]
    figures = {
        "prompts": len(prompts),
        "new_tokens": sum(map(len, outputs)),
        "steps": len(accepted),
        "mean_acceptance_length": 1 + mean(accepted),
        "acceptance_length_by_prompt": {
            "least": min(per_prompt),
            "median": sorted(per_prompt)[len(per_prompt) // 2],
            "most": max(per_prompt),
        },
        # Share of all steps that accept this depth, and share of those that got that far.
        "accepted_at_depth": [reached[d] / reached[0] for d in range(1, DEPTH + 1)],
        "accepted_given_previous": [reached[d] / reached[d - 1] for d in range(1, DEPTH + 1)],
        "identical_to_target_greedy": True,
        "ended_by_end_token": sum(output[-1] == end for output in outputs),
        "distinct_4_grams": mean([distinct_share(output) for output in outputs]),
        "outputs_below_half_distinct": sum(distinct_share(output) < 0.5 for output in outputs),
    }
    return figures, outputs


@torch.inference_mode()
def measure_agreement(
    target: PreTrainedModel, draft: PreTrainedModel, batches: list[Tensor], skip: int = 0
) -> dict[str, float]:
    """Compare the two models' choices on given text, and score both as language models."""
    totals = torch.zeros(5)
    positions = 0
    for tokens in batches:
        rows = [m(input_ids=tokens[:, :-1], use_cache=False).logits for m in (target, draft)]
        teacher, student = (logits[:, skip:].flatten(0, 1) for logits in rows)
        labels = tokens[:, 1 + skip :].flatten()
        choice = teacher.argmax(-1, keepdim=True)
        in_top = student.topk(3).indices == choice
        totals += torch.stack(
            [
                in_top[:, 0].sum(),
                in_top.sum(),
                F.cross_entropy(teacher, labels, reduction="sum"),
                F.cross_entropy(student, labels, reduction="sum"),
                (choice[:, 0] == labels).sum(),
            ]
        )
        positions += len(labels)
    names = ("top_1", "target_choice_in_draft_top_3", "target_loss", "draft_loss", "target_top_1")
    return {"positions": positions} | dict(zip(names, (totals / positions).tolist(), strict=True))


def measure_models(
    target: PreTrainedModel, draft: PreTrainedModel, tokenizer: Any, entries: list[dict[str, str]]
) -> tuple[dict[str, Any], list[list[int]]]:
    """Decode prompts and read held-out text; returns the figures, and what was decoded."""
    prompts = [torch.tensor(tokenizer(entry["prompt"])["input_ids"]) for entry in entries]
    decoding, outputs = measure_decoding(target, draft, prompts, tokenizer.eos_token_id)

    held_out = load_corpus()[1]
    stream = encode_stream(tokenizer, held_out)
    windows = stream[: len(stream) // WINDOW * WINDOW].view(-1, WINDOW)
    on_text = measure_agreement(target, draft, list(windows.split(8)))
    characters = sum(len(file.text.encode()) for file in held_out)
    on_text["target_bits_per_byte"] = (
        on_text["target_loss"] / torch.log(torch.tensor(2.0)).item() * len(stream) / characters
    )
    pieces = stream[: len(stream) // NEW_TOKENS * NEW_TOKENS].view(-1, NEW_TOKENS).tolist()
    figures = {
        "depth": DEPTH,
        "parameters": {"target": target.num_parameters(), "draft": draft.num_parameters()},
        "greedy_decoding": decoding,
        "distinct_4_grams_of_held_out_text": mean([distinct_share(piece) for piece in pieces]),
        "held_out_text": on_text,
    }
    return figures, outputs


def load_model(path: Path) -> PreTrainedModel:
    """In float32, to be evaluated."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def folder_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


def write_report(report: dict[str, Any], out: Path) -> None:
    """Write eval.json, four digits after the point."""
    rounded = json.loads(json.dumps(report), parse_float=lambda text: round(float(text), 4))
    (out / "eval.json").write_text(json.dumps(rounded, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(rounded, indent=2))


def evaluate_pair(out: Path) -> None:
    """Measure the pair in ``out`` on held-out text, and write eval.json."""
    tokenizer = AutoTokenizer.from_pretrained(out / "target")
    entries = read_prompts(out / "prompts.jsonl")
    target, draft = (load_model(out / name) for name in ("target", "draft"))
    report, outputs = measure_models(target, draft, tokenizer, entries)
    report["bytes"] = {name: folder_bytes(out / name) for name in ("target", "draft")}
    write_report(report, out)
    for entry, output in list(zip(entries, outputs, strict=True))[:3]:
        print(f"{'-' * 40}\n{entry['prompt']}>>>{tokenizer.decode(output)}")


def read_losses(out: Path) -> list[dict[str, str]]:
    with (out / "loss.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# (stage, column of loss.csv, title) of each diagram
PANELS = (
    ("joint", "target_loss", "Target: next-token loss"),
    ("joint", "draft_kl", "Draft: KL to the target, corpus"),
    ("on-policy", "draft_kl", "Draft: KL to the target, its greedy text"),
)


def plot_loss(out: Path, panels: Sequence[tuple[str, str, str]]) -> None:
    """Draw loss.csv as loss.svg, a diagram for each of `panels`."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "pair"
    from matplotlib import pyplot as plt

    rows = read_losses(out)
    figure, axes = plt.subplots(
        1, len(panels), figsize=(4 * len(panels), 3.4), layout="constrained"
    )
    for axis, (stage, column, title) in zip(axes, panels, strict=True):
        points = [
            (int(row["tokens"]) / 1e6, float(row[column]))
            for row in rows
            if row["stage"] == stage and row[column]
        ]
        axis.plot(*zip(*points, strict=True), linewidth=1.2)
        axis.set(title=title, xlabel="tokens seen (millions)", ylabel="nats per token")
        axis.grid(alpha=0.3)
    figure.savefig(out / "loss.svg", metadata={"Date": None})
    plt.close(figure)
    # Matplotlib leaves spaces at line ends, which git would complain about.
    lines = (out / "loss.svg").read_text(encoding="utf-8").splitlines()
    (out / "loss.svg").write_text("".join(line.rstrip() + "\n" for line in lines), encoding="utf-8")


README = """# Demo pair

A Qwen3-architecture target and a draft of an eighth of its size, trained from scratch by
`examples/training/train_pair.py` on the source files of the Python standard library. They exist so
that speculative decoding can be tried and tested without a download; neither is a useful assistant.

| | target | draft |
| --- | --- | --- |
| parameters | {target_parameters:,} | {draft_parameters:,} |
| folder, bytes | {target_bytes:,} | {draft_bytes:,} |
| loss on held-out text, nats per token | {target_loss:.3f} | {draft_loss:.3f} |

Greedy decoding, {prompts} held-out prompts, {new_tokens} new tokens, chain of {depth}:

| | |
| --- | --- |
| mean acceptance length (bonus token included) | {acceptance:.2f} |
| share of steps that accept depth 1, 2, 3, 4 | {depths} |
| output identical to the target's own greedy output | yes |
| distinct 4-grams in the outputs | {distinct:.3f} |
| the same in held-out text | {distinct_text:.3f} |
| draft's first choice is the target's, held-out text | {top_1:.3f} |
| target's choice among the draft's first three, held-out text | {top_3:.3f} |

`eval.json` has the rest; `python examples/training/train_pair.py --eval` measures it again. It
reads the standard library of the interpreter that runs it, so figures on held-out text differ a
little under another Python version.

`draft-boosted` is a second draft, to be merged with the first, by `boost_tune.py`; `draft-llama`
has another tokenizer, by `train_other_vocabulary.py`, both of bac75e9c; `eagle` is an EAGLE-3
head, by `train_eagle_head.py` of a80b4f97, from which `specc fit-draft` came
(docs/guide/drafts.md).

## Training

| | |
| --- | --- |
| command | `{command}` |
| date | {date} |
| Python, torch | {python}, {torch} |
| seed | {seed} |
| corpus | {corpus_tokens:,} training tokens, {held_out_tokens:,} held out |
| tokens seen, joint stage | {joint_tokens:,} |
| corpus tokens seen by the target, loops stage | {loop_tokens:,} |
| tokens seen by the draft, on-policy stage | {policy_tokens:,} |
| training loss of the target at the end of the joint stage (last ten rows) | {last_loss:.3f} |
| wall time, two CPU cores | {minutes:.0f} minutes |

{note}

The stages end by the clock, so a repeat with the same seed gives a like pair, not the same one.
`loss.csv` and `loss.svg` hold the loss curves.

## Source and license

`prompts.jsonl` holds short excerpts of Python standard library files that were kept out of
training; each names its file. The standard library is copyright the Python Software Foundation
and others, under the PSF License Version 2.
"""


def readme_figures(report: dict[str, Any]) -> dict[str, Any]:
    """What eval.json says of a target with its draft, by the names that READMEs have for it."""
    decoding, text = report["greedy_decoding"], report["held_out_text"]
    return {
        "target_parameters": report["parameters"]["target"],
        "draft_parameters": report["parameters"]["draft"],
        "target_bytes": report["bytes"]["target"],
        "draft_bytes": report["bytes"]["draft"],
        "target_loss": text["target_loss"],
        "draft_loss": text["draft_loss"],
        "prompts": decoding["prompts"],
        "new_tokens": decoding["new_tokens"],
        "depth": report["depth"],
        "acceptance": decoding["mean_acceptance_length"],
        "depths": ", ".join(f"{share:.2f}" for share in decoding["accepted_at_depth"]),
        "distinct": decoding["distinct_4_grams"],
        "distinct_text": report["distinct_4_grams_of_held_out_text"],
        "top_1": text["top_1"],
        "top_3": text["target_choice_in_draft_top_3"],
    }


def write_readme(out: Path) -> None:
    """Write the pair's README from training.json, loss.csv and eval.json."""
    facts = json.loads((out / "training.json").read_text(encoding="utf-8"))
    report = json.loads((out / "eval.json").read_text(encoding="utf-8"))
    rows = read_losses(out)
    joint = [row for row in rows if row["stage"] == "joint"]
    tokens = {row["stage"]: int(row["tokens"]) for row in rows}
    page = README.format(
        **facts | {"note": textwrap.fill(facts.get("note", ""), 100)},
        **readme_figures(report),
        joint_tokens=tokens["joint"],
        loop_tokens=max(int(row["tokens"]) for row in rows if row["stage"] == "loops"),
        policy_tokens=tokens["on-policy"],
        last_loss=mean([float(row["target_loss"]) for row in joint if row["target_loss"]][-10:]),
        minutes=float(rows[-1]["seconds"]) / 60,
    )
    (out / "README.md").write_text(page, encoding="utf-8")
