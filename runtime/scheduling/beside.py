"""Batches of disjoint requests in flight: what those that are there leave to the next one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specc.runtime.scheduling.batch import Batch
from specc.runtime.scheduling.request import Request
from specc.runtime.scheduling.request_queue import turn_of


class Beside:
    """Requests that have a part in a batch in flight, and which of the others are next.

    Nothing of a request is known to be its own while it is in flight: its blocks are read and
    written, so they are neither trimmed nor taken away, and it is in no second batch.

    Args:
        queued: batches whose results nobody has seen, of disjoint requests.
        most: batches that are in flight together.
    """

    def __init__(self, queued: Iterable[Batch] = (), most: int = 1) -> None:
        self._busy = {id(request) for batch in queued for request in batch.requests}
        self._most = most

    def __bool__(self) -> bool:
        """Whether anything is in flight."""
        return bool(self._busy)

    def is_busy(self, request: Request) -> bool:
        """Whether it has a part in a batch in flight."""
        return id(request) in self._busy

    def idle(self, running: Sequence[Request]) -> list[Request]:
        """Requests without a part in what is in flight."""
        return [request for request in running if not self.is_busy(request)]

    def share(self, running: Sequence[Request]) -> list[Request]:
        """Requests of the next batch: an equal part of all, those whose turn is first.

        Nobody is left out for long: where as many batches are in flight as can be, all are.
        """
        if self._most == 1 and not self._busy:
            return list(running)
        idle, count = self.idle(running), -(-len(running) // self._most)
        if len(idle) <= count:
            return idle
        chosen = {id(request) for request in sorted(idle, key=turn_of)[:count]}
        return [request for request in idle if id(request) in chosen]

    def gives_way(self, request: Request, running: Sequence[Request]) -> Request | None:
        """The idle request that gives its blocks up for another one: the last.

        None where that is the request itself, and somebody after it is in flight, whose blocks
        can be had soon: it waits.
        """
        last = max(reversed(self.idle(running)), key=turn_of)
        if last is not request:
            return last
        after = (turn_of(other) > turn_of(request) for other in running if self.is_busy(other))
        return None if any(after) else request


# nothing is in flight
ALONE = Beside()
