"""Make a PARD model of a draft model that exists (arXiv:2504.18583).

The draft learns to go on from masks: after a text, mask m predicts what comes after m tokens that
nobody has said, so that one pass drafts a whole tree. It learns from what `specc fit-draft` learns
from. Masks follow random tokens of texts, the fewer the deeper; each row follows the target's
distribution at its place, and along greedy texts the target's first choice counts once more.

    python examples/training/train_pard.py --texts docs/ --minutes 15 --out out/pard
    specc compile --target examples/pair/target --draft out/pard -o engine/

A row of the embedding that the target does not have is the mask.
"""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# matrices this small gain nothing from a second thread, and lose where cores are shared
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from specc.fit.documents import Encoder, read_documents, split
from specc.fit.optimizer import Schedule, autocast
from specc.fit.soft_cross_entropy import SoftCrossEntropy
from specc.fit.target import Target
from specc.fit.texts import Texts, TextStore
from specc.fit.trainer import TrainerConfig, train
from specc.fit.training_data import Budget, TrainingData
from specc.passes.frontend.hf_tokenizer import HfTokenizer

PAIR = Path(__file__).resolve().parents[1] / "pair"
# rows of the embedding that are added for the mask: numbers of rows stay even
_MORE_IDS = 8
# of texts with what the target computes along them
_MOST_BYTES = 4 << 30


@dataclass(frozen=True)
class Goal:
    """What the model learns.

    Args:
        depth: tokens that a pass predicts: a text's last row, and masks.
        anchors: tokens of a text that masks follow.
        kept: share of these that each further mask follows.
        least: share that every mask follows.
        decay: weight of each depth relative to the one before it.
        first_weight: of the target's first choice beside its distribution, along greedy texts.
        missed_weight: of a row that a greedy chain would not have come to; 1 weighs all alike.
    """

    depth: int
    anchors: int = 48
    kept: float = 0.7
    least: float = 0.2
    decay: float = 0.9
    first_weight: float = 1.0
    missed_weight: float = 0.3

    def counts(self) -> list[int]:
        """Anchors with one mask, two masks, …"""
        shares = (max(self.kept**mask, self.least) for mask in range(1, self.depth))
        return [max(1, round(self.anchors * share)) for share in shares]


def with_mask(model: PreTrainedModel, num_ids: int) -> int:
    """Give a model a mask, the first id that its target does not have; returns it."""
    model.resize_token_embeddings(num_ids + _MORE_IDS)
    model.config.pard_token, model.config.spd_type = num_ids, "pard"
    return num_ids


def rows_of_masks(
    model: PreTrainedModel, mask: int, tokens: Tensor, anchors: Tensor, counts: Sequence[int]
) -> list[Tensor]:
    """Hidden states after the last norm: [rows, T, d] of texts, and of mask 1, 2, … of anchors,
    [rows, counts[m - 1], d].

    Args:
        model: to be trained, a decoder of transformers.
        mask: its id.
        tokens: [rows, T] int64.
        anchors: [rows, n] places of the tokens before first masks.
        counts: of the anchors, the first so many have one mask, two masks, …; falling.
    """
    rows, length = tokens.shape
    owner = torch.cat([torch.arange(count) for count in counts])
    number = torch.cat([torch.full((count,), m) for m, count in enumerate(counts, 1)])
    places = anchors[:, owner] + number
    steps = torch.arange(length)
    positions = torch.cat([steps.expand(rows, -1), places], 1)
    ids = torch.cat([tokens, torch.full_like(places, mask)], 1)
    # a mask sees the text up to its anchor, and masks of the same one up to itself
    total = ids.shape[1]
    seen = torch.zeros(rows, total, total, dtype=torch.bool)
    seen[:, :length, :length] = steps[:, None] >= steps
    seen[:, length:, :length] = anchors[:, owner, None] >= steps
    seen[:, length:, length:] = (owner[:, None] == owner) & (number[:, None] >= number)
    hidden = model.model(
        input_ids=ids, position_ids=positions, attention_mask=seen[:, None], use_cache=False
    ).last_hidden_state
    return list(hidden.split([length, *counts], 1))


def draw_anchors(texts: Texts, goal: Goal, generator: torch.Generator) -> Tensor:
    """[rows, n] places of tokens that masks follow, from the last one that the target has not
    written on; of a row that is too short, masks go on beyond its end.
    """
    begins = (texts.begins - 1).clamp_min(0)
    room = (texts.ends - goal.depth - begins).clamp_min(1)
    drawn = torch.rand(len(texts), goal.anchors, generator=generator) * room[:, None]
    places = begins[:, None] + drawn.long().minimum(room[:, None] - 1)
    return places.clamp_max(texts.length - goal.depth)


def losses(
    model: PreTrainedModel, mask: int, texts: Texts, anchors: Tensor, goal: Goal
) -> tuple[Tensor, Tensor, Tensor]:
    """Compare a model with its target.

    Args:
        model: see `rows_of_masks`.
        mask: its id.
        texts: rows.
        anchors: [rows, n], see `draw_anchors`.
        goal: see there.
    Returns:
        the loss, a scalar; and by depth its part in nats, and the share of rows at which both have
        one first choice, without gradient.
    """
    with autocast():
        known = rows_of_masks(model, mask, texts.tokens, anchors, goal.counts())
    matrix = model.get_output_embeddings().weight[:mask]
    total: Tensor = torch.zeros(())
    parts, agreements = [], []
    # all rows of texts that somebody learns from, then those of masks
    places = torch.arange(texts.length).expand(len(texts), -1)
    weights = (places >= texts.begins[:, None] - 1).float()
    for depth, rows in enumerate(known):
        if depth:
            places = anchors[:, : rows.shape[1]] + depth
            weights = weights[:, : rows.shape[1]]
        is_text = (places < texts.ends[:, None]).float()
        among = places[..., None].expand(-1, -1, texts.ids.shape[-1])
        ids, odds = texts.ids.gather(1, among).long(), texts.odds.gather(1, among).float()
        best = ids[..., 0]
        added = goal.first_weight * texts.is_greedy[:, None, None]
        odds = torch.cat([odds[..., :1] + added, odds[..., 1:]], -1)
        shares = weights * is_text
        part, is_best = SoftCrossEntropy.apply(
            rows.float().flatten(0, 1),
            matrix,
            ids.flatten(0, 1),
            odds.flatten(0, 1),
            (shares / shares.sum().clamp_min(1e-6)).flatten(),
            best.flatten(),
        )
        total = total + goal.decay**depth * part
        hit = is_best.view(best.shape)
        counted = is_text if depth else shares
        parts.append(part.detach())
        agreements.append((hit * counted).sum() / counted.sum().clamp_min(1))
        if not depth:
            hit, weights = hit.gather(1, anchors), torch.ones(anchors.shape)
        weights = torch.where(hit, weights, torch.full_like(weights, goal.missed_weight))
    return total, torch.stack(parts), torch.stack(agreements)


def save(model: PreTrainedModel, tokenizer: Any, directory: Path) -> None:
    """Write the checkpoint, weights in bfloat16."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def make_model(args: argparse.Namespace) -> None:
    """Train a model, and save it."""
    torch.manual_seed(args.seed)
    target = Target.load(str(args.target), "cpu", lambda *told: None)
    documents, _ = split(read_documents(args.texts))
    store = TextStore(args.out / "texts")
    encoder = Encoder(HfTokenizer.load(args.target), None)
    lessons = TrainingData(target, (1,), encoder, store, 256, args.seed)
    budgets = {count: Budget(float("inf"), count, _MOST_BYTES) for count in (args.write, args.read)}
    lessons.write(documents, budgets[args.write], _tell)
    lessons.read(documents, budgets[args.read], _tell)
    model = AutoModelForCausalLM.from_pretrained(args.draft, dtype=torch.float32)
    mask, goal = with_mask(model, target.sizes.vocab_size), Goal(args.depth, args.anchors)

    def of_rows(texts: Texts, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        anchors = draw_anchors(texts, goal, generator)
        return losses(model, mask, texts, anchors, goal)

    schedule = Schedule(args.steps, args.minutes, decay=0.7)
    config = TrainerConfig(
        schedule, (0.01, 2e-3), args.batch_tokens, args.seed, torch.device("cpu")
    )
    result = train(model, of_rows, store, config, advance=_tell)
    save(model, AutoTokenizer.from_pretrained(args.target), args.out)
    print(f"\n{result}")


def _tell(done: int, total: int, what: str = "") -> None:
    print(f"\r{done} of {total}: {what}", end="", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--target", type=Path, default=PAIR / "target")
    add("--draft", type=Path, default=PAIR / "draft", help="what becomes a PARD model")
    add("--texts", type=Path, nargs="+", required=True, help="files or directories of text")
    add("--out", type=Path, required=True, help="directory that is written")
    add("--write", type=int, default=200_000, help="tokens that the target writes to learn from")
    add("--read", type=int, default=200_000, help="tokens of the texts themselves")
    add("--minutes", type=float, default=15.0, help="minutes of training, at most")
    add("--steps", type=int, default=10**6, help="steps of training, at most")
    add("--depth", type=int, default=8, help="tokens that a pass predicts")
    add("--anchors", type=int, default=48, help="tokens of a text that masks follow")
    add("--batch-tokens", type=int, default=2048, help="of texts of a training step")
    add("--seed", type=int, default=20261129)
    make_model(parser.parse_args())


if __name__ == "__main__":
    main()
