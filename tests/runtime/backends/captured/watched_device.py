"""A device whose memory is told from the host's, so that copies and reads that wait are seen.

All of it is the memory of one CPU. What lies on the device is what an engine keeps there and what
an operator makes of it; what lies on the host is what Python makes (`torch.tensor`) and what is
made of that. An operator over both is a copy that waits: on a GPU somebody has to move the one to
the other first, and only memory of `host_buffer` moves without a wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.runtime.backends.captured.simulated_device import SimulatedDevice

aten = torch.ops.aten
HOST_READS = ("tolist", "item", "numpy", "__bool__", "__int__", "__float__", "__index__")
# make shapes of values
_WAITING = {
    aten._local_scalar_dense, aten.is_nonzero, aten.equal, aten.nonzero, aten.masked_select,
    aten.unique_dim, aten._unique2, aten.bincount, aten.unique_consecutive,
}  # fmt: skip


class WatchedDevice(SimulatedDevice):
    """Notes in `log` what work is queued, what waits for it, and what would wait without a word.

    Entries are `op`, `wait` (for an event of this watch), `fence` (for an older one) and
    `sync NAME`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self._staging: dict[int, Tensor] = {}
        self._num_events = 0

    def host_buffer(self, *shape: int, dtype: torch.dtype) -> Tensor:
        buffer = super().host_buffer(*shape, dtype=dtype)
        self._staging[_storage(buffer)] = buffer
        return buffer

    def record_event(self) -> Any:
        self._num_events += 1
        return _Event(self, self._num_events)

    @contextlib.contextmanager
    def watch(self, lasting: Iterable[Tensor]) -> Iterator[None]:
        """Note in here what happens."""
        watch = _Watch(self, lasting)
        self.first_event = self._num_events
        with pytest.MonkeyPatch.context() as patch, watch:
            for name in HOST_READS:
                patch.setattr(Tensor, name, watch.guarded(name))
            yield


class _Event:
    def __init__(self, device: WatchedDevice, number: int) -> None:
        self._device = device
        self._number = number

    def synchronize(self) -> None:
        self._device.num_waits += 1
        is_old = self._number <= getattr(self._device, "first_event", 0)
        self._device.log.append("fence" if is_old else "wait")


class _Watch(TorchDispatchMode):
    def __init__(self, device: WatchedDevice, lasting: Iterable[Tensor]) -> None:
        super().__init__()
        self._log = device.log
        self._staging = device._staging
        # the tensors too: memory that is let go of may be another tensor's next
        self._device = {_storage(tensor): tensor for tensor in lasting}
        self._host: dict[int, Tensor] = {}
        # oracles may read what kernels do not
        self._is_inside = False

    def guarded(self, name: str) -> Any:
        method = getattr(Tensor, name)

        def read(tensor: Tensor, *args: Any, **options: Any) -> Any:
            if _storage(tensor) in self._device and not self._is_inside:
                self._log.append(f"sync {name}")
            return method(tensor, *args, **options)

        return read

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        self._is_inside = True
        try:
            result = func(*args, **kwargs)
        finally:
            self._is_inside = False
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        is_of_device = any(_storage(x) in self._device for x in given)
        if func is aten.copy_.default and self._is_staged(args, kwargs):
            if _storage(args[0]) not in self._staging:
                self._device[_storage(args[0])] = args[0]
            self._log.append("op")
        elif is_of_device:
            of_host = [x for x in given if self._is_of_host(x) and x.dim()]
            is_boolean = func.overloadpacket in (aten.index, aten.index_put_) and any(
                x is not None and x.dtype == torch.bool for x in args[1]
            )
            if of_host or is_boolean or func.overloadpacket in _WAITING:
                self._log.append(f"sync {func}")
            elif not func.is_view:
                self._log.append("op")
            self._device |= {_storage(x): x for x in made}
        elif func is aten.lift_fresh.default or any(self._is_of_host(x) for x in given):
            self._host |= {
                _storage(x): x for x in (*made, *given) if _storage(x) not in self._staging
            }
        return result

    def _is_of_host(self, tensor: Tensor) -> bool:
        return _storage(tensor) in self._host or _storage(tensor) in self._staging

    def _is_staged(self, args: tuple, kwargs: dict) -> bool:
        is_free = bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        return is_free and any(_storage(x) in self._staging for x in args[:2])


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
