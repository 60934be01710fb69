"""Loss of a draft past its trained length: all rows, a window, and positions inside the window.

    python examples/measure_draft_windows.py --json out/draft_windows_pair.json

The demo pair's draft reads held-out files, joined to 8192 tokens, of which it was trained on 1024.
Each of its layers attends to

    full        all rows before, at their true distance
    true        the last W rows and the first S, at their true distance: `--draft-kv`
    in cache    the same rows, where the first S are as far as their place in a cache of W + S rows
                says (StreamingLLM, arXiv:2309.17453): keys are kept unrotated for that

The last two differ in the distance to the sink alone. Means are over windows of text, in nats.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from pair_data import encode_stream, load_corpus
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from specc.system.machine import describe_machine

PAIR = Path(__file__).resolve().parent / "pair"
TILE = 512
# positions at which the tables of losses are cut
EDGES = (0, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class Rows:
    """What a layer attends to: window 0 is all rows."""

    window: int = 0
    sink: int = 0
    in_cache: bool = False

    @property
    def label(self) -> str:
        if not self.window:
            return "full"
        kind = "in cache" if self.in_cache else "true"
        return f"window {self.window}, sink {self.sink}, {kind}"


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """[H, T, D] rotated by [T] positions, halves as Qwen3 pairs them."""
    angles = torch.cat([positions[:, None].float() * frequencies] * 2, -1)
    one, two = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-two, one], -1) * angles.sin()


def attend(
    q: Tensor, k: Tensor, v: Tensor, rows: Rows, scale: float, frequencies: Tensor
) -> Tensor:
    """Attention of unrotated q, k and v, all [H, T, D]; returns [H, T, D]."""
    count = q.shape[1]
    places = torch.arange(count)
    near, keys = rotate(q, places, frequencies), rotate(k, places, frequencies)
    # a full cache holds the sink, then the window: the last query is at place W + S - 1
    last = rows.window + rows.sink - 1
    far = rotate(q, places.clamp(max=last), frequencies) if rows.in_cache else near
    found = []
    for begin in range(0, count, TILE):
        end = min(count, begin + TILE)
        first = max(0, begin - rows.window) if rows.window else 0
        distance = places[begin:end, None] - places[first:end]
        is_seen = distance >= 0
        if rows.window:
            is_seen &= distance < rows.window
        scores = (near[:, begin:end] @ keys[:, first:end].mT) * scale
        scores = scores.masked_fill(~is_seen, float("-inf"))
        values = v[:, first:end]
        if rows.window and rows.sink:
            sink = (far[:, begin:end] @ keys[:, : rows.sink].mT) * scale
            is_left = places[begin:end, None] - places[: rows.sink] >= rows.window
            scores = torch.cat([sink.masked_fill(~is_left, float("-inf")), scores], -1)
            values = torch.cat([v[:, : rows.sink], values], 1)
        found.append(scores.softmax(-1) @ values)
    return torch.cat(found, 1)


@torch.no_grad()
def logits_of(model: Qwen3ForCausalLM, tokens: Tensor, rows: Rows) -> Tensor:
    """[T, V] of [T] tokens; Qwen3's own modules, but for attention."""
    body: Any = model.model
    x = body.embed_tokens(tokens)
    for layer in body.layers:
        part = layer.self_attn
        hidden = layer.input_layernorm(x)
        shape = (len(tokens), -1, part.head_dim)
        q = part.q_norm(part.q_proj(hidden).view(shape)).transpose(0, 1)
        k = part.k_norm(part.k_proj(hidden).view(shape)).transpose(0, 1)
        v = part.v_proj(hidden).view(shape).transpose(0, 1)
        k, v = (item.repeat_interleave(len(q) // len(item), 0) for item in (k, v))
        mixed = attend(q, k, v, rows, part.scaling, body.rotary_emb.inv_freq)
        x = x + part.o_proj(mixed.transpose(0, 1).flatten(1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.lm_head(body.norm(x))


def check(model: Qwen3ForCausalLM, tokens: Tensor) -> None:
    """Raises AssertionError: with all rows, this is not what transformers computes."""
    with torch.no_grad():
        wanted = model(input_ids=tokens[None], use_cache=False).logits[0]
    torch.testing.assert_close(logits_of(model, tokens, Rows()), wanted, rtol=1e-3, atol=1e-3)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="example: python examples/measure_draft_windows.py --windows 512 --sinks 0 4",
    )
    parser.add_argument("--draft", type=Path, default=PAIR / "draft", help="a Qwen3 model")
    parser.add_argument("--windows", type=int, nargs="+", default=[64, 256, 512, 1024])
    parser.add_argument("--sinks", type=int, nargs="+", default=[0, 4, 16])
    parser.add_argument("--texts", type=int, default=6, help="windows of held-out text")
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    model = Qwen3ForCausalLM.from_pretrained(options.draft, dtype=torch.float32).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(options.draft)
    stream = encode_stream(tokenizer, load_corpus()[1])
    starts = torch.linspace(0, len(stream) - EDGES[-1] - 1, options.texts).long()
    texts = [stream[start : start + EDGES[-1] + 1] for start in starts]
    check(model, texts[0][:700])
    kinds = [Rows()]
    for window in options.windows:
        for sink in options.sinks:
            kinds += [
                Rows(window, sink, in_cache) for in_cache in ((False, True) if sink else (False,))
            ]
    figures = []
    for rows in kinds:
        losses = torch.stack(
            [
                F.cross_entropy(logits_of(model, text[:-1], rows), text[1:], reduction="none")
                for text in texts
            ]
        )
        by_position = [
            round(losses[:, first:last].mean().item(), 4)
            for first, last in itertools.pairwise(EDGES)
        ]
        figures.append({"rows": rows.label, "loss": by_position})
        print(f"{rows.label:32}", *(f"{loss:.3f}" for loss in by_position), flush=True)
    report = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": describe_machine(),
        "torch_version": torch.__version__,
        "trained_length": model.config.max_position_embeddings,
        "texts": options.texts,
        "positions": EDGES,
        "figures": figures,
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
