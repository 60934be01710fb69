"""Which states of prefixes are kept for later requests, and which one gives way to a new one."""

from __future__ import annotations

from collections import OrderedDict


class StateCheckpoints:
    """Places of a slab that hold the states after a prefix, found by the key of its last block.

    A place is free, reserved for a pass that is to fill it, or found by its key. Where none is
    free, the one that nobody has looked for the longest gives way. Others need not be there for a
    checkpoint to be of use, unlike blocks, so the order is that of use alone.

    Args:
        count: places.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count))
        self._place_of: OrderedDict[bytes, int] = OrderedDict()
        self._key_of: dict[int, bytes] = {}
        # that somebody has gone on from
        self._used: set[bytes] = set()

    def find(self, key: bytes) -> int | None:
        """The place that holds the states after this prefix."""
        return self._place_of.get(key)

    def use(self, place: int) -> None:
        """Somebody goes on from it, or would have kept it, too: it is the last to give way."""
        key = self._key_of[place]
        self._place_of.move_to_end(key)
        self._used.add(key)

    def reserve(self) -> int | None:
        """A place that a pass may fill; None where all are reserved."""
        if not self._free:
            if not self._place_of:
                return None
            self._forget(next(iter(self._place_of)))
        return self._free.pop()

    def publish(self, place: int, key: bytes) -> None:
        """Let others find a reserved place, now that it is filled; the first of a key stays."""
        if (known := self._place_of.get(key)) is not None:
            self.use(known)
            self.give_back(place)
        else:
            self._place_of[key] = place
            self._key_of[place] = key

    def supersede(self, key: bytes) -> None:
        """The same request has left a later one, which is worth more, if nobody else used this."""
        if key in self._place_of and key not in self._used:
            self._forget(key)

    def give_back(self, place: int) -> None:
        """A reserved place is not of use: no pass has filled it, or nobody could find it."""
        self._free.append(place)

    def forget_all(self) -> None:
        """Nothing is found any more; what is reserved stays so."""
        for key in list(self._place_of):
            self._forget(key)

    def _forget(self, key: bytes) -> None:
        place = self._place_of.pop(key)
        del self._key_of[place]
        self._used.discard(key)
        self._free.append(place)
