"""Captured steps that were queued: as a whole, or up to where the host has a part in them.

That is where it brings their masks, or reads how much of what was drafted is verified.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from specc.runtime.backends.captured.step_buffers import HostResults, StepBuffers
from specc.runtime.backends.captured.step_scores import ScoredResults, StepKind
from specc.runtime.backends.step_io import StepResult


class ReplayedStep(Protocol):
    """What a queued step asks of the captured one that it is of."""

    kind: StepKind | None

    def is_newest(self, results: HostResults) -> bool:
        """No other step has been queued since."""
        ...

    def is_replayed(self, batch: int, kind: StepKind | None = None) -> bool:
        """A step of this many requests, which does this besides, runs as one graph."""
        ...

    def to_result(self, values: Tensor, seconds: float) -> StepResult:
        """Host results [B, 2 + P + drafts] as lists."""
        ...

    def seconds_since(self, begin_s: float) -> float:
        """Seconds up to now, or since the host saw the last step end where that is less."""
        ...


class PendingReplay(NamedTuple):
    """A captured step all of which was queued."""

    step: ReplayedStep
    batch: int
    begin_s: float
    results: HostResults
    # row of each request; None is their order
    places: Sequence[int] | None = None
    # see `StepResult`
    live: tuple[int, ...] = ()

    @property
    def can_go_on(self) -> bool:
        """Whether `submit_next` is the step after this one: queued without a word of the host.

        Not with a hook, which reads what the device has made, nor where another step was queued
        meanwhile: the device goes on from that one.
        """
        count = rows_of(self.batch, self.places)
        is_newest = self.step.is_newest(self.results)
        return is_newest and self.step.is_replayed(count, self.step.kind)

    def since(self, begin_s: float) -> PendingReplay:
        """The same, with seconds counted from here on."""
        return self._replace(begin_s=begin_s)

    def complete(self) -> PendingReplay:
        """See `HalfReplay.complete`: all of it is queued."""
        return self

    def result(self) -> StepResult:
        """Once; the seconds are those since the step before it ended, or it was queued."""
        values = self.results.wait()
        own = slice(self.batch) if self.places is None else list(self.places)
        found = self.step.to_result(values[own], self.step.seconds_since(self.begin_s))
        if isinstance(self.results, ScoredResults):
            found = found._replace(values={"scores": self.results.scores[own]})
        return found._replace(live=self.live)


class HalfReplay:
    """A step of which only the beginning was queued.

    That is all up to its verification, or to the first pass of a draft that obeys a grammar; where
    drafters say how much is verified, all of the draft alone. There are two reasons, and a step may
    have both: masks of the rest follow from tokens that the step before it brings, and from its own
    draft; and which graph verifies follows from what its drafter is sure of. So the device drafts
    and verifies, or computes that pass, while the host reads the results before. Until the rest is
    queued, its inputs, and what it has left in memory that graphs share, must stay: a step that is
    queued or captured in between takes its place, and it has to be queued anew.

    Args:
        buffers: inputs of the engine's steps.
        begin_s: when it was queued.
        finish: queue the rest; given `begin_s`.
        places: row of each request; None is their order.
    """

    # what would follow is the step before it, once more
    can_go_on = False

    def __init__(
        self,
        buffers: StepBuffers,
        begin_s: float,
        finish: Callable[[float], PendingReplay],
        places: Sequence[int] | None,
    ) -> None:
        self.places = places
        self._buffers = buffers
        self._begin_s = begin_s
        self._finish = finish
        buffers.half = self

    def since(self, begin_s: float) -> HalfReplay:
        """See `PendingReplay.since`."""
        self._begin_s = begin_s
        return self

    def complete(self) -> PendingReplay | None:
        """Queue what is left of it; to be called when the step before it is committed.

        Returns:
            the whole step; None where another step was queued meanwhile, and it has to be submitted
            again.
        """
        if self._buffers.half is not self:
            return None
        self._buffers.half = None
        return self._finish(self._begin_s)

    def result(self) -> StepResult:
        """Not before `complete`."""
        raise AssertionError("a step of which the rest was not queued")


PendingStep = PendingReplay | HalfReplay


def rows_of(batch: int, places: Sequence[int] | None) -> int:
    """Rows that hold a batch: up to the last that a request has."""
    return batch if places is None else max(places, default=0) + 1
