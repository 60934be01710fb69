"""What counts as one binary, and as one launcher."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tests.gpu.compiles import Launches, binary_of


def kernel_of() -> Any:
    def kernel(x, size, stride, factor, BLOCK: tl.constexpr):  # noqa: F821
        """Of any kind."""

    return SimpleNamespace(fn=kernel, kwargs={"do_not_specialize": ["stride"]})


def launches(*calls: tuple[Any, ...]) -> Launches:
    found, kernel = Launches(), kernel_of()
    for call in calls:
        binary, constants = binary_of(kernel, call, {"num_warps": 4})
        found.binaries[binary] += 1
        found.sources[binary] = kernel, constants
    return found


def test_binaries_and_launchers():
    """A launcher is made for types in C: of pointers there is one, and constants have none."""
    bf16, fp32 = (torch.empty(64, dtype=d, device="meta") for d in (torch.bfloat16, torch.float32))
    call = (bf16, 7, 3, 0.5, 64)
    assert len(launches(call, call).binaries) == 1
    for other, num_binaries, num_launchers in (
        ((fp32, 7, 3, 0.5, 64), 2, 1),
        ((bf16[1:], 7, 3, 0.5, 64), 2, 1),
        ((bf16, 16, 3, 0.5, 64), 2, 1),
        ((bf16, 7, 3, 0.5, 128), 2, 1),
        ((bf16, 9, 3, 0.25, 64), 1, 1),
        # folded into constants
        ((bf16, 1, 3, 0.5, 64), 2, 2),
        ((None, 7, 3, 0.5, 64), 2, 2),
        # unless the kernel forbids it
        ((bf16, 7, 1, 0.5, 64), 1, 1),
        ((bf16, 1 << 40, 3, 0.5, 64), 2, 2),
    ):
        found = launches(call, other)
        assert (len(found.binaries), len(found.launchers)) == (num_binaries, num_launchers), other
