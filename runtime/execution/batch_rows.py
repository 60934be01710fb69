"""What a batch brings to a step: tensors that are made anew only where the batch has changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from specc.runtime.backends.step_io import ADAPTERS, STATES, StepInputs
from specc.runtime.execution.adapter_rows import adapters_of
from specc.runtime.execution.state_rows import state_rows
from specc.runtime.scheduling.kv_cache import CacheShape, KVCache
from specc.runtime.scheduling.request import Request
from specc.speculation.plans import SpecPlan

# rows for each request that may run: one that waits again after a preemption often comes back
_SPARE = 2


class BlockRows:
    """Block tables of the requests that were seen lately; a step gathers the rows of its batch.

    A row changes where the blocks of its request have: only those after `num_kept_blocks` are
    written. So a step costs the copy of its rows, and no Python list as long as they are.

    Args:
        shape: of the cache that the blocks are of.
    """

    def __init__(self, shape: CacheShape) -> None:
        num_rows = _SPARE * shape.max_num_seqs
        self._table = torch.zeros(num_rows, shape.blocks_per_sequence, dtype=torch.int32)
        self._rows: dict[Request, int] = {}
        self._free = list(range(num_rows))
        # blocks in each row
        self._lengths = [0] * num_rows

    def write(self, requests: Sequence[Request]) -> bool:
        """Bring the rows of these requests up to date; returns whether one has changed."""
        has_changed = False
        for request in requests:
            row = self._rows.get(request)
            if row is None:
                row = self._new_row(request, requests)
            count, length = len(request.blocks), self._lengths[row]
            if request.num_kept_blocks == count == length:
                continue
            kept = min(request.num_kept_blocks, count, length)
            self._table[row, kept:count] = torch.tensor(request.blocks[kept:], dtype=torch.int32)
            self._table[row, count:length] = 0
            request.num_kept_blocks = self._lengths[row] = count
            has_changed = True
        return has_changed

    def select(self, requests: Sequence[Request]) -> Tensor:
        """[B, n] int32 as of the last `write`; entries after a request's own blocks are 0."""
        rows = torch.tensor([self._rows[request] for request in requests], dtype=torch.int64)
        return self._table.index_select(0, rows)

    def _new_row(self, request: Request, wanted: Sequence[Request]) -> int:
        if not self._free:
            needed = set(wanted)
            for other in [s for s in self._rows if s not in needed]:
                self._free.append(self._rows.pop(other))
        if not self._free:
            # a batch of another cache's size: only tests have one
            self._free.append(len(self._table))
            self._table = torch.cat([self._table, torch.zeros_like(self._table[:1])])
            self._lengths.append(0)
        row = self._rows[request] = self._free.pop()
        request.num_kept_blocks = 0
        return row


class BatchRows:
    """Rows of the batches of one engine.

    Args:
        cache: that block tables point into.
        num_last: last tokens of a request that a step reads.
    """

    def __init__(self, cache: KVCache, num_last: int) -> None:
        self._num_last = num_last
        self._requests: list[Request] = []
        self._blocks = BlockRows(cache.shape)
        self._table = self._blocks.select([])
        self._sampling = sampling_rows([])
        self._has_states = cache.states is not None
        self._places: list[int] = []
        self._states = state_rows([])
        self._adapters = adapters_of([])

    def inputs(
        self,
        requests: list[Request],
        extra: Mapping[str, Tensor],
        ahead: Sequence[int] = (),
    ) -> StepInputs:
        """A step's inputs; requests keep their blocks and options, so these mostly are known.

        The same table is the same tensor.

        Args:
            extra: see `StepInputs`.
            ahead: rows that steps in flight may yet commit, of each request; they count as
                committed. () is none.
        """
        has_changed = self._blocks.write(requests)
        is_other = requests != self._requests
        if has_changed or is_other:
            self._table = self._blocks.select(requests)
        if is_other:
            self._requests = list(requests)
            self._sampling = sampling_rows(requests)
            self._adapters = adapters_of(requests)
        if self._adapters is not None:
            extra = {**extra, ADAPTERS: self._adapters}
        rows = self.committed(requests, ahead)
        if self._has_states:
            # a request that was preempted comes back to another place
            places = [request.state_place for request in requests]
            if places != self._places:
                self._places, self._states = places, state_rows(places)
            extra = {**extra, STATES: self._states}
        return StepInputs(rows, self._table, *self._sampling, extra)

    def committed(
        self, requests: Sequence[Request], ahead: Sequence[int] = ()
    ) -> list[tuple[int, ...]]:
        """`rows` of a step's inputs; see `inputs`."""
        count = self._num_last
        if count == 1 and not ahead:
            return [(request.token_ids[-1], request.cache_len) for request in requests]
        return [
            (*_last(request.token_ids, count), request.cache_len + more)
            for request, more in zip(requests, ahead or [0] * len(requests), strict=True)
        ]


def sampling_rows(requests: Sequence[Request]) -> tuple[Tensor, Tensor]:
    """`sampling_values` [B, 6] and `sampling_words` [B, 4], see `specc.sampling.rows`."""
    values = [request.sampling_values for request in requests]
    words = [request.sampling_words for request in requests]
    return torch.tensor(values, dtype=torch.float32), torch.tensor(words, dtype=torch.int64)


def last_tokens_of(plans: Iterable[SpecPlan]) -> int:
    """Last tokens of a request that the steps of an engine read."""
    return max(1, *(plan.catch_up for plan in plans))


def _last(tokens: list[int], count: int) -> list[int]:
    """The last tokens; zeros before a request that is shorter."""
    last = tokens[-count:]
    return last if len(last) == count else [0] * (count - len(last)) + last
