"""Responses that later requests go on with: bounded in number and bytes, and each caller's own."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from dataclasses import dataclass

from starlette.requests import Request

# of an entry beside its texts: keys, ids, and the dicts' own
_OVERHEAD_BYTES = 1024


def caller_of(request: Request) -> bytes:
    """Who asks: a digest of the key that the request shows, whether the server needs one or not."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    is_bearer = scheme.lower() == "bearer"
    shown = key.strip() if is_bearer else request.headers.get("x-api-key", "").strip()
    return hashlib.sha256(shown.encode("utf-8", "replace")).digest()


@dataclass(frozen=True)
class Kept:
    """A response as it is kept.

    Args:
        response: its JSON.
        items: JSON of what its request has added to the conversation.
        previous: the response that it went on with.
    """

    response: bytes
    items: bytes
    previous: str | None

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.items) + _OVERHEAD_BYTES


class ResponseStore:
    """In memory; for any thread.

    Where there is too much, the one that was not used for the longest time goes, of the caller who
    takes most: nobody can push out what others have.

    Args:
        max_responses: of all callers together.
        max_bytes: likewise.
    """

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        # caller → its responses by their ids, the one that was used last at the end
        self._of: dict[bytes, OrderedDict[str, Kept]] = {}
        self._bytes_of: dict[bytes, int] = {}
        self._num_responses = 0

    @property
    def num_responses(self) -> int:
        return self._num_responses

    @property
    def num_bytes(self) -> int:
        return sum(self._bytes_of.values())

    def put(self, caller: bytes, response_id: str, kept: Kept) -> bool:
        """Keep a response; returns whether there is room for it."""
        if not self.has_room(kept.num_bytes):
            return False
        with self._lock:
            self._remove(caller, response_id)
            self._of.setdefault(caller, OrderedDict())[response_id] = kept
            self._bytes_of[caller] = self._bytes_of.get(caller, 0) + kept.num_bytes
            self._num_responses += 1
            while self._num_responses > self._max_responses or self.num_bytes > self._max_bytes:
                self._evict(response_id)
            return response_id in self._of.get(caller, {})

    def has_room(self, num_bytes: int = 0) -> bool:
        """Whether a response of so many bytes can be kept."""
        return self._max_responses > 0 and num_bytes <= self._max_bytes

    def get(self, caller: bytes, response_id: str) -> Kept | None:
        """A response of this caller, which counts as used."""
        with self._lock:
            own = self._of.get(caller)
            if own is None or response_id not in own:
                return None
            own.move_to_end(response_id)
            return own[response_id]

    def delete(self, caller: bytes, response_id: str) -> bool:
        """Forget a response; returns whether there was one."""
        with self._lock:
            return self._remove(caller, response_id)

    def chain(self, caller: bytes, response_id: str) -> list[Kept] | None:
        """A response and all that it goes back to, the first one first; None where one is gone."""
        found: list[Kept] = []
        next_id: str | None = response_id
        while next_id is not None:
            kept = self.get(caller, next_id)
            if kept is None:
                return None
            found.append(kept)
            next_id = kept.previous
        return found[::-1]

    def _evict(self, newest: str) -> None:
        largest = max(self._bytes_of, key=lambda caller: self._bytes_of[caller])
        own = self._of[largest]
        # what has just come stays, if it is not alone
        oldest = next((one for one in own if one != newest), newest)
        self._remove(largest, oldest)

    def _remove(self, caller: bytes, response_id: str) -> bool:
        own = self._of.get(caller)
        kept = own.pop(response_id, None) if own is not None else None
        if own is None or kept is None:
            return False
        self._num_responses -= 1
        self._bytes_of[caller] -= kept.num_bytes
        if not own:
            del self._of[caller], self._bytes_of[caller]
        return True
