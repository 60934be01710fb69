"""Static tensors of a step: inputs and results at addresses that captured graphs know."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from specc.runtime.graph_device import Event, GraphDevice
from specc.runtime.program import StepInputs
from specc.sampling_rows import Value, Word

# committed rows of a padding row: so far below zero that every slot of it is negative, which
# writes nothing, and stays negative however many steps the device counts on
PADDING = -(1 << 30)
_PADDING_OF = {"cache_len": PADDING}
# of tensors, in units of int32: what Triton specializes pointers on, 16 bytes
_ALIGNMENT = 4
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
        num_last: last tokens of a sequence that a step reads.
        num_votes: drafts of the plans that vote; 0 where none does.
        num_proposals: tokens that the host proposes; 0 where it proposes none.
    """

    def __init__(
        self,
        graphs: GraphDevice,
        max_batch: int,
        blocks_per_sequence: int,
        result_width: int,
        num_last: int = 2,
        num_votes: int = 0,
        num_proposals: int = 0,
    ) -> None:
        self.max_batch = max_batch
        self.result_width = result_width
        self._graphs = graphs
        # columns of a row by name
        self._columns = {
            "last_tokens": (num_last, torch.int64),
            "sampling_words": (len(Word), torch.int64),
            "proposals": (num_proposals, torch.int64),
            "cache_len": (1, torch.int32),
            "block_table": (blocks_per_sequence, torch.int32),
            "sampling_values": (len(Value), torch.float32),
            "vote_weights": (num_votes, torch.float32),
        }
        # in units of int32
        self._sizes = [
            max_batch * width * (dtype.itemsize // 4) for width, dtype in self._columns.values()
        ]
        # kernels are compiled, and compiled ahead of time, for pointers that are aligned
        self._places = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in self._sizes]
        total = sum(self._places)
        self._device = torch.zeros(total, dtype=torch.int32, device=graphs.device)
        self.inputs = self._views(self._device)
        self.last_tokens, self.cache_len = self.inputs["last_tokens"], self.inputs["cache_len"]
        self.block_table = self.inputs["block_table"]
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
        self, inputs: StepInputs, bucket: int, places: Sequence[int] | None = None
    ) -> None:
        """Queue the inputs of a step; rows up to `bucket` without a sequence become padding.

        Args:
            inputs: of the host.
            bucket: rows of the graph that will read them.
            places: row of each sequence; None is their order.
        """
        # whatever interrupts what follows: no step goes on from inputs that are not its own
        self.newest = None
        stage = self._next_input
        self._next_input = (stage + 1) % NUM_STAGES
        if (fence := self._fences[stage]) is not None:
            fence.synchronize()
        batch = len(inputs.rows)
        rows = slice(batch) if places is None else torch.tensor(places)
        views = self._views(self._inputs[stage])
        values = torch.tensor(inputs.rows, dtype=torch.int64)
        given = {
            "last_tokens": values[:, :-1],
            "cache_len": values[:, -1],
            "block_table": inputs.block_table,
            "sampling_values": inputs.sampling_values,
            "sampling_words": inputs.sampling_words,
            **inputs.extra,
        }
        for name, view in views.items():
            unused = view[:bucket] if places is not None else view[batch:bucket]
            unused.fill_(_PADDING_OF.get(name, 0))
            if name in given:
                # of proposals and weights, as many as the plan has
                part = view if view.dim() == 1 else view[:, : given[name].shape[1]]
                part[rows] = given[name].to(view.dtype)
        self._device.copy_(self._inputs[stage], non_blocking=True)
        self._fences[stage] = self._graphs.record_event()

    @contextlib.contextmanager
    def kept_inputs(self, bucket: int) -> Iterator[None]:
        """Padding in all rows for a while: a step that runs then writes nothing."""
        before = {name: view[:bucket].clone() for name, view in self.inputs.items()}
        for name, view in self.inputs.items():
            view[:bucket] = _PADDING_OF.get(name, 0)
        try:
            yield
        finally:
            for name, kept in before.items():
                self.inputs[name][:bucket] = kept

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

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        views = {}
        parts = zip(flat.split(self._places), self._sizes, strict=True)
        for (name, (width, dtype)), (part, size) in zip(self._columns.items(), parts, strict=True):
            view = part[:size].view(dtype)
            views[name] = view if name == "cache_len" else view.view(self.max_batch, width)
        return views
