"""Requests in the order in which they are served."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from specc.runtime.scheduling.request import Request

# a request is served as if it had arrived so many seconds later for each level of its priority:
# however many urgent requests follow it, those that come later than that are after it
_S_PER_LEVEL = 10.0


def turn_of(request: Request) -> float:
    """When a request's turn is, in seconds of its clock; fixed from its arrival on.

    A total order that time does not change: the first of all can only be served and leave,
    so none waits for ever, and none that gives up blocks for another takes them back from it.
    """
    return request.arrival_s + request.priority * _S_PER_LEVEL


class RequestQueue:
    """Requests that wait, the next one first; equal turns in order of arrival here."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __contains__(self, request: object) -> bool:
        return any(other is request for other in self._requests)

    @property
    def first(self) -> Request:
        return self._requests[0]

    def add(self, request: Request) -> None:
        bisect.insort(self._requests, request, key=turn_of)

    def add_again(self, request: Request) -> None:
        """A request that was served before goes ahead of those with the same turn."""
        index = bisect.bisect_left(self._requests, turn_of(request), key=turn_of)
        self._requests.insert(index, request)

    def pop(self) -> Request:
        return self._requests.pop(0)

    def remove(self, request: Request) -> None:
        del self._requests[next(i for i, s in enumerate(self._requests) if s is request)]
