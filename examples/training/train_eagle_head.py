"""Train an EAGLE-3 head for the demo pair's target, in minutes on a CPU core.

The head (`eagle_head.py`) reads hidden states of the target at three places and hands on its own.
It learns from the corpus of `train_pair.py`, in three kinds of texts: greedy continuations of
prompts by the target, where greedy decoding takes it; continuations at temperature 1; and windows
of the corpus as it is. The target's hidden states and probabilities along all of them are computed
once (`head_texts.py`). The head is unrolled over as many depths as a chain has, each depth reading
what the one before it has handed on, and follows the target's whole distribution at every depth;
along greedy texts the target's first choice counts once more.

    python examples/training/train_eagle_head.py --texts out/texts.safetensors --minutes 16 \
        --out out/first
    python examples/training/train_eagle_head.py --texts out/texts.safetensors --minutes 21 \
        --start out/first
    specc compile --target examples/pair/target --draft examples/pair/eagle -o engine/

`eval.json` beside the weights says how, and how well: the acceptance length of greedy chains, by a
walk along the target's own greedy text of held-out prompts, and by depth the share of tokens that
are the head's first choice where the text before them is given.
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# matrices this small gain nothing from a second thread, and lose where cores are shared
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.nn.functional as F
from eagle_head import EagleHead, build_head, save_head
from head_files import round_weights
from head_loop import Chains, Course, teach
from head_loss import SoftCrossEntropy
from head_texts import Texts
from head_training import PAIR, Lessons, add_options, course_of, run
from pair_parts import autocast
from torch import Tensor

_MOMENT_ROWS = 20_000  # hidden states, whose second moments are taken


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
    course: Course,
    batch_tokens: int,
    keep: Callable[[], object] = lambda: None,
) -> tuple[int, dict[str, Any]]:
    """Teach a head, in place; steps of about `batch_tokens`. See `teach`."""

    def of_rows(texts: Texts, is_greedy: bool, _: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        return losses(head, output, texts, goal, is_greedy)

    def rows_of(texts: Texts) -> int:
        return max(1, batch_tokens // texts.length)

    return teach(head, of_rows, shelves, course, rows_of, "depth", keep)


@torch.no_grad()
def walk(head: EagleHead, texts: list[Texts], depths: int) -> dict[str, Any]:
    """Acceptance of greedy chains along the target's own greedy texts, as an engine has it.

    Args:
        head: trained.
        texts: one row each, greedy after their context.
        depths: of a chain.
    """
    chains, hits = Chains(depths), torch.zeros(depths)
    for text in texts:
        tokens = text.tokens
        known = head.unroll(text.taps[:, :-2], tokens[:, 1:-1], depths, 0)
        found = torch.stack(
            [head.kept[head.lm_head(x[0]).argmax(-1)] == tokens[0, 2:] for x in known]
        )
        # the row of a root is one before it
        own = [x[text.context - 1 + depth :] for depth, x in enumerate(found)]
        hits += torch.stack([x.float().mean() for x in own])
        # nothing is drafted for beyond the end
        chains.follow(text, torch.stack([F.pad(x, (0, d)) for d, x in enumerate(own)], 1))
    return {
        **chains.figures(),
        "agreement_by_depth": [round(x, 4) for x in (hits / len(texts)).tolist()],
    }


def kept_ids(shelves: list[Texts], count: int, vocab_size: int) -> Tensor:
    """The ids that the texts have most of, ascending."""
    found = torch.cat([texts.tokens.flatten() for texts in shelves])
    often = torch.bincount(found, minlength=vocab_size)
    return often.topk(min(count, vocab_size)).indices.sort().values


def some_taps(shelves: list[Texts]) -> Tensor:
    """Hidden states of all texts in turn, [n, A · H] float32, n about `_MOMENT_ROWS`."""
    rows = [texts.taps.flatten(0, 1) for texts in shelves]
    stride = max(1, sum(map(len, rows)) // _MOMENT_ROWS)
    return torch.cat([part[::stride] for part in rows]).float()


def make_head(args: argparse.Namespace) -> dict[str, Any]:
    """Train and save a head; returns how, and how well it does."""
    lessons = Lessons.find(args)
    target, shelves = lessons.target, lessons.shelves
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
    lessons.begin(head, args.start)
    goal = Goal(args.depths, args.decay, args.first_weight, args.missed_weight)
    course = course_of(args)
    head.fc.change_basis(some_taps(shelves))
    begin = time.monotonic()

    def keep() -> None:
        own = copy.deepcopy(head)
        own.fc.fold()
        save_head(own, args.boundaries, args.out)

    steps, figures = train(head, lessons.output, shelves, goal, course, args.batch_tokens, keep)
    seconds = time.monotonic() - begin
    keep()
    head.fc.fold()
    round_weights(head.eval())
    walked = {
        name: walk(head, own, args.depths) for name, own in lessons.greedy(args.boundaries).items()
    }
    return {
        **lessons.sizes(head),
        "settings": {
            **vars(goal),
            "boundaries": args.boundaries,
            "rates": course.rates,
            "shares": args.shares,
            "batch_tokens": args.batch_tokens,
        },
        "steps": steps,
        "tokens_seen": steps * args.batch_tokens,
        "training_s": round(seconds),
        "training_texts": figures,
        "greedy_chains": walked,
    }


def add_own_options(parser: argparse.ArgumentParser) -> None:
    """Options of this trainer, and of both."""
    add = add_options(parser, PAIR / "eagle", 20.0, 20261127)
    add("--depths", type=int, default=4, help="that the head is unrolled over")
    add("--decay", type=float, default=1.0, help="weight of a depth relative to the last")
    add("--width", type=int, default=128)
    add("--inner", type=int, default=384, help="columns of the MLP")
    add("--draft-vocab-size", type=int, default=2048, help="ids that the head proposes")
    add("--batch-tokens", type=int, default=2048, help="of a training step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_own_options(parser)
    run("train_eagle_head.py", parser.parse_args(), make_head)


if __name__ == "__main__":
    main()
