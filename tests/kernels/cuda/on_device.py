"""Operators of layers that keep states as the Triton kernels have them, for tests of all of them.

Those tests make tensors on the CPU: here they go to a GPU and come back, where there is one.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from specc.kernels.cuda import tree_conv, tree_recurrence


def operators(device: torch.device) -> Any:
    """`tree_conv`, `tree_recurrence`, `fold_conv` and `fold_recurrence`."""

    def on_device(kernel: Any, written: tuple[int, ...]) -> Any:
        def call(*args: Tensor | None, **options: Any) -> Tensor | None:
            moved = [x if x is None else x.to(device) for x in args]
            result = kernel(*moved, **options)
            for place in written:
                args[place].copy_(moved[place])
            return None if result is None else result.cpu()

        return call

    return SimpleNamespace(
        tree_conv=on_device(tree_conv.tree_conv, (3, 4)),
        tree_recurrence=on_device(tree_recurrence.tree_recurrence, (5, 6)),
        fold_conv=on_device(tree_conv.fold_conv, (0,)),
        fold_recurrence=on_device(tree_recurrence.fold_recurrence, (0,)),
    )
