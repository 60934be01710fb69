"""A device's `Link`: values of the host come and go by copies that nobody waits for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from specc.runtime.backends.graph_device import Event, GraphDevice
from specc.runtime.execution.link import Fetched

# of tensors in a staging buffer, in bytes: what Triton specializes pointers on
_ALIGNMENT = 16
# copies on their way: more than the passes of an iteration, so that a fence mostly is reached
NUM_STAGES = 8


class DeviceLink:
    """Between a host and the device of an engine: pinned staging, events, and one copy a time."""

    def __init__(self, graphs: GraphDevice) -> None:
        self._graphs = graphs
        self._stages: list[Tensor | None] = [None] * NUM_STAGES
        self._fences: list[Event | None] = [None] * NUM_STAGES
        self._next = 0

    def active(self) -> AbstractContextManager[object]:
        return self._graphs.active()

    @torch.inference_mode()
    def send(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Values [any shapes and dtypes] of the host on the device; one copy, queued."""
        places = _places(values)
        with self._graphs.active():
            device = torch.empty(places[-1], dtype=torch.uint8, device=self._graphs.device)
            stage = self._next
            self._next = (stage + 1) % NUM_STAGES
            if (fence := self._fences[stage]) is not None:
                fence.synchronize()
            staging = self._staging(stage, places[-1])
            for view, value in zip(_views(staging, values, places), values, strict=True):
                view.copy_(value)
            device.copy_(staging, non_blocking=True)
            self._fences[stage] = self._graphs.record_event()
        return _views(device, values, places)

    @torch.inference_mode()
    def fetch(self, values: Sequence[Tensor]) -> Fetched:
        """Queue copies of values to the host, after what makes them."""
        found = []
        with self._graphs.active():
            for value in values:
                # a buffer for each: they may be waited for much later
                staging = self._graphs.host_buffer(*value.shape, dtype=value.dtype)
                staging.copy_(value, non_blocking=True)
                found.append(staging)
            return _Coming(found, self._graphs.record_event())

    def _staging(self, stage: int, num_bytes: int) -> Tensor:
        """The stage's buffer, replaced by a longer one where it is too short."""
        buffer = self._stages[stage]
        if buffer is None or buffer.numel() < num_bytes:
            size = max(1 << (num_bytes - 1).bit_length(), _ALIGNMENT)
            buffer = self._stages[stage] = self._graphs.host_buffer(size, dtype=torch.uint8)
        return buffer[:num_bytes]


class _Coming:
    """Copies, and the event after them."""

    def __init__(self, values: list[Tensor], event: Event) -> None:
        self._values = values
        self._event: Event | None = event

    def wait(self) -> list[Tensor]:
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._values


def _places(values: Sequence[Tensor]) -> list[int]:
    """First byte of each value in one buffer, and the buffer's size."""
    places = [0]
    for value in values:
        places.append(-(-(places[-1] + value.nbytes) // _ALIGNMENT) * _ALIGNMENT)
    return places


def _views(flat: Tensor, values: Sequence[Tensor], places: Sequence[int]) -> list[Tensor]:
    return [
        flat[place : place + value.nbytes].view(value.dtype).view(value.shape)
        for place, value in zip(places, values, strict=False)
    ]
