"""Train an adapter with which the demo pair's target drafts by itself (Uno), on a CPU core.

A step of Uno reads the newest token and noise after it; rows of noise go through a low-rank
adapter, and each proposes the token after its own place. The target stays as it is: its weights are
frozen, and of a text its keys and values are computed without the adapter, as an engine has them.
Blocks of noise begin after random tokens of the text, and each row follows what the target finds
likely at its place.

    python examples/training/train_uno_adapter.py --minutes 40 --out out/uno
    specc compile --target examples/pair/target --lora fast=out/uno --draft uno:fast -o engine/
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

# matrices this small gain nothing from a second thread, and lose where cores are shared
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.nn.functional as F
from pair_data import encode_stream, training_files
from pair_parts import facts_of_training, write_json
from pair_policy import draw_prompts
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from specc.fit.optimizer import Schedule, autocast

PAIR = Path(__file__).resolve().parents[1] / "pair"
PROMPTS = (PAIR / "prompts.jsonl", PAIR / "prompts_unused.jsonl")
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
REPORT_EVERY = 20
DECAY, MISSED = 0.9, 0.3  # weights of a row beside the one before it, and where that was wrong


@torch.no_grad()
def _continue(target: nn.Module, prompts: Tensor, length: int) -> Tensor:
    """[rows, context + length] int64, prompts with the target's greedy text, whatever it is."""
    return target.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=length,
        eos_token_id=None,
        do_sample=False,
    )


class Adapted(nn.Module):
    """A projection with a low-rank term, which is on or off for all of them."""

    is_on = False

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base, self.scale = base, alpha / rank
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        out = self.base(x)
        return out + self.scale * (x @ self.down.T) @ self.up.T if Adapted.is_on else out


def adapt(target: nn.Module, rank: int, alpha: float) -> dict[str, Adapted]:
    """Put terms beside a model's projections; returns them by the paths of those."""
    target.requires_grad_(False)
    found = {}
    for name, module in list(target.named_modules()):
        if name.rpartition(".")[2] in MODULES:
            parent = target.get_submodule(name.rpartition(".")[0])
            found[name] = Adapted(module, rank, alpha)  # type: ignore[arg-type]
            setattr(parent, name.rpartition(".")[2], found[name])
    return found


def block_mask(length: int, anchors: Tensor, size: int) -> Tensor:
    """[rows, 1, n · size, length + n · size], what is added to scores of rows of noise.

    A row sees the text up to its anchor, and the rows of its own block up to itself.
    """
    rows, count = anchors.shape
    text = torch.arange(length) <= anchors[..., None]
    text = text[:, :, None].expand(-1, -1, size, -1).reshape(rows, count * size, length)
    own = torch.block_diag(*[torch.ones(size, size).tril()] * count).bool()
    seen = torch.cat([text, own.expand(rows, -1, -1)], 2)
    return torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[:, None]


def losses(
    target: Any, tokens: Tensor, anchors: Tensor, size: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Compare rows of noise with the target.

    Args:
        target: adapted.
        tokens: [rows, length] int64.
        anchors: [rows, n], the tokens that blocks come after.
        size: rows of noise of a block.
        generator: of the noise.
    Returns:
        the loss, a scalar, and the share of rows [size] whose first choice is the target's.
    """
    rows, count = anchors.shape
    cache = DynamicCache()
    Adapted.is_on = False
    with torch.no_grad(), autocast():
        taught = target(tokens, past_key_values=cache, use_cache=True).logits
    place = anchors[..., None] + 1 + torch.arange(size)
    noise = torch.randint(target.config.vocab_size, place.shape, generator=generator)
    Adapted.is_on = True
    with autocast():
        made = target(
            noise.flatten(1),
            past_key_values=cache,
            position_ids=place.flatten(1),
            attention_mask=block_mask(tokens.shape[1], anchors, size),
            use_cache=True,
        ).logits
    made = made.float().view(rows, count, size, -1)
    wanted = (
        taught.float()
        .gather(1, place.flatten(1)[..., None].expand(-1, -1, taught.shape[-1]))
        .view_as(made)
    )
    hits = made.argmax(-1) == wanted.argmax(-1)
    weights = torch.where(hits, 1.0, MISSED)
    weights = torch.cat([torch.ones(rows, count, 1), weights[..., :-1]], 2).cumprod(2)
    weights = weights * DECAY ** torch.arange(size)
    part = F.kl_div(made.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="none")
    return (part.sum(-1) * weights).sum() / weights.sum(), hits.float().mean((0, 1))


def save(terms: dict[str, Adapted], rank: int, alpha: float, path: Path) -> None:
    """Write the adapter as PEFT does."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, term in terms.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = term.down.detach().contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = term.up.detach().contiguous()
    save_file(tensors, path / "adapter_model.safetensors", {"format": "pt"})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha,
        "target_modules": [*MODULES], "bias": "none", "inference_mode": True,
    }  # fmt: skip
    text = json.dumps(config, indent=2) + "\n"
    (path / "adapter_config.json").write_text(text, encoding="utf-8")


def texts_of(args: argparse.Namespace, target: Any, stream: Tensor, newline: int) -> Tensor:
    """[rows, length]: the target's own greedy texts, and as many windows of the corpus."""
    generator = torch.Generator().manual_seed(args.seed + 1)
    pool = []
    for _ in range(args.pool_batches):
        prompts = draw_prompts(stream, newline, 128, generator)
        pool.append(_continue(target, prompts, args.length - prompts.shape[1]))
        print(f"texts: {sum(map(len, pool))}", flush=True)
    own = torch.cat(pool)
    starts = torch.randint(len(stream) - args.length, (len(own),), generator=generator)
    return torch.cat([own, torch.stack([stream[s : s + args.length] for s in starts])])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--target", type=Path, default=PAIR / "target")
    add("--out", type=Path, default=Path("out/uno"))
    add("--minutes", type=float, default=40.0)
    add("--pool-batches", type=int, default=6, help="of 128 prompts, greedy texts")
    add("--length", type=int, default=224, help="tokens of a text")
    add("--rank", type=int, default=16)
    add("--alpha", type=float, default=32.0)
    add("--size", type=int, default=7, help="rows of noise of a block")
    add("--anchors", type=int, default=20, help="blocks of a text")
    add("--batch", type=int, default=8)
    add("--rate", type=float, default=2e-3)
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    stream = encode_stream(tokenizer, training_files(PROMPTS))
    texts = texts_of(args, target, stream, tokenizer("\n")["input_ids"][-1])
    terms = adapt(target, args.rank, args.alpha)
    parameters = [x for term in terms.values() for x in (term.down, term.up)]
    optimizer = torch.optim.AdamW(parameters, lr=args.rate, betas=(0.9, 0.95), weight_decay=0.0)
    generator = torch.Generator().manual_seed(args.seed)
    schedule, step, hits = Schedule(10**6, args.minutes), 0, []
    while schedule.progress(step) < 1.0:
        rows = texts[torch.randint(len(texts), (args.batch,), generator=generator)]
        most = args.length - args.size - 1
        anchors = torch.randint(8, most, (args.batch, args.anchors), generator=generator)
        loss, shares = losses(target, rows, anchors, args.size, generator)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.param_groups[0]["lr"] = args.rate * max(0.0, schedule.scale(step))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        hits = [round(x, 3) for x in shares.tolist()]
        if step % REPORT_EVERY == 0:
            print(f"{step} {schedule.elapsed():.0f} s loss {loss.item():.3f} {hits}", flush=True)
            save(terms, args.rank, args.alpha, args.out)
    save(terms, args.rank, args.alpha, args.out)
    facts = facts_of_training("train_uno_adapter.py", args.seed)
    facts |= {"steps": step, "minutes": args.minutes, "agreement": hits, "ended": time.ctime()}
    facts["parameters"] = sum(x.numel() for x in parameters)
    write_json(args.out / "eval.json", facts)
    print(facts, flush=True)


if __name__ == "__main__":
    main()
