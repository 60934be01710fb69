"""The training loop of drafts that read hidden states, and how far their greedy chains come."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from head_texts import Texts
from pair_parts import Optimizer, Schedule
from torch import Tensor, nn

REPORT_EVERY = 20
# (rows of one kind, whether they are greedy, what draws) → the loss, a scalar; and by depth its
# part in nats and the share of rows at which draft and target have one first choice
Losses = Callable[[Texts, bool, torch.Generator], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Course:
    """How a draft is taught.

    Args:
        schedule: of the learning rates; it also ends the training.
        rates: peak learning rates of Muon and of AdamW.
        shares: how often a token of each kind of texts is drawn, relative to the others.
        seed: of the order.
    """

    schedule: Schedule
    rates: tuple[float, float]
    shares: list[float]
    seed: int


def teach(
    draft: nn.Module,
    losses: Losses,
    shelves: list[Texts],
    course: Course,
    rows_of: Callable[[Texts], int],
    depth_name: str,
    keep: Callable[[], object] = lambda: None,
    keep_every_s: float = 300.0,
) -> tuple[int, dict[str, Any]]:
    """Teach a draft, in place.

    Args:
        draft: in float32.
        losses: of some rows.
        shelves: texts of one kind each, the greedy ones first.
        course: see there.
        rows_of: number of rows of a kind that a step reads.
        depth_name: what figures by depth are called by.
        keep: called now and then, to save what has been learned.
        keep_every_s: seconds between two calls.
    Returns:
        steps, and the figures of the last report.
    """
    optimizer = Optimizer(draft, *course.rates)
    generator = torch.Generator().manual_seed(course.seed)
    odds = torch.tensor(
        [share * texts.tokens.numel() for share, texts in zip(course.shares, shelves, strict=True)]
    )
    step, figures, begin = 0, {}, time.monotonic()
    kept = begin
    while course.schedule.progress(step) < 1.0:
        number = int(torch.multinomial(odds, 1, generator=generator))
        texts = shelves[number]
        rows = texts.rows(torch.randint(len(texts), (rows_of(texts),), generator=generator))
        loss, parts, agreements = losses(rows, number == 0, generator)
        loss.backward()
        optimizer.step(max(0.0, course.schedule.scale(step)))
        step += 1
        # of one kind, so that reports can be compared
        if number == 0 and step >= figures.get("step", 0) + REPORT_EVERY:
            figures = {
                "step": step,
                f"loss_by_{depth_name}": [round(value, 4) for value in parts.tolist()],
                f"agreement_by_{depth_name}": [round(value, 4) for value in agreements.tolist()],
            }
            print(f"{time.monotonic() - begin:.0f} s, {figures}", flush=True)
        if time.monotonic() > kept + keep_every_s:
            keep()
            kept = time.monotonic()
    return step, figures


class Chains:
    """Greedy chains along the target's own greedy texts, as an engine drafts them.

    Args:
        depth: of a chain.
    """

    def __init__(self, depth: int) -> None:
        self._reached = torch.zeros(depth)
        self._texts = self._steps = self._accepted = 0

    def follow(self, text: Texts, hits: Tensor) -> None:
        """Count what steps along a text accept.

        Args:
            text: one row, greedy after its context.
            hits: [roots, depth] bool, whether the draft proposes the token that came. A root is the
                last known token, which the target has not read; the first one ends the context.
        """
        self._texts += 1
        root, last = text.context, text.length - 1
        while root < last:
            own, count = hits[root - text.context], 0
            # the token after those that are accepted is the target's own, the last one, too
            while count < min(len(self._reached), last - 1 - root) and own[count]:
                self._reached[count] += 1
                count += 1
            self._steps += 1
            self._accepted += count
            root += count + 1

    def figures(self) -> dict[str, Any]:
        """What was accepted, of all texts."""
        return {
            "prompts": self._texts,
            "steps": self._steps,
            "acceptance_length": round(1 + self._accepted / self._steps, 4),
            "accepted_at_depth": [round(x, 4) for x in (self._reached / self._steps).tolist()],
        }
