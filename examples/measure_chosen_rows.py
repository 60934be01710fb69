"""What a self-draft would accept if it chose rows, not blocks: windows, blocks and SnapKV's rows.

    python examples/measure_chosen_rows.py --json out/chosen_rows.json

The long target (examples/long) reads stretches of held-out files and writes tokens of its own at
temperature 1. At each of these a draft of one token is asked, teacher-forced: the committed rows
are the target's, and the draft sees a sink, the last rows, and some between them: none, blocks of
16 by one list for all layers and heads, as `self:blocks` does, blocks by a list for each layer, or
rows by a list for each layer and KV head, as SnapKV does (arXiv:2404.14469), which also takes the
mean of neighbours (`pooled`). All are chosen by the attention of the last 32 queries of the prompt.

`overlap` is the share of probability that draft and target have in common, what a chain at
temperature 1 accepts of its first token at best; `greedy` is how often both find the same token the
likeliest. The attention is written here, beside the model of transformers, so that every selection
is a mask.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from pair_data import END, load_corpus
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from specc.system.machine import describe_machine

TARGET = Path(__file__).resolve().parent / "long" / "target"
BLOCK, SINK, VOTERS = 16, 16, 32
KINDS = ("window", "blocks", "blocks a layer", "rows", "rows pooled")


class Target:
    """The model with its attention laid open.

    Args:
        path: of a Qwen3 checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        config = self.model.config
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.dim = config.head_dim

    def _qkv(self, layer: Any, x: Tensor, rotary: Any) -> tuple[Tensor, Tensor, Tensor]:
        """[heads, T, D] each; keys and values of the KV heads."""
        own, h = layer.self_attn, layer.input_layernorm(x)
        q = own.q_norm(own.q_proj(h).unflatten(-1, (self.heads, self.dim))).transpose(1, 2)
        k = own.k_norm(own.k_proj(h).unflatten(-1, (self.kv_heads, self.dim))).transpose(1, 2)
        v = own.v_proj(h).unflatten(-1, (self.kv_heads, self.dim)).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, *rotary)
        return q[0], k[0], v[0]

    def _after(self, layer: Any, x: Tensor, heads: Tensor) -> Tensor:
        x = x + layer.self_attn.o_proj(heads.transpose(0, 1).flatten(1)[None])
        return x + layer.mlp(layer.post_attention_layernorm(x))

    def _begin(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, Any]:
        x = self.model.model.embed_tokens(ids[None])
        return x, self.model.model.rotary_emb(x, positions[None])

    def _end(self, x: Tensor) -> Tensor:
        return self.model.lm_head(self.model.model.norm(x))[0]

    @torch.inference_mode()
    def read(self, ids: Tensor, num_prompt: int) -> tuple[Tensor, list, list[Tensor]]:
        """A causal pass over all tokens.

        Returns:
            logits of the last prompt token and of those after it, keys and values of each layer,
            and of each layer the attention [KV heads, T] that the last queries of the prompt give
            to rows.
        """
        x, rotary = self._begin(ids, torch.arange(len(ids)))
        rows, votes = [], []
        group = self.heads // self.kv_heads
        voters = torch.arange(num_prompt - VOTERS, num_prompt)
        for layer in self.model.model.layers:
            q, k, v = self._qkv(layer, x, rotary)
            rows.append((k, v))
            wide = k.repeat_interleave(group, 0)
            scores = q[:, voters] @ wide.transpose(1, 2) / self.dim**0.5
            unseen = torch.arange(len(ids)) > voters[:, None]
            weights = scores.masked_fill(unseen, -torch.inf).softmax(-1).sum(1)
            votes.append(weights.unflatten(0, (self.kv_heads, group)).sum(1))
            heads = F.scaled_dot_product_attention(
                q[None], k[None], v[None], is_causal=True, enable_gqa=True
            )
            x = self._after(layer, x, heads[0])
        return self._end(x[:, num_prompt - 1 :]), rows, votes

    @torch.inference_mode()
    def draft(self, ids: Tensor, first: int, rows: list, seen: list[Tensor]) -> Tensor:
        """Logits [P, V] of single tokens from a position on, each a draft's first.

        Args:
            ids: all tokens.
            first: position of the first one that drafts.
            rows: keys and values of the target, of each layer.
            seen: of each layer, [KV heads, P, T] whether a token sees a committed row; that of its
                own is the draft's.
        """
        positions = torch.arange(first, len(ids))
        x, rotary = self._begin(ids[first:], positions)
        group = self.heads // self.kv_heads
        for layer, (keys, values), visible in zip(self.model.model.layers, rows, seen, strict=True):
            q, k, v = self._qkv(layer, x, rotary)
            k, v, keys, values, visible = (
                one.repeat_interleave(group, 0) for one in (k, v, keys, values, visible)
            )
            scores = (q @ keys.transpose(1, 2)).masked_fill(~visible, -torch.inf)
            own = (q * k).sum(-1, keepdim=True)
            weights = (torch.cat([scores, own], -1) / self.dim**0.5).softmax(-1)
            heads = weights[..., :-1] @ values + weights[..., -1:] * v
            x = self._after(layer, x, heads)
        return self._end(x)


def visible_rows(
    kind: str, votes: list[Tensor], positions: Tensor, budget: int, window: int
) -> list[Tensor]:
    """Of each layer, [KV heads, P, T] rows that a draft sees besides its own.

    Args:
        kind: of `KINDS`.
        votes: [KV heads, T] attention, of each layer.
        positions: of the tokens that draft.
        budget: rows between the sink and the token, those of the window included.
        window: last rows, at least: they begin with a block.
    """
    num_kv, total = votes[0].shape
    columns = torch.arange(total)
    window = budget if kind == "window" else window
    begin = (positions - window).clamp(min=SINK) // BLOCK * BLOCK
    seen = (columns < SINK) | (columns >= begin[:, None])
    seen &= columns < positions[:, None]
    between = (columns >= SINK) & (columns < begin[:, None])
    count = budget - window
    found = []
    for own in votes:
        if kind == "window":
            found.append(seen.expand(num_kv, -1, -1))
            continue
        if kind == "blocks":
            mass = torch.stack(votes).sum((0, 1))[None]
        elif kind == "blocks a layer":
            mass = own.sum(0, keepdim=True)
        else:
            mass = own
        if kind.startswith("blocks"):
            padded = F.pad(mass, (0, -total % BLOCK)).unflatten(1, (-1, BLOCK)).sum(-1)
            mass = padded.repeat_interleave(BLOCK, 1)[:, :total]
        elif kind == "rows pooled":
            mass = F.avg_pool1d(mass[:, None], 5, 1, 2)[:, 0]
        # of equals the later one, so that a block is chosen as a whole
        ranked = mass[:, None] + columns * 1e-12 if not kind.startswith("blocks") else mass[:, None]
        ranked = ranked.masked_fill(~between, -torch.inf).expand(-1, len(positions), -1)
        if kind.startswith("blocks"):
            by_block = F.pad(ranked, (0, -total % BLOCK), value=-torch.inf)
            by_block = by_block.unflatten(2, (-1, BLOCK)).amax(-1)
            best = by_block.topk(min(count // BLOCK, by_block.shape[2]), -1).indices
            chosen = torch.zeros_like(by_block, dtype=torch.bool).scatter(2, best, value=True)
            chosen = chosen.repeat_interleave(BLOCK, 2)[..., :total]
        else:
            best = ranked.topk(min(count, total), -1).indices
            chosen = torch.zeros_like(ranked, dtype=torch.bool).scatter(2, best, value=True)
        found.append((seen | (chosen & between)).expand(num_kv, -1, -1))
    return found


def stretches(path: Path, length: int, count: int) -> list[Tensor]:
    """Held-out files before as many places, far enough apart to share no token."""
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    ids: list[int] = []
    for file in load_corpus()[1]:
        ids += [tokenizer.token_to_id(END), *tokenizer.encode(file.text).ids]
    places = range(length, len(ids), max(length, (len(ids) - length) // count))
    return [torch.tensor(ids[place - length : place]) for place in places][:count]


@torch.inference_mode()
def continued(target: Target, ids: Tensor, count: int, seed: int) -> Tensor:
    """The stretch, and tokens that the target draws after it at temperature 1."""
    dice, cache, fed, out = torch.Generator().manual_seed(seed), None, ids[None], [ids]
    for _ in range(count):
        step = target.model(input_ids=fed, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = step.past_key_values
        fed = torch.multinomial(step.logits[:, -1].softmax(-1), 1, generator=dice)
        out.append(fed[0])
    return torch.cat(out)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[4000, 8000])
    parser.add_argument("--budgets", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--sequences", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser.parse_args()


def main() -> None:
    options, target = parse(), Target(TARGET)
    torch.set_num_threads(1)
    cells = []
    for context in options.contexts:
        figures: dict[tuple[int, str], list[tuple[float, float]]] = {}
        for seed, prompt in enumerate(stretches(TARGET, context, options.sequences)):
            ids = continued(target, prompt, options.tokens, seed)
            wanted, rows, votes = target.read(ids, len(prompt))
            wanted, positions = wanted[1:], torch.arange(len(prompt), len(ids))
            for budget in options.budgets:
                for kind in KINDS:
                    seen = visible_rows(kind, votes, positions, budget, budget // 2)
                    drafted = target.draft(ids, len(prompt), rows, seen)
                    overlap = torch.minimum(drafted.softmax(-1), wanted.softmax(-1)).sum(-1)
                    greedy = (drafted.argmax(-1) == wanted.argmax(-1)).float()
                    found = float(overlap.mean()), float(greedy.mean())
                    figures.setdefault((budget, kind), []).append(found)
        for (budget, kind), values in figures.items():
            overlap, greedy = (list(column) for column in zip(*values, strict=True))
            against = [one[0] for one in figures[budget, "blocks"]]
            more = [a - b for a, b in zip(overlap, against, strict=True)]
            error = statistics.stdev(more) / len(more) ** 0.5 if len(more) > 1 else 0.0
            cells.append(
                {
                    "context": context, "budget": budget, "kind": kind,
                    "overlap": round(statistics.fmean(overlap), 4),
                    "greedy": round(statistics.fmean(greedy), 4),
                    "overlap_beyond_blocks": round(statistics.fmean(more), 4),
                    "standard_error": round(error, 4),
                }
            )  # fmt: skip
            print(cells[-1], flush=True)
    report = {
        "command": "python examples/measure_chosen_rows.py " + " ".join(sys.argv[1:]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": describe_machine(),
        "torch_version": torch.__version__,
        "sequences": options.sequences,
        "tokens": options.tokens,
        "sink": SINK,
        "block_size": BLOCK,
        "voters": VOTERS,
        "cells": cells,
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
