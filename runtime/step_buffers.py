"""Static tensors of a step: inputs and results at addresses that captured graphs know."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from specc.runtime.graph_device import Event, GraphDevice

# committed rows of a padding row: so far below zero that every slot of it is negative, which
# writes nothing, and stays negative however many steps the device counts on
PADDING = -(1 << 30)
# results of a step that the host has not read yet, and inputs that the device has not read yet
NUM_STAGES = 2


class HostResults:
    """Results of a step on their way to the host.

    Args:
        values: staging memory, [B, result_width] int64.
        event: behind the copy into it.
    """

    def __init__(self, values: Tensor, event: Event) -> None:
        self._values = values
        self._event = event
        self._is_read = False

    def wait(self) -> Tensor:
        """The values; read them before two further steps are queued."""
        self._event.synchronize()
        self._is_read = True
        return self._values

    def leave_staging(self) -> None:
        """Another step needs the staging memory: keep a copy for whoever has not read this."""
        if not self._is_read:
            self._event.synchronize()
            self._values = self._values.clone()


class StepBuffers:
    """Inputs of steps on the device, and the host's staging memory for them.

    The host fills one of two staging sets while the device may still read the other; an event
    fences each. One copy brings everything over.

    Args:
        graphs: the device.
        max_batch: sequences of a step at most.
        blocks_per_sequence: width of the block table.
        result_width: integers that a step returns for each sequence.
    """

    def __init__(
        self, graphs: GraphDevice, max_batch: int, blocks_per_sequence: int, result_width: int
    ) -> None:
        self.max_batch = max_batch
        self.result_width = result_width
        self._graphs = graphs
        # int32 columns: two tokens of int64, then the committed rows, then the block table; the
        # tokens come first because an int64 view needs an even offset
        self._sizes = (4 * max_batch, max_batch, max_batch * blocks_per_sequence)
        total = sum(self._sizes)
        self._device = torch.zeros(total, dtype=torch.int32, device=graphs.device)
        self.last_tokens, self.cache_len, self.block_table = self._views(self._device)
        self.results = torch.zeros(max_batch, result_width, dtype=torch.int64, device=graphs.device)
        self._inputs = [graphs.host_buffer(total, dtype=torch.int32) for _ in range(NUM_STAGES)]
        self._outputs = [
            graphs.host_buffer(max_batch, result_width, dtype=torch.int64)
            for _ in range(NUM_STAGES)
        ]
        self._fences: list[Event | None] = [None] * NUM_STAGES
        self._results: list[HostResults | None] = [None] * NUM_STAGES
        # of the step that was queued last; when the host last saw one end
        self.newest: HostResults | None = None
        self.end_s = 0.0
        self._next_input = self._next_output = 0

    def copy_from(
        self, rows: Sequence[tuple[int, int, int]], block_table: Tensor, bucket: int
    ) -> None:
        """Queue the inputs of a step; rows from `len(rows)` to `bucket` become padding.

        Args:
            rows: of each sequence, its last two tokens and its committed rows.
            block_table: [B, n] int32 on the host.
            bucket: rows of the graph that will read them.
        """
        # whatever interrupts what follows: no step goes on from inputs that are not its own
        self.newest = None
        stage = self._next_input
        self._next_input = (stage + 1) % NUM_STAGES
        if (fence := self._fences[stage]) is not None:
            fence.synchronize()
        batch = len(rows)
        tokens, cache_len, table = self._views(self._inputs[stage])
        values = torch.tensor(rows, dtype=torch.int64)
        tokens[:batch] = values[:, :2]
        tokens[batch:bucket] = 0
        cache_len[:batch] = values[:, 2]
        cache_len[batch:bucket] = PADDING
        table[:batch] = block_table
        table[batch:bucket] = 0
        self._device.copy_(self._inputs[stage], non_blocking=True)
        self._fences[stage] = self._graphs.record_event()

    @contextlib.contextmanager
    def kept_inputs(self, bucket: int) -> Iterator[None]:
        """Padding in all rows for a while: a step that runs then writes nothing."""
        inputs = (self.last_tokens[:bucket], self.cache_len[:bucket], self.block_table[:bucket])
        before = [tensor.clone() for tensor in inputs]
        for tensor, number in zip(inputs, (0, PADDING, 0), strict=True):
            tensor.fill_(number)
        try:
            yield
        finally:
            for tensor, kept in zip(inputs, before, strict=True):
                tensor.copy_(kept)

    def read_results(self) -> HostResults:
        """Queue the copy of the results to the host, behind the step that made them."""
        stage = self._next_output
        self._next_output = (stage + 1) % NUM_STAGES
        if (older := self._results[stage]) is not None:
            older.leave_staging()
        self._outputs[stage].copy_(self.results, non_blocking=True)
        self.newest = HostResults(self._outputs[stage], self._graphs.record_event())
        self._results[stage] = self.newest
        return self.newest

    def _views(self, flat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens, cache_len, table = flat.split(self._sizes)
        return (
            tokens.view(torch.int64).view(self.max_batch, 2),
            cache_len,
            table.view(self.max_batch, -1),
        )
