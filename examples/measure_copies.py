"""Where a draft model and an EAGLE-3 head find the target's token, and where they do not.

Along the target's own greedy texts a token either completes three tokens that the text has had
before, or it is new. A draft that has learned to copy is right at nearly all of the former; what
the target's hidden states say helps with the latter. Both are asked for one token, with the text
before it given.

    python examples/measure_copies.py --json out/copies_pair.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from eagle_head import EagleHead, load_head
from head_texts import Texts
from head_training import PAIR, greedy_texts, prompts_of_walks
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

GRAM = 3


def completes_gram(tokens: Tensor, size: int = GRAM) -> Tensor:
    """Which tokens end `size` tokens that came before in the text, [T] bool.

    Args:
        tokens: [T] int64.
        size: 2 or more.
    """
    row, found = tokens.tolist(), []
    seen: set[tuple[int, ...]] = set()
    for end in range(1, len(row) + 1):
        gram = tuple(row[max(0, end - size) : end])
        found.append(len(gram) == size and gram in seen)
        seen.add(gram)
    return torch.tensor(found)


@torch.no_grad()
def head_hits(head: EagleHead, text: Texts) -> Tensor:
    """Whether the head's first choice is token 2, 3, …, of one text; [T - 2] bool."""
    known = head.unroll(text.taps[:, :-2], text.tokens[:, 1:-1], 1, 0)[0]
    return head.kept[head.lm_head(known[0]).argmax(-1)] == text.tokens[0, 2:]


@torch.no_grad()
def draft_hits(draft: PreTrainedModel, text: Texts) -> Tensor:
    """The same of a draft model."""
    return draft(text.tokens).logits[0, 1:-1].argmax(-1) == text.tokens[0, 2:]


def compare(texts: list[Texts], drafts: dict[str, Callable[[Texts], Tensor]]) -> dict[str, Any]:
    """Shares of right first choices.

    Args:
        texts: one row each, greedy after their context.
        drafts: by name, what makes hits of a text.
    """
    copied: list[Tensor] = []
    hits: dict[str, list[Tensor]] = {name: [] for name in drafts}
    for text in texts:
        own = slice(text.context - 1, None)  # token context + 1 is the first that is drafted
        copied.append(completes_gram(text.tokens[0])[2:][own])
        for name, of_text in drafts.items():
            hits[name].append(of_text(text)[own])
    is_copy = torch.cat(copied)
    return {
        "tokens": len(is_copy),
        "copied": int(is_copy.sum()),
        "right": {
            name: {
                "copied": round(found[is_copy].float().mean().item(), 4),
                "new": round(found[~is_copy].float().mean().item(), 4),
                "all": round(found.float().mean().item(), 4),
            }
            for name, found in ((name, torch.cat(parts)) for name, parts in hits.items())
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--target", type=Path, default=PAIR / "target")
    add("--draft", type=Path, default=PAIR / "draft")
    add("--head", type=Path, nargs="+", default=[PAIR / "eagle"])
    add("--json", type=Path, dest="output")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target, draft = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for path in (args.target, args.draft)
    )
    heads = {f"head {path.name}": load_head(path, target) for path in args.head}
    read = {boundaries for _, boundaries in heads.values()}
    if len(read) > 1:
        parser.error(f"heads read boundaries {sorted(read)}; compare those that read the same")
    drafts = {"draft model": partial(draft_hits, draft)} | {
        name: partial(head_hits, head) for name, (head, _) in heads.items()
    }
    report: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tokens_of_a_gram": GRAM,
    }
    for name, entries in prompts_of_walks(tokenizer).items():
        texts = greedy_texts(target, tokenizer, entries, list(next(iter(read))))
        report[name] = compare(texts, drafts)
        print(name, json.dumps(report[name]), flush=True)
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
