"""Groups and links of a rank, where the target has stages.

Ranks of a stage are a group, whose collectives are those of tensor parallelism. A stage hands on
what it has computed, rank by rank, and the first rank of the last stage gives logits or tokens to
rank 0. Each group and link is made by its first rank and opened by the others, which rank 0 tells
how: all offer what they have made, and then meet.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specc.artifact.manifest import Manifest
from specc.errors import RankError
from specc.runtime.ranks.group import SharedGroup
from specc.runtime.ranks.links import Link, StageResults
from specc.runtime.ranks.rank_group import Copies, RankGroup

# in a ticket, and as that of rank 0 in what the others load
HOSTS, STAGED = "hosts", "stages"
# the link over which rank 0 gets logits or tokens
RESULTS = "results"
# what a rank that waits for another stage has been through: all
_WAITS = 1 << 62


def link_name(giver: int, taker: int) -> str:
    """Name of the link between ranks of neighbouring stages."""
    return f"link {giver} to {taker}"


@dataclass(frozen=True)
class StagePlace:
    """Where a rank is among the stages of an engine.

    Args:
        tensor: ranks of each stage, which are neighbours.
        stages: of the engine.
    """

    rank: int
    tensor: int
    stages: int

    @property
    def stage(self) -> int:
        return self.rank // self.tensor

    @property
    def place(self) -> int:
        """Of the rank in its stage."""
        return self.rank % self.tensor

    @property
    def is_last(self) -> bool:
        """Whether its stage is the last one."""
        return self.stage == self.stages - 1

    @property
    def gives_results(self) -> bool:
        """Whether it gives logits or tokens to rank 0."""
        return self.is_last and self.place == 0

    def members(self) -> dict[str, tuple[int, ...]]:
        """Name → ranks of every group and link of the engine; the first of a link sends."""
        tensor, last = self.tensor, self.stages - 1
        found: dict[str, tuple[int, ...]] = {}
        if tensor > 1:
            for stage in range(self.stages):
                found[f"stage {stage}"] = tuple(range(stage * tensor, (stage + 1) * tensor))
        for rank in range(last * tensor):
            found[link_name(rank, rank + tensor)] = (rank, rank + tensor)
        found[RESULTS] = (last * tensor, 0)
        return found

    def own(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Those that this rank is a member of."""
        return ((n, ranks) for n, ranks in self.members().items() if self.rank in ranks)


def place_of(manifest: Manifest, rank: int) -> StagePlace | None:
    """Where a rank of an engine is; None where its target has no stages."""
    if not manifest.stages:
        return None
    return StagePlace(rank, manifest.tensor_parallel_size, len(manifest.stages))


class StageGroups:
    """The groups and links of this process; a `RankGroup` as that of its stage.

    Args:
        local: ranks of this machine.
        time_limit: seconds that ranks wait for each other.
    """

    ticket = STAGED

    def __init__(self, place: StagePlace, local: Collection[int], time_limit: float) -> None:
        self.where = place
        self.rank, self.size = place.place, place.tensor
        self.group: RankGroup = Copies(0, 1)
        self._local = local
        self._time_limit = time_limit
        self._links: dict[str, Link] = {}
        self._made: dict[str, str] = {}
        self._results = StageResults(
            lambda shape, dtype: self._links[RESULTS].receive(shape, dtype)
        )
        self._waits = 0

    def offer(self) -> dict[str, str]:
        """Make what this rank is the first member of; returns name → ticket."""
        for name, ranks in self.where.own():
            if ranks[0] != self.where.rank:
                continue
            if not set(ranks) <= set(self._local):
                self._made[name] = HOSTS
            elif name.startswith("stage"):
                self.group = SharedGroup.create(self.size, self._time_limit)
                self._made[name] = self.group.ticket
            else:
                link = self._links[name] = Link.create(self._time_limit)
                self._made[name] = link.ticket
        return dict(self._made)

    def meet(self, tickets: Mapping[str, str], address: str | None, timeout_s: float) -> None:
        """Open what others have made.

        Args:
            address: of rank 0, where some are between hosts; see `Meeting`.
            timeout_s: to wait for the others there.
        Raises:
            RankError: a rank is gone, or cannot be reached.
        """
        members = self.where.members()
        if missing := members.keys() - tickets.keys():
            raise RankError(
                f"nobody has made {', '.join(sorted(missing))}", "all of them", "report this"
            )
        over = [name for name in members if tickets[name] == HOSTS]
        if over:
            self._meet_hosts({name: members[name] for name in over}, str(address), timeout_s)
        for name, ranks in self.where.own():
            if name in self._made or tickets[name] == HOSTS:
                continue
            if name.startswith("stage"):
                self.group = SharedGroup.open(
                    tickets[name], ranks.index(self.where.rank), self.size
                )
            else:
                self._links[name] = Link.open(tickets[name])

    def _meet_hosts(
        self, members: Mapping[str, tuple[int, ...]], address: str, timeout_s: float
    ) -> None:
        # loaded nowhere else: engines on one host need no network
        from specc.kernels import ranks as native
        from specc.runtime.ranks.sockets import Meeting

        world, own = self.where.tensor * self.where.stages, self.where.rank
        with contextlib.closing(Meeting(address, own, world, timeout_s)) as meeting:
            for number, (name, ranks) in enumerate(members.items(), start=1):
                if own not in ranks:
                    continue
                sockets = meeting.connect(ranks, number)
                if name.startswith("stage"):
                    native.open_sockets(sockets, self.rank, self._time_limit)
                    self.group = SharedGroup(self.rank, self.size, HOSTS, None)
                else:
                    self._links[name] = Link.over(sockets, ranks.index(own), self._time_limit)

    def give_on(self, hidden: Tensor) -> None:
        """To the same rank of the next stage."""
        rank = self.where.rank
        self._wait(lambda: self._links[link_name(rank, rank + self.size)].send(hidden))

    def take(self, shape: tuple[int, ...], dtype: Any) -> Tensor:
        """From the same rank of the stage before."""
        rank = self.where.rank
        link = self._links[link_name(rank - self.size, rank)]
        return self._wait(lambda: link.receive(shape, dtype))

    def give_results(self, found: Tensor) -> None:
        """To rank 0."""
        self._wait(lambda: self._links[RESULTS].send(found))

    def expect_results(self, shape: tuple[int, ...], dtype: Any) -> Future[Tensor]:
        """From the last stage, when they come; of rank 0, in the order of passes."""
        return self._results.expect(shape, dtype)

    def _wait(self, work: Any) -> Any:
        self._waits += 1
        try:
            return work()
        finally:
            self._waits -= 1

    @property
    def position(self) -> int:
        """See `RankGroup.position`; a rank that waits for another stage keeps none waiting."""
        return _WAITS if self._waits else self.group.position

    def gather(self, logits: Tensor) -> Tensor:
        """See `RankGroup.gather`; of the stage."""
        return self.group.gather(logits)

    def best(self, scores: Tensor, tokens: Tensor) -> Tensor:
        """See `RankGroup.best`; of the stage."""
        return self.group.best(scores, tokens)

    def add(self, values: Tensor) -> Tensor:
        """See `RankGroup.add`; of the stage."""
        return self.group.add(values)

    def abort(self, reason: str) -> None:
        """See `RankGroup.abort`; of the stage and all links of this rank."""
        self.group.abort(reason)
        # a thread may be about to open more of them
        for link in list(self._links.values()):
            link.abort(reason)

    def close(self) -> None:
        """Let go of all of them."""
        self.group.close()
        for link in list(self._links.values()):
            link.close()
        self._results.close()
