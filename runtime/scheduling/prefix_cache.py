"""Prefixes that earlier requests left in the cache: found block by block, by a hash of all tokens.

The key of a block is the hash of the key before it and of its own tokens, so equal keys mean
equal tokens from the first one on. A block is published once its rows cannot change: the target has
committed past its end; rows after that belong to trees. Which drafts have committed past it, too,
is noted block by block: plans without a draft then still share the target's rows, and a draft that
finds the rows of others but not its own writes those, which nobody reads before they are noted.

Rows of a target that runs with an adapter are other ones: the adapter stands before the first key.
So does the salt of a request that has one: its blocks are found by requests of the same salt alone.

The last row of a head in a block (see `docs/guide/heads.md`) is made of the first token after the
block, too. Where there are heads that token belongs to the key: it is known as soon as the rows are
committed, but for a request that ends there, whose last block nobody finds.

Where layers keep states, rows are of use as far as the states after them are there, too: a prefix
ends where a checkpoint is. Checkpoints are made of prompts, at multiples of a grid; passes over
prompts are cut there, so where they are depends on tokens alone.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Iterator
from typing import NamedTuple

from specc.runtime.scheduling.block_pool import BlockPool
from specc.runtime.scheduling.request import Request
from specc.runtime.scheduling.state_slabs import StateSlabs


class Hit(NamedTuple):
    """Blocks that hold the first rows of a request.

    Args:
        blocks: in order.
        num_rows: of the target.
        draft_lens: rows of each draft.
        checkpoint: place of the states after these rows; None where no layer keeps any, or there
            are no rows.
    """

    blocks: list[int]
    num_rows: int
    draft_lens: list[int]
    checkpoint: int | None = None


class PrefixCache:
    """Finds and publishes the blocks of one cache.

    Args:
        rows_per_block: of the cache.
        has_heads: drafts with rows of their own read the target's hidden states.
        states: of the cache, where layers keep some.
    """

    def __init__(
        self,
        pool: BlockPool,
        rows_per_block: int,
        has_heads: bool = False,
        states: StateSlabs | None = None,
    ) -> None:
        self._pool = pool
        self._num_after = int(has_heads)
        self._size = rows_per_block
        self._states = states

    def find(self, request: Request) -> Hit:
        """The longest prefix that is there; at least one token is left to be fed."""
        num_drafts = len(request.draft_lens)
        # a prompt's last row yields the first token, so it has to be computed
        most = request.prefill_end - (0 if request.has_output else 1)
        blocks: list[int] = []
        draft_lens = [0] * num_drafts
        for i in range(most // self._size):
            block = self._pool.find(self._key(request, i))
            if block is None:
                break
            blocks.append(block)
            bits = self._pool.drafts_of(block)
            for draft in range(num_drafts):
                if bits >> draft & 1 and draft_lens[draft] == i * self._size:
                    draft_lens[draft] += self._size
        if self._states is not None:
            return self._with_states(request, blocks, draft_lens, self._states)
        return Hit(blocks, len(blocks) * self._size, draft_lens)

    def _with_states(
        self, request: Request, blocks: list[int], draft_lens: list[int], states: StateSlabs
    ) -> Hit:
        """The longest part of a prefix after which states are there."""
        for rows, place in self._kept(request, len(blocks) * self._size, states):
            lens = [min(length, rows) for length in draft_lens]
            return Hit(blocks[: rows // self._size], rows, lens, place)
        return Hit([], 0, [0] * len(draft_lens))

    def states_of_draft(
        self, request: Request, num_rows: int, filled: Collection[int]
    ) -> tuple[int, int] | None:
        """Rows of a prefix after which a draft's states are there, and the place of these.

        Args:
            request: that begins with the prefix.
            num_rows: of it at most.
            filled: checkpoints that hold states of the draft.
        """
        assert self._states is not None, "it has checkpoints"
        kept = self._kept(request, num_rows, self._states)
        return next((item for item in kept if item[1] in filled), None)

    def _kept(
        self, request: Request, num_rows: int, states: StateSlabs
    ) -> Iterator[tuple[int, int]]:
        """Rows of prefixes after which states are there, the longest first, and their places."""
        grid = states.sizes.grid
        for rows in range(num_rows // grid * grid, 0, -grid):
            place = states.checkpoints.find(self._key(request, rows // self._size - 1))
            if place is not None:
                yield rows, place

    def key_of(self, request: Request, num_rows: int) -> bytes | None:
        """The key of the block that ends a prefix; None while not all of its tokens are known."""
        if num_rows + self._num_after > len(request.token_ids):
            return None
        return self._key(request, num_rows // self._size - 1)

    def publish(self, request: Request) -> None:
        """Let others find what a request has committed since the last call."""
        size, blocks = self._size, request.blocks
        for i in range(request.num_published, request.cache_len // size):
            self._pool.publish(blocks[i], self._key(request, i))
        request.num_published = max(request.num_published, request.cache_len // size)
        for draft, length in enumerate(request.draft_lens):
            done = min(length // size, request.num_published)
            for i in range(request.num_published_of[draft], done):
                if self._pool.find(self._key(request, i)) == blocks[i]:
                    self._pool.add_draft(blocks[i], draft)
            request.num_published_of[draft] = max(request.num_published_of[draft], done)

    def _key(self, request: Request, index: int) -> bytes:
        keys = request.block_keys
        while len(keys) <= index:
            start = len(keys) * self._size
            end = start + self._size + self._num_after
            tokens = array("q", request.token_ids[start:end]).tobytes()
            before = keys[-1] if keys else _before_all(request)
            keys.append(hashlib.blake2b(before + tokens, digest_size=16).digest())
        return keys[index]


def _before_all(request: Request) -> bytes:
    """What the first key of a request is made of besides tokens."""
    adapter = request.adapter
    # of different lengths, so no part is taken for another one, or for tokens
    salt = b"" if request.salt is None else request.salt.key
    return salt + (b"" if adapter is None or adapter < 0 else array("q", [adapter]).tobytes())
