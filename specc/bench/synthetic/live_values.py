"""Memory of what operators make: the most bytes that are alive at once."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor

# of CUDA's allocator, in bytes: what it hands out is a multiple of this
_BLOCK = 512


class LiveValues:
    """Follows tensors from the operator that makes them until nobody has them any more.

    `most` is the largest sum so far, of memory that was allocated while this looked on. A graph
    that is captured needs as much in its pool, but for what its pool cannot fit together.
    """

    def __init__(self) -> None:
        self.most = 0
        self._total = 0
        # storage → its bytes, and tensors that show it
        self._sizes: dict[int, int] = {}
        self._counts: dict[int, int] = {}

    def note(self, given: Iterable[Tensor], made: Iterable[Tensor]) -> None:
        """An operator has run.

        Args:
            given: to it; memory of theirs that is not known was there before.
            made: its results, views and what it was given among them.
        """
        before = {_storage(tensor) for tensor in given}
        for tensor in made:
            key = _storage(tensor)
            if key not in self._counts:
                if key in before:
                    continue
                size = -(-tensor.untyped_storage().nbytes() // _BLOCK) * _BLOCK
                self._sizes[key], self._counts[key] = size, 0
                self._total += size
                self.most = max(self.most, self._total)
            self._counts[key] += 1
            weakref.finalize(tensor, self._gone, key).atexit = False

    def _gone(self, key: int) -> None:
        self._counts[key] -= 1
        if not self._counts[key]:
            del self._counts[key]
            self._total -= self._sizes.pop(key)


def _storage(value: Tensor) -> int:
    return value.untyped_storage()._cdata
