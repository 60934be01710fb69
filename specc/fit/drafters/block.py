"""Block drafters (DFlash, JetSpec, DSpark, DFlash 2, LiLiCorr): what they learn, how far they come.

The drafter (`block_drafter.py`) proposes a block of tokens in one pass, from hidden states of the
target. Blocks begin at random tokens of texts, and each row follows the target's distribution at
its place; along greedy texts the target's first choice counts once more. Scores of candidates alone
learn beside the rows: what the target finds likely among them, after the token that came before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specc.errors import ConfigError
from specc.fit.drafters.block_drafter import BlockDrafter, build_drafter, save_drafter
from specc.fit.drafters.block_scores import MARKOV
from specc.fit.drafters.draft_files import round_weights
from specc.fit.drafters.fitter import DraftShape
from specc.fit.optimizer import autocast
from specc.fit.soft_cross_entropy import SoftCrossEntropy
from specc.fit.target import Sizes
from specc.fit.texts import Texts, TextStore

_LAYERS, _RANK, _CANDIDATES = 2, 32, 16


@dataclass(frozen=True)
class Goal:
    """What a drafter learns.

    Args:
        anchors: blocks of a text.
        decay: weight of each row of a block relative to the one before it.
        first_weight: of the target's first choice beside its distribution, along greedy texts.
        missed_weight: of a row that a greedy chain would not have come to, because the drafter's
            first choice was another token before; 1 weighs all alike.
    """

    anchors: int = 48
    decay: float = 0.9
    first_weight: float = 1.0
    missed_weight: float = 0.3


def draw_anchors(texts: Texts, size: int, count: int, generator: torch.Generator) -> Tensor:
    """[rows, count] places of blocks, all rows of which somebody learns to predict.

    Of a row that is too short, blocks begin at the first such token, and go on beyond its end.

    Args:
        texts: rows.
        size: of a block.
        count: of blocks of a text.
        generator: of the places.
    """
    begins = texts.begins.cpu()
    room = (texts.ends.cpu() - size + 1 - begins).clamp_min(1)
    drawn = torch.rand(len(texts), count, generator=generator) * room[:, None]
    places = begins[:, None] + drawn.long().minimum(room[:, None] - 1)
    return places.clamp_max(texts.length - size).to(texts.tokens.device)


def losses(
    drafter: BlockDrafter, texts: Texts, anchors: Tensor, goal: Goal
) -> tuple[Tensor, Tensor, Tensor]:
    """Compare a drafter with its target.

    Args:
        drafter: to be trained.
        texts: rows.
        anchors: [rows, n], see `draw_anchors`.
        goal: see there.
    Returns:
        the loss, a scalar; and by row of a block that predicts [P] its part in nats, and the share
        of rows at which both have one first choice, without gradient. Of a score of candidates,
        parts are those of rows alone, first choices those of the score.
    """
    with autocast(texts.tokens.device.type):
        known = drafter(texts.taps, texts.tokens, anchors)
    matrix = drafter.head()
    total: Tensor = known.new_zeros((), dtype=torch.float32)
    parts, agreements = [], []
    weights = torch.ones(anchors.shape, device=anchors.device)
    for depth in range(drafter.num_proposed):
        place = anchors + depth
        is_text = (place < texts.ends[:, None]).float()
        among = place[..., None].expand(-1, -1, texts.ids.shape[-1])
        ids, odds = texts.ids.gather(1, among).long(), texts.odds.gather(1, among).float()
        first = ids[..., 0]
        added = goal.first_weight * texts.is_greedy[:, None, None]
        odds = torch.cat([odds[..., :1] + added, odds[..., 1:]], -1)
        shares = weights * is_text
        shares = shares / shares.sum().clamp_min(1e-6)
        # what comes before the token that a row predicts is known here, and drafted in a step
        joined = drafter.join(known[:, :, depth].float(), texts.tokens.gather(1, place))
        part, is_best = SoftCrossEntropy.apply(
            joined.flatten(0, 1),
            matrix,
            ids.flatten(0, 1),
            odds.flatten(0, 1),
            shares.flatten(),
            first.flatten(),
        )
        total = total + goal.decay**depth * part
        hit = is_best.view(first.shape)
        parts.append(part.detach())
        agreements.append((hit * is_text).sum() / is_text.sum().clamp_min(1))
        weights = torch.where(hit, weights, torch.full_like(weights, goal.missed_weight))
    if drafter.candidates:
        more, agreements = candidate_losses(drafter, known.float(), texts, anchors, goal)
        total = total + more
    return total, torch.stack(parts), torch.stack(agreements)


def candidate_losses(
    drafter: BlockDrafter, known: Tensor, texts: Texts, anchors: Tensor, goal: Goal
) -> tuple[Tensor, list[Tensor]]:
    """What a score of candidates adds to the loss, and by row how often its first choice is right.

    The target's first choice takes the place of the last candidate where it is none: a score that
    never sees what it misses learns that all that it sees is likely.

    Args:
        known: [rows, n, P, d] of blocks.
    """
    num, rows = drafter.num_proposed, known.flatten(0, 1)
    place = anchors.flatten()[:, None] + torch.arange(num, device=anchors.device)
    text = torch.arange(len(anchors), device=anchors.device).repeat_interleave(anchors.shape[1])
    text = text[:, None]
    ids, odds = texts.ids[text, place].long(), texts.odds[text, place].float()
    first, added = ids[..., 0], goal.first_weight * texts.is_greedy[text].float()
    odds = torch.cat([odds[..., :1] + added[..., None], odds[..., 1:]], -1)
    chosen, sums = drafter.best(rows)
    missing = ~(chosen == first[..., None]).any(-1)
    chosen[..., -1] = torch.where(missing, first, chosen[..., -1])
    context = drafter.context(texts.taps[text[:, 0], (place[:, 0] - 1).clamp_min(0)])
    with autocast(anchors.device.type):
        logits, there = drafter.among(rows, texts.tokens[text, place], chosen, sums, context)
    # what the target finds likely among the candidates
    wanted = torch.zeros_like(chosen, dtype=torch.float32)
    for k in range(ids.shape[-1]):
        wanted += odds[..., k, None] * (chosen == ids[..., k, None])
    wanted = wanted / wanted.sum(-1, keepdim=True).clamp_min(1e-9)
    nats = -(wanted * logits.float().log_softmax(-1)).sum(-1)
    hit = chosen.gather(-1, logits.argmax(-1, keepdim=True))[..., 0] == first
    is_text = ((place < texts.ends[text]) & there).float()
    total, weights, agreements = nats.new_zeros(()), torch.ones_like(nats[:, 0]), []
    for depth in range(num):
        shares = weights * is_text[:, depth]
        shares = shares / shares.sum().clamp_min(1e-6)
        total = total + goal.decay**depth * (shares * nats[:, depth]).sum()
        counted = is_text[:, depth]
        agreements.append((hit[:, depth] * counted).sum() / counted.sum().clamp_min(1))
        missed = torch.full_like(weights, goal.missed_weight)
        weights = torch.where(hit[:, depth], weights, missed)
    return total, agreements


@torch.no_grad()
def hits(drafter: BlockDrafter, text: Texts, depth: int) -> Tensor:
    """Whether greedy chains propose what the target has written, see `Chains.follow`.

    Args:
        drafter: trained.
        text: one row.
        depth: of a chain.
    """
    tokens, last = text.tokens[0], text.length - 1
    # the last known token, which the target has not read
    anchors = torch.arange(int(text.begins[0]), last, device=tokens.device)
    known = drafter(text.taps, text.tokens, anchors[None])[0]
    # nothing is drafted for beyond the end
    rows = torch.arange(drafter.num_proposed, device=tokens.device)
    place = (anchors[:, None] + rows).clamp_max(last - 1)
    if drafter.candidates:
        chosen, sums = drafter.best(known, is_exact=True)
        context = drafter.context(text.taps[0, anchors - 1])
        logits, _ = drafter.among(known, tokens[place], chosen, sums, context)
        found = chosen.gather(-1, logits.argmax(-1, keepdim=True))[..., 0]
    else:
        found = (drafter.join(known, tokens[place]) @ drafter.head().T).argmax(-1)
    return (found == tokens[place + 1])[:, :depth]


class BlockFitter:
    """Of block drafters.

    Args:
        depth: tokens that a pass proposes.
        score: of `SCORES`.
        from_anchor: the anchor's row proposes the first of them; published drafters with another
            score than DSpark's have a mask for each.
        is_causal: a row sees the block up to itself: JetSpec, of DFlash's score.
    """

    has_draft_vocab = False
    batch_tokens = 4096

    def __init__(
        self,
        depth: int,
        score: str = MARKOV,
        from_anchor: bool | None = None,
        is_causal: bool = False,
    ) -> None:
        self.depth, self._score, self._is_causal = depth, score, is_causal
        self._from_anchor = score == MARKOV if from_anchor is None else from_anchor
        self._goal = Goal()

    def check(self, sizes: Sizes) -> None:
        if sizes.is_scaled:
            raise ConfigError(
                "a target that multiplies its embeddings or caps its logits",
                "one whose embedding and head a block drafter can share as they are: engines"
                " differ in what they make of the others",
                "pass --kind eagle3",
            )

    def build(self, sizes: Sizes, shape: DraftShape) -> BlockDrafter:
        return build_drafter(
            sizes,
            len(shape.boundaries),
            _LAYERS,
            shape.layer,
            shape.trained_length,
            self.depth + (not self._from_anchor),
            shape.mask_token_id,
            _RANK,
            score=self._score,
            from_anchor=self._from_anchor,
            candidates=min(_CANDIDATES, sizes.vocab_size),
            is_causal=self._is_causal,
        )

    def begin(self, draft: BlockDrafter, store: TextStore) -> None:
        """Nothing."""

    def losses(
        self, draft: BlockDrafter, texts: Texts, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        anchors = draw_anchors(texts, draft.num_proposed, self._goal.anchors, generator)
        return losses(draft, texts, anchors, self._goal)

    def end(self, draft: BlockDrafter) -> None:
        round_weights(draft.eval())

    def hits(self, draft: BlockDrafter, text: Texts, depth: int) -> Tensor:
        return hits(draft, text, depth)

    def save(
        self, draft: BlockDrafter, sizes: Sizes, boundaries: Sequence[int], directory: Path
    ) -> None:
        save_drafter(draft, boundaries, sizes.num_layers, directory)
