"""Train a block drafter (DSpark) for the demo pair's target, in minutes on a CPU core.

The drafter (`block_drafter.py`) proposes a block of tokens in one pass, from hidden states of the
target. It learns from the texts that `train_eagle_head.py` makes, greedy ones, sampled ones and
windows of the corpus: blocks begin at random tokens of them, and each row follows the target's
whole distribution at its place; along greedy texts the target's first choice counts once more.

    python examples/training/train_block_drafter.py --texts out/texts.safetensors --minutes 40
    specc compile --target examples/pair/target --draft examples/pair/block -o engine/

`eval.json` beside the weights says how, and how well, as that of the head does.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# matrices this small gain nothing from a second thread, and lose where cores are shared
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from block_drafter import BlockDrafter, build_drafter, save_drafter
from head_files import round_weights
from head_loop import Chains, Course, teach
from head_loss import SoftCrossEntropy
from head_texts import Texts
from head_training import PAIR, Lessons, add_options, course_of, run
from pair_parts import autocast
from torch import Tensor


@dataclass(frozen=True)
class Goal:
    """What the drafter learns.

    Args:
        anchors: blocks of a text.
        decay: weight of each row of a block relative to the one before it.
        first_weight: of the target's first choice beside its distribution, along greedy texts.
        missed_weight: of a row that a greedy chain would not have come to, because the drafter's
            first choice was another token before; 1 weighs all alike.
    """

    anchors: int
    decay: float
    first_weight: float
    missed_weight: float


def draw_anchors(texts: Texts, size: int, count: int, generator: torch.Generator) -> Tensor:
    """[rows, count] places of blocks, all rows of which the target has written, or all along.

    Args:
        texts: rows of one kind.
        size: of a block.
        count: of blocks of a text.
        generator: of the places.
    """
    begin = texts.context if texts.context < texts.length else 1
    return torch.randint(begin, texts.length - size + 1, (len(texts), count), generator=generator)


def losses(
    drafter: BlockDrafter,
    output: Tensor,
    texts: Texts,
    anchors: Tensor,
    goal: Goal,
    is_greedy: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compare a drafter with its target.

    Args:
        drafter: to be trained.
        output: [V, H], the target's head.
        texts: rows of one kind.
        anchors: [rows, n], see `draw_anchors`.
        goal: see there.
        is_greedy: the target has chosen its likeliest token all along.
    Returns:
        the loss, a scalar; and by row of a block [B] its part in nats, and the share of rows at
        which both have one first choice, without gradient.
    """
    rows, count = anchors.shape
    with autocast():
        known = drafter(texts.taps, texts.tokens, anchors)
    matrix = drafter.head()
    total: Tensor = torch.zeros(())
    parts, agreements = [], []
    weights = torch.ones(rows, count)
    for depth in range(drafter.block_size):
        place = anchors + depth
        last = texts.last.gather(1, place[..., None].expand(-1, -1, texts.last.shape[-1]))
        with torch.no_grad(), autocast():
            taught = last @ output.T
            first = taught.argmax(-1)
        wanted = taught.float().softmax(-1)
        if is_greedy:
            wanted.scatter_add_(
                -1, first[..., None], torch.full_like(wanted[..., :1], goal.first_weight)
            )
        shares = weights / weights.sum().clamp_min(1e-6)
        # row k knows what token k is, and predicts token k + 1
        joined = drafter.join(known[:, :, depth].float(), texts.tokens.gather(1, place))
        part, is_best = SoftCrossEntropy.apply(
            joined.flatten(0, 1),
            matrix,
            wanted.flatten(0, 1),
            shares.flatten(),
            first.flatten(),
        )
        total = total + goal.decay**depth * part
        hit = is_best.view(first.shape)
        parts.append(part.detach())
        agreements.append(hit.float().mean())
        weights = torch.where(hit, weights, torch.full_like(weights, goal.missed_weight))
    return total, torch.stack(parts), torch.stack(agreements)


def train(
    drafter: BlockDrafter,
    output: Tensor,
    shelves: list[Texts],
    goal: Goal,
    course: Course,
    batch: int,
    keep: Callable[[], object] = lambda: None,
    keep_every_s: float = 300.0,
) -> tuple[int, dict[str, Any]]:
    """Teach a drafter, in place; steps of `batch` texts. See `teach`."""

    def of_rows(
        texts: Texts, is_greedy: bool, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        anchors = draw_anchors(texts, drafter.block_size, goal.anchors, generator)
        return losses(drafter, output, texts, anchors, goal, is_greedy)

    return teach(drafter, of_rows, shelves, course, lambda _: batch, "row", keep, keep_every_s)


@torch.no_grad()
def walk(drafter: BlockDrafter, texts: list[Texts], depth: int) -> dict[str, Any]:
    """Acceptance of greedy chains along the target's own greedy texts, as an engine has it.

    Args:
        drafter: trained.
        texts: one row each, greedy after their context.
        depth: of a chain.
    """
    chains = Chains(depth)
    matrix, rows = drafter.head(), torch.arange(depth)
    for text in texts:
        tokens, last = text.tokens[0], text.length - 1
        # the last known token, which the target has not read
        anchors = torch.arange(text.context, last)
        known = drafter(text.taps, text.tokens, anchors[None])[0, :, :depth]
        # nothing is drafted for beyond the end
        place = (anchors[:, None] + rows).clamp_max(last - 1)
        found = (drafter.join(known, tokens[place]) @ matrix.T).argmax(-1)
        chains.follow(text, found == tokens[place + 1])
    return chains.figures()


def make_drafter(args: argparse.Namespace) -> dict[str, Any]:
    """Train and save a drafter; returns how, and how well it does."""
    lessons = Lessons.find(args)
    target, shelves = lessons.target, lessons.shelves
    drafter = build_drafter(
        target,
        len(args.boundaries),
        args.layers,
        args.inner,
        args.heads,
        args.kv_heads,
        args.head_dim,
        max(texts.length for texts in shelves),
        args.block_size,
        target.config.eos_token_id,
        args.rank,
    )
    lessons.begin(drafter, args.start)
    goal = Goal(args.anchors, args.decay, args.first_weight, args.missed_weight)
    course = course_of(args)
    begin = time.monotonic()

    def keep() -> None:
        save_drafter(drafter, args.boundaries, target.config.num_hidden_layers, args.out)

    steps, figures = train(drafter, lessons.output, shelves, goal, course, args.batch, keep)
    seconds = time.monotonic() - begin
    keep()
    round_weights(drafter.eval())
    depths = sorted({min(4, args.block_size), args.block_size})
    return {
        **lessons.sizes(drafter),
        "settings": {
            **vars(goal),
            "boundaries": args.boundaries,
            "block_size": args.block_size,
            "rank": args.rank,
            "rates": course.rates,
            "shares": args.shares,
            "batch": args.batch,
        },
        "steps": steps,
        "blocks_seen": steps * args.batch * args.anchors,
        "training_s": round(seconds),
        "training_texts": figures,
        "greedy_chains": {
            name: {f"depth {depth}": walk(drafter, own, depth) for depth in depths}
            for name, own in lessons.greedy(args.boundaries).items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = add_options(parser, PAIR / "block", 40.0, 20261126)
    add("--block-size", type=int, default=5, help="B: tokens of a block")
    add("--rank", type=int, default=32, help="of what is added for the token before")
    add("--anchors", type=int, default=48, help="blocks of a text")
    add("--decay", type=float, default=0.9, help="weight of a row relative to the last")
    add("--layers", type=int, default=2)
    add("--inner", type=int, default=256, help="columns of the MLP")
    add("--batch", type=int, default=8, help="texts of a training step")
    run("train_block_drafter.py", parser.parse_args(), make_drafter)


if __name__ == "__main__":
    main()
