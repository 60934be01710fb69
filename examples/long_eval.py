"""Evaluation of the long-context demo target, and its README.

The question is whether it uses what is far back. The same held-out tokens, all of them beyond
position 4096, are predicted twice: after everything before them, up to 8191 tokens, and after a
text that is cut to begin 512 to 639 tokens earlier. What the two losses differ by, the far context
has contributed.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pair_data import encode_stream, load_corpus
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

LENGTH, BEYOND = 8192, 4096
# what the cut text keeps at least, and how many tokens are predicted after one cut
KEPT, SCORED = 512, 128
BATCH = 8
RESAMPLES = 10_000


@torch.inference_mode()
def token_losses(model: Qwen3ForCausalLM, tokens: Tensor, first: int) -> Tensor:
    """[B, T - first] nats of each token of [B, T + 1] after those before it, from `first` on."""
    keep = tokens.shape[1] - 1 - first
    logits = model(input_ids=tokens[:, :-1], use_cache=False, logits_to_keep=keep).logits
    losses = F.cross_entropy(
        logits.float().flatten(0, 1), tokens[:, first + 1 :].flatten(), reduction="none"
    )
    return losses.view(len(tokens), keep)


def far_losses(model: Qwen3ForCausalLM, text: Tensor) -> tuple[Tensor, Tensor]:
    """[BEYOND] nats each: of the last tokens of a text [LENGTH + 1], whole and cut."""
    whole = token_losses(model, text[None], LENGTH - BEYOND)[0]
    starts = range(LENGTH - BEYOND - KEPT, LENGTH - KEPT, SCORED)
    cuts = torch.stack([text[start : start + KEPT + SCORED + 1] for start in starts])
    parts = [token_losses(model, cut, KEPT) for cut in cuts.split(BATCH)]
    return whole, torch.cat(parts).flatten()


def interval(values: Tensor, seed: int = 0) -> list[float]:
    """95 % interval of the mean of [n] values, by resampling them."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(values), (RESAMPLES, len(values)), generator=generator)
    means = values[drawn].mean(1)
    return [round(means.quantile(q).item(), 4) for q in (0.025, 0.975)]


def evaluate(out: Path) -> dict[str, Any]:
    """Measure the target in a folder; writes eval.json there."""
    model = Qwen3ForCausalLM.from_pretrained(out / "target", dtype=torch.float32).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out / "target")
    stream = encode_stream(tokenizer, load_corpus()[1])
    # every token is scored once, after the first 4096
    starts = range(0, len(stream) - LENGTH - 1, BEYOND)
    wholes, cuts = [], []
    for number, start in enumerate(starts):
        whole, cut = far_losses(model, stream[start : start + LENGTH + 1])
        wholes.append(whole.mean())
        cuts.append(cut.mean())
        print(f"text {number}: {wholes[-1]:.3f} whole, {cuts[-1]:.3f} cut", flush=True)
    whole, cut = torch.stack(wholes), torch.stack(cuts)
    gain = cut - whole
    report = {
        "parameters": model.num_parameters(),
        "bytes": sum(path.stat().st_size for path in (out / "target").iterdir()),
        "texts": len(gain),
        "tokens": len(gain) * BEYOND,
        "loss_after_whole_context": round(whole.mean().item(), 4),
        "loss_after_512_tokens": round(cut.mean().item(), 4),
        "gain": round(gain.mean().item(), 4),
        "gain_95": interval(gain),
        "loss_after_whole_context_95": interval(whole),
        "loss_after_512_tokens_95": interval(cut),
        "texts_with_gain": int((gain > 0).sum()),
    }
    (out / "eval.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))
    return report


README = """# Long-context demo target

A Qwen3-architecture target with 8192 positions, by `examples/train_long.py`: {layers} of the demo
pair's target ([../pair](../pair)), trained on in ever longer sequences of Python standard library
files. Its tokenizer is the pair's, so the pair's draft can draft for it. It exists so that drafts
for long contexts can be tried and tested without a download; it is no useful assistant.

| | |
| --- | --- |
| parameters | {parameters:,} |
| folder, bytes | {bytes:,} |
| positions | 8192 |

Does it use what is far back? Loss on the same {tokens:,} held-out tokens, all beyond position 4096
of their text ({texts} texts: held-out files, joined), 95 % interval of resampled texts:

| what comes before a token | nats per token | |
| --- | --- | --- |
| everything, 4096 to 8191 tokens | {loss_after_whole_context:.3f} | {whole_95} |
| the last 512 to 639 tokens | {loss_after_512_tokens:.3f} | {cut_95} |
| difference | **{gain:.3f}** | {gain_95} |

The whole context is better in {texts_with_gain} of {texts} texts. `eval.json` has the figures;
`python examples/train_long.py --eval` measures them again. It reads the standard library of the
interpreter that runs it, so figures differ a little under another Python version.

## Training

| | |
| --- | --- |
| command | `{command}` |
| date | {date} |
| Python, torch | {python}, {torch} |
| seed | {seed} |
| begins as | layers {layer_list} of the pair's target, rotary base 10,000 → {rope_theta:,.0f} |
| corpus | {corpus_tokens:,} training tokens; the pair's files and held-out files |
| sequences | {stages} |
| steps, tokens seen | {steps:,}, {tokens_seen:,} |
| wall time, one thread | {minutes:.0f} minutes |

A sequence is files of one directory in random order, then of another, until it is full. **A share
of {planted_share:.0%} of the sequences is changed**: spans of 64 to 512 tokens of the first half
are copied over about 30 % of the second half, so that the model learns to look far back; losses in
`loss.csv` count these, too. Held-out text is never changed.
{note}
The stages end by the clock, so a repeat with the same seed gives a like target, not the same one.

## Source and license

The weights were trained on the Python standard library, which is copyright the Python Software
Foundation and others, under the PSF License Version 2. No text of it is in this folder.
"""


def write_readme(out: Path) -> None:
    """Write the target's README from training.json, loss.csv and eval.json."""
    facts = json.loads((out / "training.json").read_text(encoding="utf-8"))
    report = json.loads((out / "eval.json").read_text(encoding="utf-8"))
    with (out / "loss.csv").open(encoding="utf-8") as file:
        steps = [(int(row["length"]), int(row["step"])) for row in csv.DictReader(file)]
    lengths = dict.fromkeys(length for length, _ in steps)
    stages = [
        f"{length} tokens to step {max(step for other, step in steps if other == length)}"
        for length in lengths
    ]
    between = {key: "{:.3f} to {:.3f}".format(*report[key]) for key in report if key.endswith("95")}
    page = README.format(
        **{"note": ""}
        | facts
        | report
        | between
        | {
            "layers": f"{len(facts['layers'])} layers",
            "layer_list": ", ".join(map(str, facts["layers"])),
            "whole_95": between["loss_after_whole_context_95"],
            "cut_95": between["loss_after_512_tokens_95"],
            "stages": ", ".join(stages),
        }
    )
    (out / "README.md").write_text(page, encoding="utf-8")
