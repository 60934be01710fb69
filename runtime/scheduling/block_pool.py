"""Blocks of a paged cache: which are in use, and which prefixes the free ones still hold."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    """Block ids 0 … num_blocks - 1, counted by user; content may outlive its users.

    A block is free while nobody uses it. Some free blocks hold rows under a key: they are handed
    out last, the one unused for longest first, and can be taken back by their key until then.
    Among the others the lowest id goes first, so that the sequences of a dense cache lie side by
    side, which padded programs can use.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))
        self._users: dict[int, int] = {}
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        # drafts whose rows a block with a key holds, as bits
        self._drafts: dict[int, int] = {}
        # free blocks with a key, in the order in which they became free
        self._kept: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._kept)

    @property
    def num_cached(self) -> int:
        """Free blocks that hold rows for later requests."""
        return len(self._kept)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks; the caller has looked at `num_free`."""
        if count > self.num_free:
            raise RuntimeError(f"{count} blocks asked for, {self.num_free} free")
        blocks = []
        for _ in range(count):
            if self._free:
                block = heapq.heappop(self._free)
            else:
                block, _ = self._kept.popitem(last=False)
                self._forget(block)
            self._users[block] = 1
            blocks.append(block)
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back; one that is free already, or not of this pool, is specc's own bug.

        Of those with a key, the last ones are the first to be handed out again: a prefix is worth
        nothing without what precedes it.
        """
        for block in reversed(blocks):
            users = self._users.get(block, 0)
            if users == 0:
                raise RuntimeError(f"block {block} freed but not in use")
            if users > 1:
                self._users[block] = users - 1
                continue
            del self._users[block]
            if block in self._key_of:
                self._kept[block] = None
            else:
                heapq.heappush(self._free, block)

    def find(self, key: bytes) -> int | None:
        """The block that holds the rows of this key."""
        return self._block_of.get(key)

    def is_used(self, block: int) -> bool:
        return block in self._users

    def has_key(self, block: int) -> bool:
        """Others find it, or share it: its rows do not change."""
        return block in self._key_of

    def share(self, block: int) -> None:
        """Use a block with a key, besides those that use it."""
        assert block in self._key_of, "other blocks change"
        self._kept.pop(block, None)
        self._users[block] = self._users.get(block, 0) + 1

    def publish(self, block: int, key: bytes) -> bool:
        """Let others find a block whose rows will not change any more.

        Returns:
            False where another block has this key, which then goes on to be the one found.
        """
        if self._block_of.setdefault(key, block) != block:
            return False
        self._key_of[block] = key
        self._drafts.setdefault(block, 0)
        return True

    def drafts_of(self, block: int) -> int:
        """Drafts whose rows a block with a key holds, as bits."""
        return self._drafts[block]

    def add_draft(self, block: int, draft: int) -> None:
        """A draft has committed all rows of a block with a key."""
        self._drafts[block] |= 1 << draft

    def forget_draft(self, draft: int) -> None:
        """Nobody finds rows of a draft any more, whatever else blocks hold."""
        for block in self._drafts:
            self._drafts[block] &= ~(1 << draft)

    def forget_all(self) -> None:
        """Nothing is found any more; blocks in use stay so."""
        for block in self._kept:
            heapq.heappush(self._free, block)
        self._kept.clear()
        for table in (self._block_of, self._key_of, self._drafts):
            table.clear()

    def _forget(self, block: int) -> None:
        del self._block_of[self._key_of.pop(block)], self._drafts[block]
