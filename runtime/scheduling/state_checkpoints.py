"""Which states of prefixes are kept for later requests, and which one gives way to a new one."""

from __future__ import annotations

from collections import OrderedDict

from specc.artifact.state_entry import kept_states


class StateCheckpoints:
    """Places of a slab that hold the states after a prefix, found by the key of its last block.

    A place is free, reserved for a pass that may fill it, or found by its key. Of more than `count`
    that are found one gives way: first those that the same request has left behind for a later
    one, and nobody else has used, the last of them first, since others have the begin of a prompt
    in common; then the one that nobody has used for longest. A checkpoint is of use without others
    before it, unlike blocks.

    Args:
        count: that are found, at most.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(kept_states(count)))
        # the first gives way next
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

    def publish(self, place: int, key: bytes, before: bytes | None = None) -> None:
        """Let others find a reserved place, now that it is filled; the first of a key stays.

        Args:
            place: reserved.
            before: that of a shorter one, which the same request has left.
        """
        if (known := self._place_of.get(key)) is not None:
            self.use(known)
            self.give_back(place)
        else:
            self._place_of[key] = place
            self._key_of[place] = key
        if before is not None and before in self._place_of and before not in self._used:
            self._place_of.move_to_end(before, last=False)
        if len(self._place_of) > self.count:
            self._forget(next(iter(self._place_of)))

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
