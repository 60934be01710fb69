"""What may follow the nodes of a step's trees: bits and biases that a captured step reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specc.runtime.backends.captured.step_buffers import NUM_STAGES
from specc.runtime.backends.graph_device import Event, GraphDevice

# rows whose bits are unpacked at once: V bytes each, a few times
_ROWS_AT_ONCE = 64
# of parts of a buffer, in bytes
_ALIGNMENT = 16


class MaskRow(NamedTuple):
    """What may follow a node.

    Args:
        mask: of a grammar, a bit for each token; None allows all.
        forbidden: tokens that must not follow besides.
    """

    mask: bytes | None
    forbidden: tuple[int, ...] = ()


class NodeMasks(NamedTuple):
    """Of the trees of a step's B sequences.

    Args:
        rows: row of B * N → what may follow it; others are left as they are.
        is_controlled: [B] whether a request's controls are active; where they leave a node no
            token, all are equally likely.
        biases: [B] what is added to all logits, [V] float32 on the device; None adds nothing.
    """

    rows: dict[int, MaskRow]
    is_controlled: Sequence[bool]
    biases: Sequence[Tensor | None]


class StepMasks:
    """Static tensors of a step's masks, and the host's staging memory for them.

    Rows that are alike are stored once; one copy brings over the rows that are in use. Memory is
    taken when the step first runs, outside of a capture: only then is V known.

    Args:
        batch: B.
        num_nodes: N of a tree.
        has_biases: some requests have controls; without, memory and time for biases are saved.
        revives: where the logits have nothing but -inf for what a mask allows, as those of a draft
            that lacks these tokens, all that is allowed is equally likely. Without biases.
    """

    def __init__(
        self,
        graphs: GraphDevice,
        batch: int,
        num_nodes: int,
        has_biases: bool,
        revives: bool = False,
    ) -> None:
        self._graphs = graphs
        self._batch = batch
        self._num_rows = batch * num_nodes
        self._has_biases = has_biases
        self._revives = revives
        self._vocab_size = 0
        # bytes before the bits: index of each row, and whether sequences are controlled
        self._head = -(-4 * (self._num_rows + batch) // _ALIGNMENT) * _ALIGNMENT
        self._of_row = torch.arange(self._num_rows, device=graphs.device) // num_nodes
        self._shifts = torch.arange(8, dtype=torch.uint8, device=graphs.device)
        self._fences: list[Event | None] = [None] * NUM_STAGES
        self._next = 0

    def fill(self, masks: NodeMasks) -> None:
        """Queue the masks of a step, which has run before; rows without one are left alone."""
        stage = self._next
        self._next = (stage + 1) % NUM_STAGES
        if (fence := self._fences[stage]) is not None:
            fence.synchronize()
        staging = self._staging[stage]
        index = [-1] * self._num_rows
        places: dict[MaskRow, int] = {}
        for row, mask in masks.rows.items():
            index[row] = places.setdefault(mask, len(places))
        controlled = [int(x) for x in masks.is_controlled]
        controlled += [0] * (self._batch - len(controlled))
        head = torch.tensor([*index, *controlled], dtype=torch.int32)
        staging[: head.nbytes] = head.view(torch.uint8)
        end = self._head + len(places) * self._width
        bits = staging[self._head : end].view(-1, self._width)
        for mask, place in places.items():
            bits[place] = self._bits_of(mask)
        self._device[:end].copy_(staging[:end], non_blocking=True)
        self._fences[stage] = self._graphs.record_event()
        for b in range(self._batch) if self._has_biases else ():
            bias = masks.biases[b] if b < len(masks.biases) else None
            if bias is not self._biased[b]:
                self._biases[b].copy_(self._nothing if bias is None else bias, non_blocking=True)
                self._biased[b] = bias

    def apply(self, logits: Tensor) -> None:
        """Change the logits [B * N, V] of a step in place, as its masks say."""
        if not self._vocab_size:
            self._make(logits.shape[1])
        for first in range(0, self._num_rows, _ROWS_AT_ONCE):
            rows = slice(first, first + _ROWS_AT_ONCE)
            index, own = self._index[rows].long(), self._of_row[rows]
            bits = self._bits[index.clamp(min=0)]
            is_masked = (index >= 0)[:, None]
            allowed = ((bits[:, :, None] >> self._shifts) & 1).flatten(1)[:, : self._vocab_size]
            is_forbidden = (allowed == 0) & is_masked
            if not self._has_biases:
                own_logits = logits[rows].masked_fill_(is_forbidden, -torch.inf)
                if self._revives:
                    is_dead = own_logits.amax(dim=-1, keepdim=True) == -torch.inf
                    own_logits.masked_fill_(is_dead & is_masked & ~is_forbidden, 0.0)
                continue
            # a bias is not rounded before it is added
            changed = logits[rows].float() + self._biases[own]
            changed.masked_fill_(is_forbidden, -torch.inf)
            is_dead = changed.amax(dim=-1, keepdim=True) == -torch.inf
            changed.masked_fill_(is_dead & (self._controlled[own] > 0)[:, None], 0.0)
            logits[rows].copy_(changed)

    def _make(self, vocab_size: int) -> None:
        device = self._graphs.device
        self._vocab_size = vocab_size
        self._width = -(-vocab_size // (8 * _ALIGNMENT)) * _ALIGNMENT
        total = self._head + self._num_rows * self._width
        self._device = torch.zeros(total, dtype=torch.uint8, device=device)
        head = self._device[: self._head].view(torch.int32)
        self._index = head[: self._num_rows]
        self._controlled = head[self._num_rows : self._num_rows + self._batch]
        self._index.fill_(-1)
        self._bits = self._device[self._head :].view(self._num_rows, self._width)
        self._staging = [
            self._graphs.host_buffer(total, dtype=torch.uint8) for _ in range(NUM_STAGES)
        ]
        if self._has_biases:
            self._biases = torch.zeros(self._batch, vocab_size, device=device)
            self._nothing = torch.zeros(vocab_size, device=device)
            self._biased: list[Tensor | None] = [None] * self._batch

    def _bits_of(self, row: MaskRow) -> Tensor:
        """[width] uint8."""
        bits = bytearray(b"\xff" * self._width if row.mask is None else row.mask[: self._width])
        bits += bytes(self._width - len(bits))
        for token in row.forbidden:
            bits[token >> 3] &= ~(1 << (token & 7)) & 0xFF
        return torch.frombuffer(bits, dtype=torch.uint8)
