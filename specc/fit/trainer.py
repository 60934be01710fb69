"""The training loop of drafts that read hidden states; a run that was ended goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specc.errors import ConfigError
from specc.fit.optimizer import Optimizer, Schedule
from specc.fit.texts import Texts, TextStore
from specc.progress import Advance, ignore

_REPORT_EVERY = 20
# rows, what draws → the loss, a scalar; and by depth its part in nats and the share of places at
# which draft and target have one first choice
Losses = Callable[[Texts, torch.Generator], tuple[Tensor, Tensor, Tensor]]
# how often a token of texts of a kind is drawn, relative to the others: those that the target has
# written itself are those that it comes to when it decodes
_SHARES = {"greedy": 2.0, "sampled": 1.0, "given": 0.7}


@dataclass(frozen=True)
class TrainerConfig:
    """How a draft is trained.

    Args:
        schedule: of the learning rates; it also ends the training.
        rates: peak learning rates of Muon and of AdamW.
        batch_tokens: of a step, about.
        seed: of the order.
        device: where the draft is.
    """

    schedule: Schedule
    rates: tuple[float, float]
    batch_tokens: int
    seed: int
    device: torch.device


@dataclass
class TrainingResult:
    """What came of it.

    Args:
        steps: that were taken, those of earlier runs among them.
        seconds: likewise.
        loss: mean of the first steps, and of the last ones, of texts of one kind; nats.
        parts: by depth, of the last report.
        agreements: likewise, the share of places at which draft and target agree.
    """

    steps: int = 0
    seconds: float = 0.0
    loss: tuple[float, float] | None = None
    parts: tuple[float, ...] = ()
    agreements: tuple[float, ...] = ()


class Checkpoint:
    """What a run that goes on needs, in one file.

    Args:
        path: of it.
        settings: what has to be the same in both runs, in words.
    """

    every_s = 120.0

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self._settings = path, settings

    def save(self, state: dict[str, Any]) -> None:
        """Replace the file as a whole."""
        partial = self.path.with_suffix(".part")
        torch.save({"settings": self._settings, **state}, partial)
        partial.replace(self.path)

    def load(self) -> dict[str, Any] | None:
        """What was saved last, or None.

        Raises:
            ConfigError: it is of a run with other settings.
        """
        if not self.path.is_file():
            return None
        state = torch.load(self.path, map_location="cpu", weights_only=True)
        for name, value in self._settings.items():
            if (before := state["settings"].get(name)) != value:
                raise ConfigError(
                    f"{name} {value}, and {before} in {self.path}",
                    "a run that goes on with what it began with",
                    "pass that, or another --output without --resume",
                )
        return state


def train(
    draft: nn.Module,
    losses: Losses,
    store: TextStore,
    config: TrainerConfig,
    checkpoint: Checkpoint | None = None,
    advance: Advance = ignore,
) -> TrainingResult:
    """Teach a draft, in place.

    Args:
        draft: in float32.
        losses: of some rows.
        store: texts by kind.
        config: see there.
        checkpoint: is read first, and written now and then and at the end.
        advance: told how far it is, in seconds or in steps.
    Raises:
        ConfigError: see `Checkpoint`.
    """
    optimizer = Optimizer(draft, *config.rates)
    generator = torch.Generator().manual_seed(config.seed)
    kinds, schedule, result = store.kinds(), config.schedule, TrainingResult()
    lengths = {kind: store.mean_length(kind) for kind in kinds}
    odds = torch.tensor([_SHARES.get(kind, 1.0) * store.num_tokens(kind) for kind in kinds])
    first: list[float] = []
    if checkpoint is not None and (state := checkpoint.load()) is not None:
        draft.load_state_dict(state["draft"])
        optimizer.load_state_dict(state["optimizer"])
        generator.set_state(state["generator"])
        schedule.begin_before(state["seconds"])
        result.steps, first = state["steps"], state["first"]
    # of the kind that is drawn most, so that figures can be compared
    told_kind = kinds[int(odds.argmax())]
    recent: list[float] = []

    def keep() -> None:
        result.seconds = schedule.elapsed()
        if checkpoint is not None:
            own: dict[str, Any] = {"draft": draft.state_dict(), "optimizer": optimizer.state_dict()}
            own |= {"generator": generator.get_state(), "seconds": result.seconds}
            checkpoint.save(own | {"steps": result.steps, "first": first})

    kept = time.monotonic()
    while schedule.progress(result.steps) < 1.0:
        kind = kinds[int(torch.multinomial(odds, 1, generator=generator))]
        count = max(1, round(config.batch_tokens / lengths[kind]))
        rows = store.draw(kind, count, generator).to(config.device)
        loss, parts, agreements = losses(rows, generator)
        loss.backward()
        optimizer.step(max(0.0, schedule.scale(result.steps)))
        result.steps += 1
        if kind == told_kind:
            value = float(parts.mean())
            recent = [*recent, value][-_REPORT_EVERY:]
            first += [value] if len(first) < _REPORT_EVERY else []
            result.parts = tuple(round(x, 4) for x in parts.tolist())
            result.agreements = tuple(round(x, 4) for x in agreements.tolist())
        mean = sum(recent) / max(1, len(recent))
        what = f"step {result.steps}, loss {mean:.3f}"
        _tell(schedule, result.steps, advance, what)
        if time.monotonic() > kept + Checkpoint.every_s:
            keep()
            kept = time.monotonic()
    if first and recent:
        begin = sum(first) / len(first)
        result.loss = round(begin, 4), round(sum(recent) / len(recent), 4)
    keep()
    return result


def _tell(schedule: Schedule, step: int, advance: Advance, what: str) -> None:
    elapsed, seconds = round(schedule.elapsed()), round(schedule.seconds)
    if schedule.progress(step) > step / schedule.steps:
        advance(min(elapsed, seconds), seconds, what)
    else:
        advance(step, schedule.steps, what)
