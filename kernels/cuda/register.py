"""Make the Triton kernels the implementations of the `specc::` operators on a device.

`specc.kernels.ops` gives every operator its oracle, whatever the device; an implementation that is
registered for a device's own dispatch key comes before it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch

from specc.kernels.ops import OPERATORS

_registered: dict[str, torch.library.Library] = {}


def register(dispatch_key: str = "CUDA") -> None:
    """Use the kernels for tensors of this dispatch key, from now on.

    Args:
        dispatch_key: `CUDA`; `CPU` only where Triton interprets, for tests.
    """
    if dispatch_key in _registered:
        return
    library = torch.library.Library("specc", "IMPL")
    for name, kernel in kernels().items():
        library.impl(name, kernel, dispatch_key)
    _registered[dispatch_key] = library


def unregister(dispatch_key: str) -> None:
    """Go back to the oracles."""
    _registered.pop(dispatch_key)._destroy()


def kernels() -> dict[str, Callable]:
    """What runs operators on a GPU, by their names; the oracles run the others."""
    return {
        name: _function(operator.cuda)
        for name, operator in OPERATORS.items()
        if operator.cuda is not None
    }


def _function(place: str) -> Callable:
    module, _, name = place.partition(":")
    found: Callable = getattr(importlib.import_module(f"specc.kernels.cuda.{module}"), name)
    return found
