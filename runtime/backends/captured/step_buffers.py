"""Static tensors of a step: inputs and results at addresses that captured graphs know."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from specc.runtime.backends.captured.state_rows import StateRows
from specc.runtime.backends.graph_device import Event, GraphDevice
from specc.runtime.backends.step_io import STATES, StepInputs
from specc.sampling.rows import Value, Word

# committed rows of a padding row: so far below zero that every slot of it is negative, which
# writes nothing, and stays negative however many steps the device counts on
PADDING = -(1 << 30)
_PADDING_OF = {"cache_len": PADDING}
# inputs of one number a row: [B]
_COLUMNS_OF_ONE = ("cache_len", "live")
# of tensors, in units of int32: what Triton specializes pointers on, 16 bytes
_ALIGNMENT = 4
# inputs that the device has not read yet: of two iterations, each of two plans
NUM_STAGES = 4
# results of steps that the host has not read yet: of two iterations, each of several plans
_MOST_RESULTS = 16


class HostResults:
    """Results of a step on their way to the host.

    Args:
        values: staging memory, [B, result_width] int64.
        event: after the copy into it.
    """

    def __init__(self, values: Tensor, event: Event) -> None:
        self._values = values
        self._event = event
        self._is_read = False

    def wait(self) -> Tensor:
        """The values; read them before another step is queued."""
        self._event.synchronize()
        self._is_read = True
        return self._values

    @property
    def is_read(self) -> bool:
        """Whether its staging memory can be had for other results."""
        return self._is_read

    def leave_staging(self) -> None:
        """Another step needs the staging memory: keep a copy for those that have not read this."""
        if not self._is_read:
            self._event.synchronize()
            self._values = self._values.clone()


class StepBuffers:
    """Inputs of steps on the device, and the host's staging memory for them.

    The host fills one of a few staging sets while the device may still read the others; an event
    fences each. One copy brings everything over.

    Args:
        graphs: the device.
        max_batch: sequences of a step at most.
        blocks_per_sequence: width of the block table.
        result_width: integers that a step returns for each sequence.
        num_last: last tokens of a sequence that a step reads.
        num_votes: drafts of the plans that vote; 0 where none does.
        num_proposals: tokens that the host proposes; 0 where it proposes none.
        num_chosen: blocks that the host chooses for self-drafts; 0 where it chooses none.
        has_states: layers keep states, and steps are told whose are where.
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
        num_chosen: int = 0,
        has_states: bool = False,
    ) -> None:
        self.max_batch = max_batch
        self.result_width = result_width
        self._graphs = graphs
        # columns of a row by name
        self._columns = {
            "last_tokens": (num_last, torch.int64),
            "sampling_words": (len(Word), torch.int64),
            "proposals": (num_proposals, torch.int64),
            "chosen_blocks": (num_chosen, torch.int64),
            "cache_len": (1, torch.int32),
            # live nodes of a tree; read where not all of them are, and 0 of padding
            "live": (1, torch.int32),
            "block_table": (blocks_per_sequence, torch.int32),
            # place, and how many nodes are certain; padding has no live token to fold
            STATES: (2 * has_states, torch.int32),
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
        self.state = StateRows(graphs, self.last_tokens, self.cache_len, PADDING)
        self._inputs = [graphs.host_buffer(total, dtype=torch.int32) for _ in range(NUM_STAGES)]
        self._fences: list[Event | None] = [None] * NUM_STAGES
        # staging memory that nobody has, and whose results the other holds, the newest at the end
        self._free = [self._new_output() for _ in range(NUM_STAGES)]
        self._outputs: deque[tuple[Tensor, HostResults]] = deque()
        # of the step that was queued last; the step that waits for its masks, or for the host to
        # read how much is verified, whose inputs these still are; when the host last saw one end
        self.newest: HostResults | None = None
        self.half: object | None = None
        self.end_s = 0.0
        self._next_input = 0

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
        self.newest = self.half = None
        self.state.save()
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
                # of proposals, weights and blocks, as many as the plan has
                part = view if view.dim() == 1 else view[:, : given[name].shape[1]]
                part[rows] = given[name].to(view.dtype)
        self._device.copy_(self._inputs[stage], non_blocking=True)
        self._fences[stage] = self._graphs.record_event()

    def rows(self, first: int, last: int, widths: Mapping[str, int]) -> dict[str, Tensor]:
        """Some rows of the inputs, by name; of those in `widths`, so many columns."""
        found = {name: view[first:last] for name, view in self.inputs.items()}
        return found | {name: found[name][:, :width] for name, width in widths.items()}

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
        """Queue the copy of the results to the host, after the step that made them."""
        values = self._free_output()
        values.copy_(self.results, non_blocking=True)
        self.newest = HostResults(values, self._graphs.record_event())
        self._outputs.append((values, self.newest))
        return self.newest

    def _free_output(self) -> Tensor:
        """Staging memory of results that were read, else more of it, else of the oldest ones."""
        for place, (values, results) in enumerate(self._outputs):
            if results.is_read:
                del self._outputs[place]
                return values
        if self._free:
            return self._free.pop()
        if len(self._outputs) < _MOST_RESULTS:
            return self._new_output()
        values, oldest = self._outputs.popleft()
        oldest.leave_staging()
        return values

    def _new_output(self) -> Tensor:
        # not of the inference mode that a step is queued in: others may write to it
        with torch.inference_mode(False):
            return self._graphs.host_buffer(self.max_batch, self.result_width, dtype=torch.int64)

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        views = {}
        parts = zip(flat.split(self._places), self._sizes, strict=True)
        for (name, (width, dtype)), (part, size) in zip(self._columns.items(), parts, strict=True):
            view = part[:size].view(dtype)
            is_column = name in _COLUMNS_OF_ONE
            views[name] = view if is_column else view.view(self.max_batch, width)
        return views
