"""Train an EAGLE-3 head for the demo pair's target, in minutes on a CPU core.

The head (`eagle_head.py`) reads hidden states of the target at three places and hands on its own.
It learns from the corpus of `train_pair.py`, in three kinds of texts: greedy continuations of
prompts by the target, where greedy decoding takes it; continuations at temperature 1; and windows
of the corpus as it is. The target's hidden states and probabilities along all of them are computed
once (`head_texts.py`). The head is unrolled over as many depths as a chain has, each depth reading
what the one before it has handed on, and follows the target's whole distribution at every depth;
along greedy texts the target's first choice counts once more.

    python examples/train_eagle_head.py --texts out/texts.safetensors --minutes 16 --out out/first
    python examples/train_eagle_head.py --texts out/texts.safetensors --start out/first --minutes 21
    specc compile --target examples/pair/target --draft examples/pair/eagle -o engine/

`eval.json` beside the weights says how, and how well: the acceptance length of greedy chains, by a
walk along the target's own greedy text of held-out prompts, and by depth the share of tokens that
are the head's first choice where the text before them is given.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from typing import Any

# matrices this small gain nothing from a second thread, and lose where cores are shared
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.nn.functional as F
from eagle_head import EagleHead, build_head, save_head
from head_files import load_weights, round_weights
from head_loss import SoftCrossEntropy
from head_texts import Texts
from head_training import PAIR, PROMPTS, add_options, find_texts, greedy_texts, run
from pair_parts import Optimizer, Schedule, autocast
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

REPORT_EVERY = 20


@dataclass(frozen=True)
class Goal:
    """What the head learns.

    Args:
        depths: it is unrolled over.
        decay: weight of each depth relative to the one before it.
        first_weight: of the target's first choice beside its distribution, along greedy texts.
        missed_weight: of a row at a depth that a greedy chain would not have come to, because the
            head's first choice was another token before; 1 weighs all alike.
    """

    depths: int
    decay: float
    first_weight: float
    missed_weight: float


def losses(
    head: EagleHead, output: Tensor, texts: Texts, goal: Goal, is_greedy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compare a head with its target where the target has written, or all along the corpus.

    Args:
        head: to be trained.
        output: [V, H], the target's head.
        texts: rows of one kind.
        goal: see there.
        is_greedy: the target has chosen its likeliest token all along.
    Returns:
        the loss, a scalar; and by depth [D] its part in nats, and the share of rows at which both
        have one first choice, without gradient.
    """
    # row i knows token i + 1 and predicts token i + 2, as the target does where it reads i + 1
    begin = max(texts.context - 2, goal.depths - 1) if texts.context < texts.length else goal.depths
    with torch.no_grad(), autocast():
        taught = texts.last[:, begin + 1 : -1] @ output.T
        first = taught.argmax(-1)
    is_kept = torch.zeros(len(output)).index_fill_(0, head.kept, 1.0)
    place = torch.searchsorted(head.kept, first).clamp_max(len(head.kept) - 1)
    if len(head.kept) < len(output):
        taught = taught[..., head.kept]
    wanted = taught.float().softmax(-1)
    if is_greedy:
        added = goal.first_weight * is_kept[first]
        wanted.scatter_add_(-1, place[..., None], added[..., None])
    with autocast():
        known = head.unroll(texts.taps[:, :-2], texts.tokens[:, 1:-1], goal.depths, begin)
    total: Tensor = torch.zeros(())
    parts, agreements = [], []
    weights = torch.ones(first.shape)
    for depth, rows in enumerate(known):
        shares = weights / weights.sum().clamp_min(1e-6)
        part, is_best = SoftCrossEntropy.apply(
            rows.flatten(0, 1),
            head.lm_head.weight,
            wanted.flatten(0, 1),
            shares.flatten(),
            place.flatten(),
        )
        total = total + goal.decay**depth * part
        hit = is_best.view(first.shape) & (is_kept[first] > 0)
        parts.append(part.detach())
        agreements.append(hit.float().mean())
        # a chain goes one row and one depth on
        weights = torch.where(hit, weights, torch.full_like(weights, goal.missed_weight))
        weights = F.pad(weights[:, :-1], (1, 0), value=1.0)
    return total, torch.stack(parts), torch.stack(agreements)


def train(
    head: EagleHead,
    output: Tensor,
    shelves: list[Texts],
    goal: Goal,
    schedule: Schedule,
    rates: tuple[float, float],
    shares: list[float],
    batch_tokens: int,
    seed: int,
) -> tuple[int, dict[str, Any]]:
    """Teach a head, in place.

    Args:
        head: in float32.
        output: see `losses`.
        shelves: texts of one kind each, the greedy ones first.
        goal: see there.
        schedule: of the learning rates; it also ends the training.
        rates: peak learning rates of Muon and of AdamW.
        shares: how often a token of each kind is drawn, relative to the others.
        batch_tokens: of a step, about.
        seed: of the order.
    Returns:
        steps, and the figures of the last report.
    """
    optimizer = Optimizer(head, *rates)
    generator = torch.Generator().manual_seed(seed)
    odds = torch.tensor(
        [share * texts.tokens.numel() for share, texts in zip(shares, shelves, strict=True)]
    )
    step, figures, begin = 0, {}, time.monotonic()
    while schedule.progress(step) < 1.0:
        number = int(torch.multinomial(odds, 1, generator=generator))
        texts = shelves[number]
        count = max(1, batch_tokens // texts.length)
        rows = texts.rows(torch.randint(len(texts), (count,), generator=generator))
        loss, parts, agreements = losses(head, output, rows, goal, number == 0)
        loss.backward()
        optimizer.step(max(0.0, schedule.scale(step)))
        step += 1
        # of one kind, so that reports can be compared
        if number == 0 and step >= figures.get("step", 0) + REPORT_EVERY:
            figures = {
                "step": step,
                "loss_by_depth": [round(value, 4) for value in parts.tolist()],
                "agreement_by_depth": [round(value, 4) for value in agreements.tolist()],
            }
            print(f"{time.monotonic() - begin:.0f} s, {figures}", flush=True)
    return step, figures


@torch.no_grad()
def walk(head: EagleHead, texts: list[Texts], depths: int) -> dict[str, Any]:
    """Acceptance of greedy chains along the target's own greedy texts, as an engine has it.

    Args:
        head: trained.
        texts: one row each, greedy after their context.
        depths: of a chain.
    """
    steps, accepted, hits, places = 0, 0, torch.zeros(depths), 0
    reached = torch.zeros(depths)
    for text in texts:
        tokens = text.tokens
        known = head.unroll(text.taps[:, :-2], tokens[:, 1:-1], depths, 0)
        is_hit = torch.stack(
            [head.kept[head.lm_head(x[0]).argmax(-1)] == tokens[0, 2:] for x in known]
        )
        # the last known token, which the target has not read; its row is one before it
        root = text.context
        first = root - 1
        hits += torch.stack([is_hit[d, first + d :].float().mean() for d in range(depths)])
        places += 1
        last = tokens.shape[1] - 1
        while root < last:
            count = 0
            # the token after those that are accepted is the target's own, the last one, too
            while count < min(depths, last - 1 - root) and is_hit[count, root - 1 + count]:
                reached[count] += 1
                count += 1
            steps, accepted, root = steps + 1, accepted + count, root + count + 1
    return {
        "prompts": len(texts),
        "steps": steps,
        "acceptance_length": round(1 + accepted / steps, 4),
        "accepted_at_depth": [round(x, 4) for x in (reached / steps).tolist()],
        "agreement_by_depth": [round(x, 4) for x in (hits / places).tolist()],
    }


def kept_ids(shelves: list[Texts], count: int, vocab_size: int) -> Tensor:
    """The ids that the texts have most of, ascending."""
    found = torch.cat([texts.tokens.flatten() for texts in shelves])
    often = torch.bincount(found, minlength=vocab_size)
    return often.topk(min(count, vocab_size)).indices.sort().values


def make_head(args: argparse.Namespace) -> dict[str, Any]:
    """Train and save a head; returns how, and how well it does."""
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    shelves = find_texts(args, target, tokenizer)
    head = build_head(
        target,
        len(args.boundaries),
        args.width,
        args.inner,
        args.heads,
        args.kv_heads,
        args.head_dim,
        max(texts.tokens.shape[1] for texts in shelves),
        kept_ids(shelves, args.draft_vocab_size, target.config.vocab_size),
    )
    if args.start:
        load_weights(head, args.start)
    size = sum(x.numel() for x in head.parameters())
    tokens = [texts.tokens.numel() for texts in shelves]
    print(f"{size:,} parameters, {sum(tokens):,} tokens", flush=True)
    output = target.get_output_embeddings().weight.detach().bfloat16()
    goal = Goal(args.depths, args.decay, args.first_weight, args.missed_weight)
    schedule = Schedule(args.steps, args.minutes, decay=0.7)
    begin = time.monotonic()
    rates = (args.muon_rate, args.adam_rate)
    steps, figures = train(
        head, output, shelves, goal, schedule, rates, args.shares, args.batch_tokens, args.seed + 3
    )
    seconds = time.monotonic() - begin
    save_head(head, args.boundaries, args.out)
    head.eval()
    round_weights(head)
    walked = {
        name: walk(head, greedy_texts(target, tokenizer, path, args.boundaries), args.depths)
        for name, path in PROMPTS.items()
    }
    return {
        "parameters": size,
        "tokens_of_texts": dict(zip(("greedy", "sampled", "corpus"), tokens, strict=True)),
        "settings": {
            **vars(goal),
            "boundaries": args.boundaries,
            "rates": rates,
            "shares": args.shares,
            "batch_tokens": args.batch_tokens,
        },
        "steps": steps,
        "tokens_seen": steps * args.batch_tokens,
        "training_s": round(seconds),
        "training_texts": figures,
        "greedy_chains": walked,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = add_options(parser, PAIR / "eagle", 20.0, 20261127)
    add("--depths", type=int, default=4, help="that the head is unrolled over")
    add("--decay", type=float, default=1.0, help="weight of a depth relative to the last")
    add("--width", type=int, default=128)
    add("--inner", type=int, default=384, help="columns of the MLP")
    add("--draft-vocab-size", type=int, default=2048, help="ids that the head proposes")
    add("--batch-tokens", type=int, default=2048, help="of a training step")
    run("train_eagle_head.py", parser.parse_args(), make_head)


if __name__ == "__main__":
    main()
