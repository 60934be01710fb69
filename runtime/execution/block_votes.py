"""Which tokens of a pass vote on the blocks that self-drafts see, and what came of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specc.kernels.operators.block_mass import MOST_VOTERS
from specc.runtime.execution.link import Fetched, Link
from specc.runtime.scheduling.batch import Batch, Span, StepGroup, Vote
from specc.runtime.scheduling.kv_cache import NOBODY, KVCache
from specc.runtime.scheduling.request import Request


class Voters(NamedTuple):
    """Sequences of a pass that vote.

    Args:
        rows: of the pass.
        counts: queries of each that vote.
        lengths: committed rows of each, once the votes are there.
    """

    rows: list[int]
    requests: list[Request]
    counts: list[int]
    lengths: list[int]


class PendingVotes(NamedTuple):
    """Votes on their way to the host."""

    voters: Voters
    fetched: Fetched

    def result(self) -> list[Vote]:
        """Waits for the device."""
        (found,) = self.fetched.wait()
        items = zip(
            self.voters.requests, found, self.voters.counts, self.voters.lengths, strict=True
        )
        return [Vote(*item) for item in items]


def read_votes(pending: Iterable[PendingVotes]) -> list[Vote]:
    """Waits for all of them."""
    return [vote for votes in pending for vote in votes.result()]


class BlockVotes:
    """Asks passes of one engine for votes.

    The last queries of a prompt vote, and from time to time the nodes of a step (`BlockChoice`).
    What a step adds to is the cache's `block_mass`, which its graph knows, by row of the batch;
    other passes have a tensor of their own.

    Args:
        cache: of the engine; without `block_mass` nobody ever votes.
    """

    def __init__(self, cache: KVCache, link: Link) -> None:
        self._cache = cache
        self._link = link

    def of_spans(self, spans: Sequence[Span]) -> Voters:
        """Spans with which prefill ends: the next pass over their requests is a step."""
        if self._cache.block_mass is None:
            return Voters([], [], [], [])
        rows = [i for i, span in enumerate(spans) if span.end == span.request.prefill_end]
        own = [spans[i] for i in rows]
        counts = [min(MOST_VOTERS, span.end - span.start) for span in own]
        return Voters(rows, [span.request for span in own], counts, [span.end for span in own])

    def of_step(self, group: StepGroup, first: int = 0) -> Voters:
        """Requests whose votes are due.

        Args:
            first: row of the pass that its first request has.
        """
        if self._cache.block_mass is None or not group.plan.chooses_blocks:
            return Voters([], [], [], [])
        views, requests = group.plan.views, group.requests
        places = [i for i, s in enumerate(requests) if s.block_choice.is_due(s.cache_len, views)]
        own = [requests[i] for i in places]
        live = group.live or [group.plan.num_nodes] * len(requests)
        counts = [min(MOST_VOTERS, live[i]) for i in places]
        lengths = [request.cache_len for request in own]
        return Voters([first + i for i in places], own, counts, lengths)

    def of_batch(self, batch: Batch) -> tuple[Voters, int]:
        """Voters of a pass over all of a batch, spans first; and how many sequences it has."""
        found, num_rows = [self.of_spans(batch.prefill)], len(batch.prefill)
        for group in batch.groups:
            found.append(self.of_step(group, num_rows))
            num_rows += len(group.requests)
        columns = zip(*found, strict=True)
        return Voters(*(list(itertools.chain(*column)) for column in columns)), num_rows

    # most passes have no voters, and entering a mode costs a step more than all else here

    def mass(self, voters: Voters, batch: int) -> Tensor | None:
        """What a pass of its own over `batch` sequences adds to; None: nobody votes."""
        if not voters.rows:
            return None
        with torch.inference_mode():
            made = torch.full((batch, self._cache.shape.blocks_per_sequence), NOBODY)
            made[voters.rows] = 0.0
            with self._link.active():
                return self._link.send([made])[0]

    def fetch(self, voters: Voters, mass: Tensor | None) -> list[PendingVotes]:
        """Bring what a pass added to such a tensor to the host."""
        if mass is None:
            return []
        with torch.inference_mode(), self._link.active():
            return [PendingVotes(voters, self._link.fetch([mass[voters.rows]]))]

    def begin(self, voters: Voters) -> None:
        """Let the step that is queued next add to these rows."""
        if voters.rows:
            assert self._cache.block_mass is not None
            with torch.inference_mode(), self._link.active():
                self._cache.block_mass[voters.rows] = 0.0

    def end(self, voters: Voters) -> list[PendingVotes]:
        """Bring what it added to the host; nobody votes in the step after it."""
        mass = self._cache.block_mass
        if not voters.rows:
            return []
        found = self.fetch(voters, mass)
        assert mass is not None
        with torch.inference_mode(), self._link.active():
            mass[voters.rows] = NOBODY
        return found
