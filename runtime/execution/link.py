"""Values of the host on their way to where programs run, and back."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor


class Fetched(Protocol):
    """Values on their way to the host."""

    def wait(self) -> list[Tensor]:
        """The values, in memory of the host; the first call waits for the device."""
        ...


class Link(Protocol):
    """Between the host and the device of an engine."""

    def active(self) -> AbstractContextManager[object]:
        """For launches; see `GraphDevice.active`."""
        ...

    def send(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Values [any shapes and dtypes] of the host on the device."""
        ...

    def fetch(self, values: Sequence[Tensor]) -> Fetched:
        """Bring values to the host, after what makes them."""
        ...


class HostLink:
    """A `Link` where programs run on the host: nothing moves."""

    def active(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def send(self, values: Sequence[Tensor]) -> list[Tensor]:
        return list(values)

    def fetch(self, values: Sequence[Tensor]) -> Fetched:
        return _Here(list(values))


def to_device(values: Sequence[Tensor], device: torch.device, link: Link | None) -> list[Tensor]:
    """Values of the host on a device: by its link, or, without one, by copies that wait."""
    return [value.to(device) for value in values] if link is None else link.send(values)


class _Here:
    def __init__(self, values: list[Tensor]) -> None:
        self._values = values

    def wait(self) -> list[Tensor]:
        return self._values
