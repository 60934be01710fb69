"""EAGLE-3 heads: what they learn, and how far their chains come.

The head (`eagle_head.py`) reads hidden states of the target and hands on its own. It is unrolled
over as many depths as a chain has, each depth reading what the one before it has handed on, and
follows the target's distribution at every depth; along greedy texts the target's first choice
counts once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from specc.fit.drafters.draft_files import round_weights
from specc.fit.drafters.eagle_head import EagleHead, build_head, save_head
from specc.fit.drafters.fitter import DraftShape
from specc.fit.optimizer import autocast
from specc.fit.soft_cross_entropy import SoftCrossEntropy
from specc.fit.target import Sizes
from specc.fit.texts import Texts, TextStore

_MOMENT_ROWS = 20_000  # hidden states, whose second moments are taken


@dataclass(frozen=True)
class Goal:
    """What a head learns.

    Args:
        depths: it is unrolled over.
        decay: weight of each depth relative to the one before it.
        first_weight: of the target's first choice beside its distribution, along greedy texts.
        missed_weight: of a row at a depth that a greedy chain would not have come to, because the
            head's first choice was another token before; 1 weighs all alike.
    """

    depths: int
    decay: float = 1.0
    first_weight: float = 1.0
    missed_weight: float = 0.3


def losses(head: EagleHead, texts: Texts, goal: Goal) -> tuple[Tensor, Tensor, Tensor]:
    """Compare a head with its target along texts, from where somebody learns to predict them.

    Args:
        head: to be trained.
        texts: rows.
        goal: see there.
    Returns:
        the loss, a scalar; and by depth [D] its part in nats, and the share of rows at which both
        have one first choice, without gradient.
    """
    # row i knows token i + 1 and predicts token i + 2, as the target does where it reads i + 1
    begin = max(int(texts.begins.min()) - 2, goal.depths - 1, 0)
    place = torch.arange(begin, texts.length - 2, device=texts.tokens.device)
    is_taught = (place >= texts.begins[:, None] - 2) & (place < texts.ends[:, None] - 2)
    column = torch.full((head.config.vocab_size,), -1, device=head.kept.device)
    column[head.kept] = torch.arange(len(head.kept), device=head.kept.device)
    places = column[texts.ids[:, begin + 1 : -1].long()]
    odds = texts.odds[:, begin + 1 : -1].float() * (places >= 0)
    is_kept, places = places[..., 0] >= 0, places.clamp_min(0)
    first = places[..., 0]
    added = goal.first_weight * (is_kept & texts.is_greedy[:, None])
    odds = torch.cat([odds[..., :1] + added[..., None], odds[..., 1:]], -1)
    with autocast(texts.tokens.device.type):
        known = head.unroll(texts.taps[:, :-2], texts.tokens[:, 1:-1], goal.depths, begin)
    total: Tensor = odds.new_zeros(())
    parts, agreements = [], []
    taught = is_taught.float()
    # nothing is known of what a chain has met before the first row
    is_first = taught * (1 - F.pad(taught[:, :-1], (1, 0)))
    weights = taught
    for depth, rows in enumerate(known):
        shares = weights / weights.sum().clamp_min(1e-6)
        part, is_best = SoftCrossEntropy.apply(
            rows.flatten(0, 1),
            head.lm_head.weight,
            places.flatten(0, 1),
            odds.flatten(0, 1),
            shares.flatten(),
            first.flatten(),
        )
        total = total + goal.decay**depth * part
        hit = is_best.view(first.shape) & is_kept
        parts.append(part.detach())
        agreements.append((hit * taught).sum() / taught.sum().clamp_min(1))
        # a chain goes one row and one depth on
        weights = torch.where(hit, weights, goal.missed_weight * taught)
        weights = torch.maximum(F.pad(weights[:, :-1], (1, 0)) * taught, is_first)
    return total, torch.stack(parts), torch.stack(agreements)


@torch.no_grad()
def hits(head: EagleHead, text: Texts, depths: int) -> Tensor:
    """Whether greedy chains propose what the target has written, see `Chains.follow`.

    Args:
        head: trained.
        text: one row.
        depths: of a chain.
    """
    tokens = text.tokens
    known = head.unroll(text.taps[:, :-2], tokens[:, 1:-1], depths, 0)
    found = [head.kept[head.lm_head(x[0]).argmax(-1)] == tokens[0, 2:] for x in known]
    # the row of a root is one before it; nothing is drafted for beyond the end
    begin = int(text.begins[0]) - 1
    return torch.stack([F.pad(x[begin + d :], (0, d)) for d, x in enumerate(found)], 1)


def some_taps(store: TextStore) -> Tensor:
    """Hidden states of all texts in turn, [n, A · H] float32, n about `_MOMENT_ROWS`."""
    parts = [part for kind in store.kinds() for part in store.parts(kind)]
    stride = max(1, sum(part.tokens.numel() for part in parts) // _MOMENT_ROWS)
    rows = []
    for part in parts:
        is_text = torch.arange(part.length) < part.ends[:, None]
        rows.append(part.taps[is_text][::stride].float())
    return torch.cat(rows)


class EagleFitter:
    """Of EAGLE-3 heads."""

    has_draft_vocab = True
    batch_tokens = 2048

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._goal = Goal(depth)

    def check(self, sizes: Sizes) -> None:
        """Every target."""

    def build(self, sizes: Sizes, shape: DraftShape) -> EagleHead:
        return build_head(
            sizes, len(shape.boundaries), shape.layer, shape.trained_length, shape.kept
        )

    def begin(self, draft: EagleHead, store: TextStore) -> None:
        draft.fc.change_basis(some_taps(store).to(draft.kept.device))

    def losses(
        self, draft: EagleHead, texts: Texts, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        return losses(draft, texts, self._goal)

    def end(self, draft: EagleHead) -> None:
        draft.fc.fold()
        round_weights(draft.eval())

    def hits(self, draft: EagleHead, text: Texts, depth: int) -> Tensor:
        return hits(draft, text, depth)

    def save(
        self, draft: EagleHead, sizes: Sizes, boundaries: Sequence[int], directory: Path
    ) -> None:
        save_head(draft, boundaries, directory)
