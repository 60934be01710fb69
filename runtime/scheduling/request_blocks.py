"""Which blocks a request has: given at its admission, more as it grows, taken back at its end.

Where layers keep states, it has a place among them as long as it has blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from specc.errors import ContextLengthError
from specc.runtime.scheduling.batch import Kept, Span, StepGroup
from specc.runtime.scheduling.kv_cache import KVCache
from specc.runtime.scheduling.look_ahead import LookAhead
from specc.runtime.scheduling.prefix_cache import Hit, PrefixCache
from specc.runtime.scheduling.request import Request
from specc.runtime.scheduling.state_slabs import NOWHERE
from specc.speculation.plans import SpecPlan

# tokens that a request may grow by before its step has to come from the host again
_AHEAD = 64


class RequestBlocks:
    """Hands out the blocks of one cache.

    Args:
        cache: whose blocks.
        shares_prefixes: look for the rows of a prompt among those of earlier requests. Not where a
            block is a whole request.
        has_heads: see `PrefixCache`.
    """

    def __init__(
        self, cache: KVCache, shares_prefixes: bool = True, has_heads: bool = False
    ) -> None:
        self._pool = cache.allocator
        self._shape = cache.shape
        is_paged = bool(cache.shape.block_size) and cache.rows is None
        self._size = cache.shape.rows_per_block
        self._states = states = cache.states
        self._places = cache.places
        self._drafts = cache.draft_states
        keeps = states is None or states.sizes.num_checkpoints > 0
        self._shares_prefixes = shares_prefixes and is_paged and keeps
        self._prefixes = PrefixCache(self._pool, self._size, has_heads, states)
        # checkpoints that passes in flight are to fill
        self._reserved: set[int] = set()
        # batches in flight that use the blocks of a request; and those that left meanwhile
        self._held: Counter[Request] = Counter()
        self._left: dict[Request, None] = {}

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def has_states(self) -> bool:
        """Layers keep states, which no pass gives back what it has changed of."""
        return self._places is not None

    @property
    def grid(self) -> int:
        """See `PromptSpans`."""
        return self._states.sizes.grid if self._states and self._shares_prefixes else 0

    def check_fits(self, request: Request) -> None:
        """Raises ContextLengthError: it needs more blocks at its end than the cache has."""
        needed, available = self._most_for(request), self._pool.num_blocks
        if needed > available:
            raise ContextLengthError(
                f"prompt {request.index} needs {needed} KV cache blocks for"
                f" {request.num_prompt_tokens} prompt tokens and {request.max_tokens} of output",
                f"at most {available}",
                "lower max_tokens, or shorten the prompt; or give the cache more blocks",
                available * self._size - self._shape.max_nodes,
            )

    def admit(self, request: Request, running: Sequence[Request]) -> bool:
        """Give a request the blocks of its prompt and of a first plain step, if they are free.

        A block stays free for every request that runs and may still grow, else the next steps
        would take away what was given.
        """
        if self._places is not None and not self._places.has_room:
            return False
        hit = self._find(request)
        kept = self._states_of_drafts(request, hit)
        for draft in self._drafts:
            # rows are of use to a draft as far as its states after them are there, too
            hit.draft_lens[draft] = kept[draft][0] if draft in kept else 0
        if not self._is_free(request, hit, running):
            return False
        for block in hit.blocks:
            self._pool.share(block)
        needed = self._blocks_of(request.prefill_end + 2) - len(hit.blocks)
        request.admit([*hit.blocks, *self._pool.allocate(needed)], hit.num_rows, hit.draft_lens)
        request.num_published = len(hit.blocks)
        request.num_published_of = [length // self._size for length in hit.draft_lens]
        if self._places is not None:
            request.state_place = self._places.take()
            if hit.checkpoint is not None and self._states is not None:
                self._states.restore(hit.checkpoint, request.state_place)
                self._states.checkpoints.use(hit.checkpoint)
            for draft, (_, checkpoint) in kept.items():
                self._drafts[draft].restore(checkpoint, request.state_place)
        return True

    def can_share(self, request: Request) -> bool:
        """Whether rows of another request of the same prompt could be of use."""
        is_long = request.num_prompt_tokens > (self.grid or self._size)
        return self._shares_prefixes and is_long and not request.is_scored

    def grow(self, request: Request, plan: SpecPlan, num_ahead: int = 0) -> bool:
        """Have the blocks of a step of this plan; False, and nothing changed, if they are not free.

        Args:
            request: admitted.
            plan: of the step.
            num_ahead: tokens that may have been committed by the time of the step.
        """
        missing = self.missing(request, plan, num_ahead)
        if missing > self.num_free:
            return False
        request.blocks += self._pool.allocate(max(0, missing))
        return True

    def grow_all(
        self, requests: Iterable[Request], plans: Mapping[int, SpecPlan], ahead: LookAhead
    ) -> bool:
        """Have blocks for everyone's step, wherever those in flight end; False where they run out.

        Args:
            requests: admitted.
            plans: of each one's step, by identity.
            ahead: of steps in flight.
        """
        for request in requests:
            plan, most = plans[id(request)], ahead.most(request)
            if not self.grow(request, plan, most):
                return False
            if not self.holds(request, plan, request.cache_len + most):
                return False
        return True

    def take_ahead(self, requests: Sequence[Request], plans: Mapping[int, SpecPlan]) -> None:
        """Have blocks for several steps, so that tables rarely change.

        Args:
            requests: that step now.
            plans: of those that have what this step needs, by identity.
        """
        for request in requests:
            own = plans.get(id(request))
            more = min(_AHEAD, request.num_tokens_left)
            # not at the cost of somebody's next step
            if own and self.missing(request, own, more) + len(requests) <= self.num_free:
                self.grow(request, own, more)

    def trim(self, request: Request, plan: SpecPlan) -> None:
        """Give back what a step of this plan does not need."""
        if (surplus := -self.missing(request, plan)) > 0:
            self._pool.free(request.blocks[-surplus:])
            del request.blocks[-surplus:]
            request.num_kept_blocks = min(request.num_kept_blocks, len(request.blocks))

    def missing(self, request: Request, plan: SpecPlan, num_ahead: int = 0) -> int:
        """Blocks that a step needs more than the request has; negative where it has more."""
        rows = max(request.cache_len, request.prefill_end) + num_ahead + plan.num_reached_rows
        return self._blocks_of(rows) - len(request.blocks)

    def holds(self, request: Request, plan: SpecPlan, cache_len: int) -> bool:
        """Whether the blocks of a request are enough for a step of this plan from there on."""
        return cache_len + plan.num_reached_rows <= len(request.blocks) * self._size

    def hold_all(self, requests: Iterable[Request], plans: Mapping[int, SpecPlan]) -> bool:
        """Whether everyone's blocks are enough for a step; see `grow_all`."""
        for request in requests:
            if not self.holds(request, plans[id(request)], request.cache_len):
                return False
        return True

    def steps_held(self, requests: Sequence[Request], plan: SpecPlan, most: int) -> int:
        """How many steps of a plan can follow each other; each has the blocks of the first one.

        Blocks for the others are taken, but not at the cost of somebody's next step.

        Args:
            requests: of the steps.
            plan: of all steps.
            most: steps, 1 or more.
        """
        per_step = plan.max_depth + 1
        for request in requests:
            more = (most - 1) * per_step
            if self.missing(request, plan, more) + len(requests) <= self.num_free:
                self.grow(request, plan, more)
            rows = len(request.blocks) * self._size - request.cache_len - plan.num_reached_rows
            most = min(most, 1 + max(0, rows) // per_step)
        return most

    def publish(self, request: Request) -> None:
        """Let later requests find what a request has committed."""
        if self._shares_prefixes and request.blocks:
            self._prefixes.publish(request)

    def keep_states(self, spans: Sequence[Span]) -> list[Span]:
        """Reserve checkpoints for the states after those spans that end where one may be."""
        return [self._kept(span) for span in spans] if self.grid else list(spans)

    def publish_states(self, spans: Iterable[Span]) -> None:
        """Let later requests find what passes over these spans have kept."""
        for span in spans:
            if self._states is None or span.checkpoint is None:
                continue
            self._publish(span.request, span.checkpoint, span.end)

    def keep_steps(self, groups: Sequence[StepGroup]) -> list[StepGroup]:
        """Reserve checkpoints for steps that may commit as many rows as one is kept after."""
        if not self.grid:
            return list(groups)
        found = []
        for group in groups:
            kept = tuple(self._reached(request, group.plan) for request in group.requests)
            found.append(replace(group, kept=kept) if any(kept) else group)
        return found

    def publish_steps(self, groups: Iterable[StepGroup]) -> None:
        """Let later requests find what steps have kept, where they have come so far.

        Not of a request that plain decoding would have ended before: what is there to be found
        depends on tokens alone.
        """
        for group in groups:
            for request, kept in zip(group.requests, group.kept, strict=False):
                if self._states is None or kept is None:
                    continue
                if kept.length <= min(request.cache_len, len(request.token_ids) - 1):
                    self._publish(request, kept.checkpoint, kept.length)
                else:
                    self._give_back(kept.checkpoint)

    def _publish(self, request: Request, checkpoint: int, length: int) -> None:
        """Let others find the states after so many rows of a request, its last ones so far."""
        assert self._states is not None, "it was asked for a checkpoint"
        key = self._prefixes.key_of(request, length)
        if key is None:
            self._give_back(checkpoint)
            return
        self._reserved.discard(checkpoint)
        self._states.checkpoints.publish(checkpoint, key, request.kept_key)
        request.kept_key = key

    def _give_back(self, checkpoint: int) -> None:
        assert self._states is not None, "it was asked for a checkpoint"
        self._reserved.discard(checkpoint)
        self._states.checkpoints.give_back(checkpoint)

    def rows_to_checkpoint(self, request: Request) -> int | None:
        """Rows that a request may commit until states are kept; None where none are."""
        return self.grid - request.cache_len % self.grid if self.grid else None

    def _reached(self, request: Request, plan: SpecPlan) -> Kept | None:
        assert self._states is not None, "there is a grid"
        rows, most = self.rows_to_checkpoint(request), plan.max_depth + 1
        # a step that is longer than the grid could come past two of them
        if rows is None or not rows <= most <= self.grid:
            return None
        place = self._reserve()
        return None if place is None else Kept(place, request.cache_len + rows)

    def _kept(self, span: Span) -> Span:
        assert self._states is not None, "there is a grid"
        if span.end % self.grid:
            return span
        checkpoints = self._states.checkpoints
        key = self._prefixes.key_of(span.request, span.end)
        if key is not None and (known := checkpoints.find(key)) is not None:
            checkpoints.use(known)
            return span
        return replace(span, checkpoint=self._reserve())

    def _reserve(self) -> int | None:
        assert self._states is not None, "there is a grid"
        if (place := self._states.checkpoints.reserve()) is not None:
            self._reserved.add(place)
            for states in self._drafts.values():
                states.filled.discard(place)
        return place

    def hold(self, requests: Iterable[Request]) -> None:
        """A batch in flight uses the blocks of these requests, whatever becomes of them."""
        self._held.update(requests)

    def let_go(self, requests: Iterable[Request]) -> None:
        """The batch is done: blocks of those that left are free, unless another one uses them."""
        for request in requests:
            if (count := self._held[request]) > 1:
                self._held[request] = count - 1
                continue
            del self._held[request]
            if request in self._left:
                self._free(request)

    def let_all_go(self) -> None:
        """Nothing is in flight any more."""
        self._held.clear()
        for request in list(self._left):
            self._free(request)
        for place in self._reserved:
            assert self._states is not None, "it was asked for a checkpoint"
            self._states.checkpoints.give_back(place)
        self._reserved.clear()

    @property
    def has_held(self) -> bool:
        """Whether a batch was held that is not done, or somebody left meanwhile."""
        return bool(self._held or self._left)

    @property
    def left(self) -> Collection[Request]:
        """Those that left while a batch in flight uses their blocks."""
        return self._left.keys()

    def leave(self, request: Request) -> None:
        """Give back all blocks of a request, as soon as no batch in flight uses them."""
        self._left[request] = None
        if not self._held[request]:
            self._free(request)

    def preempt(self, request: Request) -> None:
        """Take back what a request has, of which no batch in flight uses anything."""
        self._pool.free(request.preempt())
        self._free_place(request)

    def _free(self, request: Request) -> None:
        del self._left[request]
        self._pool.free(request.blocks)
        request.blocks = []
        self._free_place(request)

    def _free_place(self, request: Request) -> None:
        if self._places is not None and request.state_place != NOWHERE:
            self._places.give_back(request.state_place)
            request.state_place = NOWHERE

    def _is_free(self, request: Request, hit: Hit, running: Sequence[Request]) -> bool:
        needed = self._blocks_of(request.prefill_end + 2) - len(hit.blocks)
        # a request that shares a block of no other takes it from the free ones
        needed += sum(not self._pool.is_used(block) for block in hit.blocks)
        growing = sum(len(other.blocks) < self._most_for(other) for other in running)
        return needed + growing <= self.num_free

    def _find(self, request: Request) -> Hit:
        if not self._shares_prefixes or request.is_scored:
            # whose prompt is scored needs the logits of all of it
            return Hit([], 0, [0] * len(request.draft_lens))
        return self._prefixes.find(request)

    def _states_of_drafts(self, request: Request, hit: Hit) -> dict[int, tuple[int, int]]:
        """By draft, rows that it goes on after, and the checkpoint of its states."""
        if hit.checkpoint is None:
            return {}
        found = {
            draft: self._prefixes.states_of_draft(request, hit.draft_lens[draft], states.filled)
            for draft, states in self._drafts.items()
        }
        return {draft: item for draft, item in found.items() if item is not None}

    def _blocks_of(self, num_rows: int) -> int:
        return min(-(-num_rows // self._size), self._shape.blocks_per_sequence)

    def _most_for(self, request: Request) -> int:
        return self._shape.blocks_for(request.num_prompt_tokens, request.max_tokens)
