"""Weights of a program that lie in the host's memory, and are copied around their use.

Two slots on the device: while the operator that reads piece i runs, piece i + 1 is copied into the
other slot, on a second stream. Piece i lies in slot i mod 2, at the same address in every pass, so
that a graph which was captured once reads whatever its own copies have put there.

The second stream is forked from the one that computes at the beginning of a pass, and joined before
its end; nothing waits for an event of before the pass. So copies are nodes of the captured graph:
an event that was recorded outside of a capture cannot be waited for inside of one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, fx

from specc.artifact.offload import NUM_BUFFERS, OffloadPlan, Piece
from specc.runtime.backends.graph_device import GraphDevice, Point

# where a tensor begins within a slot: what vector loads of kernels and libraries take
_ALIGNMENT = 256
# below it a copy costs more than the memory is worth
LEAST_BYTES = 1 << 20
# operators that read some rows of a table
_LOOKUPS = ("specc::embed_norm_rope_write", "specc::embedding_of_blocks")
# others that read a weight where it lies, and return nothing that shares its memory
_READERS = ("aten::linear", "aten::mm", "aten::addmm", "aten::matmul", "aten::_grouped_mm")


def aligned(size: int) -> int:
    """Bytes that a tensor takes in a slot."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def find_weights(
    graph: fx.Graph, keys: Mapping[str, str], sizes: Mapping[str, int]
) -> tuple[list[Piece], list[str]]:
    """What can be copied for each operator, in their order, and the keys of all other weights.

    Others are tables that tokens are looked up in, what several operators read or one reads through
    a view, and what is smaller than `LEAST_BYTES`: they stay on the device.

    Args:
        graph: of a program, after its last pass.
        keys: name of an input → key of its weight or constant.
        sizes: key → bytes.
    Returns:
        pieces, numbered by the places of their operators among the graph's nodes, of `aligned`
        sizes; and keys in order.
    """
    inputs = {node: keys[node.target] for node in graph.nodes if node.target in keys}
    readers: dict[str, list[fx.Node]] = {key: [] for key in inputs.values()}
    for node in graph.nodes:
        for key in dict.fromkeys(inputs[item] for item in node.all_input_nodes if item in inputs):
            readers[key].append(node)
    pieces = []
    for number, node in enumerate(graph.nodes):
        if not _reads_in_place(node):
            continue
        own = dict.fromkeys(inputs[item] for item in node.all_input_nodes if item in inputs)
        found = tuple(key for key in own if readers[key] == [node] and sizes[key] >= LEAST_BYTES)
        if found:
            pieces.append(Piece(number, 0, sum(aligned(sizes[key]) for key in found), found))
    taken = {key for piece in pieces for key in piece.keys}
    return pieces, [key for key in readers if key not in taken]


def _reads_in_place(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    name = node.target._schema.name
    return name in _READERS or (name.startswith("specc::") and name not in _LOOKUPS)


class WeightCopies:
    """The slots, what is copied into them, and when.

    Args:
        plan: `streamed` are the pieces that are copied in every pass.
        weights: key → tensor on the host, of the pieces at least; they are copied to pinned memory.
    """

    def __init__(
        self, graphs: GraphDevice, plan: OffloadPlan, weights: Mapping[str, Tensor]
    ) -> None:
        self.plan = plan
        pieces = plan.streamed
        self._stream = graphs.copy_stream()
        self._host = [graphs.host_buffer(piece.size, dtype=torch.uint8) for piece in pieces]
        sizes = [
            max((piece.size for piece in pieces[slot::NUM_BUFFERS]), default=0)
            for slot in range(NUM_BUFFERS)
        ]
        # zeros: products are timed before the first pass
        self._slots = [torch.zeros(size, dtype=torch.uint8, device=graphs.device) for size in sizes]
        self.tensors: dict[str, Tensor] = {}
        for number, piece in enumerate(pieces):
            begin = 0
            for key in piece.keys:
                like = weights[key]
                size = like.numel() * like.itemsize
                raw = like.contiguous().view(-1).view(torch.uint8)
                self._host[number][begin : begin + size].copy_(raw)
                place = self._slots[number % NUM_BUFFERS][begin : begin + size]
                self.tensors[key] = place.view(like.dtype).view(like.shape)
                begin += aligned(size)
        # of the pass that is under way: piece → the point at which its copy is done
        self._ready: dict[int, Point] = {}

    def begin(self) -> None:
        """A pass begins: the first pieces are copied, after all that was queued before."""
        self._ready.clear()
        now = self._stream.point()
        for number in range(min(NUM_BUFFERS, len(self._host))):
            self._copy(number, now)

    def acquire(self, number: int) -> None:
        """What is queued from now on reads this piece."""
        self._stream.wait(self._ready.pop(number))

    def release(self, number: int) -> None:
        """What was queued up to now has read this piece: its slot is for another one."""
        if number + NUM_BUFFERS < len(self._host):
            self._copy(number + NUM_BUFFERS, self._stream.point())

    def _copy(self, number: int, after: Point) -> None:
        host = self._host[number]
        slot = self._slots[number % NUM_BUFFERS][: len(host)]
        self._ready[number] = self._stream.copy(slot, host, after)

    def insert(self, graph: fx.Graph) -> None:
        """Let a graph, of which `find_weights` has found the pieces, begin, acquire and release."""
        nodes = list(graph.nodes)
        for number, piece in enumerate(self.plan.streamed):
            reader = nodes[piece.segment]
            with graph.inserting_before(reader):
                graph.call_function(self.acquire, (number,))
            with graph.inserting_after(reader):
                graph.call_function(self.release, (number,))
        if self.plan.streamed:
            first = next(node for node in nodes if node.op != "placeholder")
            with graph.inserting_before(first):
                graph.call_function(self.begin)
        graph.lint()
