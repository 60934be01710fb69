"""Which blocks a sequence has: given at its admission, more as it grows, taken back at its end."""

from __future__ import annotations

from collections.abc import Sequence as Sequence_

from specc.errors import RequestError
from specc.runtime.scheduling.kv_cache import KVCache
from specc.runtime.scheduling.prefix_cache import Hit, PrefixCache
from specc.runtime.scheduling.sequence import Sequence
from specc.speculation.plans import SpecPlan


class SequenceBlocks:
    """Hands out the blocks of one cache.

    Args:
        cache: whose blocks.
        shares_prefixes: look for the rows of a prompt among those of earlier requests. Not where a
            block is a whole sequence.
    """

    def __init__(self, cache: KVCache, shares_prefixes: bool = True) -> None:
        self._pool = cache.allocator
        self._shape = cache.shape
        is_paged = bool(cache.shape.block_size) and cache.rows is None
        self._size = cache.shape.rows_per_block
        self._shares_prefixes = shares_prefixes and is_paged
        self._prefixes = PrefixCache(self._pool, self._size)

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    def check_fits(self, sequence: Sequence) -> None:
        """Raises RequestError: it needs more blocks at its end than the cache has."""
        needed, available = self._most_for(sequence), self._pool.num_blocks
        if needed > available:
            raise RequestError(
                f"request {sequence.request_id} needs {needed} KV cache blocks",
                f"at most {available}",
                "lower max_tokens, or shorten the prompt; or give the cache more blocks",
            )

    def admit(self, sequence: Sequence, running: Sequence_[Sequence]) -> bool:
        """Give a sequence the blocks of its prompt and of a first plain step, if they are free.

        A block stays free for every sequence that runs and may still grow, else the next steps
        would take away what was given.
        """
        hit = self._find(sequence)
        if not self._is_free(sequence, hit, running):
            return False
        for block in hit.blocks:
            self._pool.share(block)
        needed = self._blocks_of(sequence.prefill_end + 2) - len(hit.blocks)
        sequence.admit([*hit.blocks, *self._pool.allocate(needed)], hit.num_rows, hit.draft_lens)
        sequence.num_published = len(hit.blocks)
        sequence.num_published_of = [length // self._size for length in hit.draft_lens]
        return True

    def can_share(self, sequence: Sequence) -> bool:
        """Whether rows of another request of the same prompt could be of use."""
        is_long = sequence.num_prompt_tokens > self._size
        return self._shares_prefixes and is_long and not sequence.is_scored

    def grow(self, sequence: Sequence, plan: SpecPlan, num_ahead: int = 0) -> bool:
        """Have the blocks of a step of this plan; False, and nothing changed, if they are not free.

        Args:
            sequence: admitted.
            plan: of the step.
            num_ahead: tokens that may have been committed by the time of the step.
        """
        missing = self.missing(sequence, plan, num_ahead)
        if missing > self.num_free:
            return False
        sequence.blocks += self._pool.allocate(max(0, missing))
        return True

    def trim(self, sequence: Sequence, plan: SpecPlan) -> None:
        """Give back what a step of this plan does not need."""
        if (surplus := -self.missing(sequence, plan)) > 0:
            self._pool.free(sequence.blocks[-surplus:])
            del sequence.blocks[-surplus:]
            sequence.num_kept_blocks = min(sequence.num_kept_blocks, len(sequence.blocks))

    def missing(self, sequence: Sequence, plan: SpecPlan, num_ahead: int = 0) -> int:
        """Blocks that a step needs more than the sequence has; negative where it has more."""
        rows = max(sequence.cache_len, sequence.prefill_end) + num_ahead + rows_behind(plan)
        return self._blocks_of(rows) - len(sequence.blocks)

    def holds(self, sequence: Sequence, plan: SpecPlan, cache_len: int) -> bool:
        """Whether the blocks of a sequence are enough for a step of this plan from there on."""
        return cache_len + rows_behind(plan) <= len(sequence.blocks) * self._size

    def publish(self, sequence: Sequence) -> None:
        """Let later requests find what a sequence has committed."""
        if self._shares_prefixes and sequence.blocks:
            self._prefixes.publish(sequence)

    def release(self, blocks: list[int]) -> None:
        self._pool.free(blocks)

    def _is_free(self, sequence: Sequence, hit: Hit, running: Sequence_[Sequence]) -> bool:
        needed = self._blocks_of(sequence.prefill_end + 2) - len(hit.blocks)
        # a sequence that shares a block of no other takes it from the free ones
        needed += sum(not self._pool.is_used(block) for block in hit.blocks)
        growing = sum(len(other.blocks) < self._most_for(other) for other in running)
        return needed + growing <= self.num_free

    def _find(self, sequence: Sequence) -> Hit:
        if not self._shares_prefixes or sequence.is_scored:
            # whose prompt is scored needs the logits of all of it
            return Hit([], 0, [0] * len(sequence.draft_lens))
        return self._prefixes.find(sequence)

    def _blocks_of(self, num_rows: int) -> int:
        return min(-(-num_rows // self._size), self._shape.blocks_per_sequence)

    def _most_for(self, sequence: Sequence) -> int:
        return self._shape.blocks_for(sequence.num_prompt_tokens, sequence.max_tokens)


def rows_behind(plan: SpecPlan) -> int:
    """Rows from the committed ones on that a step reaches.

    These are its nodes, and in the history the root, the accepted tokens and the bonus token.
    """
    return max(plan.num_rows, plan.max_depth + 2)
