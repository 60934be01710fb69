"""Where requests have got to, on the device: their last tokens and committed rows, by slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specc.runtime.backends.graph_device import Event, GraphDevice

# slots for each sequence of the largest batch: engines may serve several `LLM`s
_SPARE = 4
# staging sets of the host, see `StepBuffers`
_NUM_STAGES = 4


class StateRows:
    """Keeps what a step leaves for the next one of each sequence, whatever batch that is in.

    A step reads and writes static inputs, one row for each sequence of its batch. Before others
    take their place, `save` puts what the last step has left into the slots of its sequences, and
    `route` fetches the rows of those whose results the host has not read yet. All of it is queued
    on the device; nothing waits.

    Args:
        last_tokens: [max_batch, C] int64, input of steps.
        cache_len: [max_batch] int32, likewise.
        padding: `cache_len` of rows without a sequence.
    """

    def __init__(
        self, graphs: GraphDevice, last_tokens: Tensor, cache_len: Tensor, padding: int
    ) -> None:
        self._graphs = graphs
        self._inputs = (last_tokens, cache_len)
        max_batch = len(cache_len)
        num_slots = _SPARE * max_batch
        # two rows more: one that nobody reads, and that of padding, which nobody writes
        self._nowhere, self._padding = num_slots, num_slots + 1
        self._saved = tuple(
            torch.zeros(num_slots + 2, *like.shape[1:], dtype=like.dtype, device=graphs.device)
            for like in self._inputs
        )
        self._saved[1][self._padding] = padding
        self._slots: dict[object, int] = {}
        self._free = list(range(num_slots))
        # rows of the last batch: where its state goes, where that comes from that the host knows,
        # and what the next step starts from
        self._routes = torch.zeros(3, max_batch, dtype=torch.int64, device=graphs.device)
        self._stages = [
            graphs.host_buffer(3, max_batch, dtype=torch.int64) for _ in range(_NUM_STAGES)
        ]
        self._fences: list[Event | None] = [None] * _NUM_STAGES
        self._next_stage = 0
        # rows of the inputs that are newer than the slots, and those that have slots
        self._num_new = self._num_routed = 0

    def knows(self, request: object) -> bool:
        """Whether the slot of a request still holds what its last step has left."""
        return request in self._slots

    def stepped(self) -> None:
        """A step was queued on the inputs as they are: they are newer than the slots."""
        self._num_new = self._num_routed

    def save(self) -> None:
        """Other inputs are about to come: keep what the last step leaves."""
        if count := self._num_new:
            for saved, values in zip(self._saved, self._inputs, strict=True):
                saved.index_copy_(0, self._routes[0, :count], values[:count])
        self._num_new = self._num_routed = 0

    def route(
        self,
        requests: Sequence[object],
        is_carried: Sequence[bool],
        bucket: int,
        places: Sequence[int] | None = None,
    ) -> None:
        """Say whose rows the inputs are, and put the device's own state into some of them.

        Args:
            requests: of the batch, for which the inputs were just copied.
            is_carried: which of them go on from the state that their last step leaves.
            bucket: rows of the graph that will read the inputs.
            places: row of each request; None is their order.
        """
        stage = self._next_stage
        self._next_stage = (stage + 1) % _NUM_STAGES
        if (fence := self._fences[stage]) is not None:
            fence.synchronize()
        slots = [self._slot_of(request, requests) for request in requests]
        saved, given = [self._nowhere] * bucket, [self._nowhere] * bucket
        source = [self._padding] * bucket
        rows = range(len(slots)) if places is None else places
        for row, slot, carried in zip(rows, slots, is_carried, strict=True):
            saved[row] = source[row] = slot
            if not carried:
                given[row] = slot
        self._stages[stage][:, :bucket] = torch.tensor([saved, given, source])
        self._routes.copy_(self._stages[stage], non_blocking=True)
        self._fences[stage] = self._graphs.record_event()
        if any(is_carried):
            for kept, values in zip(self._saved, self._inputs, strict=True):
                kept.index_copy_(0, self._routes[1, :bucket], values[:bucket])
                torch.index_select(kept, 0, self._routes[2, :bucket], out=values[:bucket])
        self._num_routed = bucket

    def _slot_of(self, request: object, batch: Sequence[object]) -> int:
        # those that were used last come last
        slot = self._slots.pop(request, None)
        if slot is None:
            if not self._free:
                oldest = next(other for other in self._slots if other not in batch)
                self._free.append(self._slots.pop(oldest))
            slot = self._free.pop()
        self._slots[request] = slot
        return slot
