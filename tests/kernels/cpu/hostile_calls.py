"""Calls of the native operators with arguments that nobody should give them.

A call begins as one that an engine could make, of a random shape; then some of its arguments are
spoiled: numbers at the ends of their range, indices anywhere, other dtypes, dimensions and strides,
no elements at all. All of it follows from a seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.kernels.cpu.call_parts import DTYPES, Arguments
from tests.kernels.more_calls import CALLS

_INTS = (
    -(2**63), 1 - 2**63, -(2**62), -(2**31) - 1, -(2**31), 1 - 2**31, -65, -2, -1, 0, 1, 2, 7,
    63, 64, 65, 2**20, 2**31 - 2, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 2, 2**63 - 1,
)  # fmt: skip
_FLOATS = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-45, -1.0, 1.0, 3e38, -3e38)


def calls(operator: str, seed: int, num_spoiled: int | None = None) -> Arguments:
    """The arguments, by name, of one call.

    Args:
        operator: of `specc_cpu`.
        seed: of the shape, the values, and what is wrong with them.
        num_spoiled: changes that make it wrong; None is 0 … 3, mostly one.
    """
    rng = random.Random(f"{operator}/{seed}")
    torch.manual_seed(rng.getrandbits(32))
    arguments = CALLS[operator](rng)
    count = rng.choice((0, 1, 1, 1, 2, 3)) if num_spoiled is None else num_spoiled
    for _ in range(count):
        name = rng.choice(list(arguments))
        arguments[name] = spoil(rng, arguments[name])
    return arguments


def hostile_int(rng: random.Random) -> int:
    return rng.choice(_INTS)


def spoil(rng: random.Random, value: Any) -> Any:
    """An argument with something wrong with it, mostly."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((value - 1, value + 1, hostile_int(rng), hostile_int(rng)))
    if isinstance(value, float):
        return rng.choice(_FLOATS)
    if isinstance(value, list):
        spoiled = [spoil(rng, item) if rng.random() < 0.5 else item for item in value]
        return rng.choice((spoiled, value[:-1], [*value, *value]))
    if isinstance(value, str):
        return rng.choice(("", value + value, "\0", "é" * 40))
    if value is None:
        return rng.choice((None, torch.zeros(0), torch.zeros(3, dtype=torch.int32)))
    assert isinstance(value, Tensor)
    return rng.choice(_SPOILERS)(rng, value)


def _in_range(value: int, dtype: torch.dtype) -> int:
    limits = torch.iinfo(dtype)
    return max(limits.min, min(limits.max, value))


def _some_elements(rng: random.Random, tensor: Tensor) -> Tensor:
    """Some elements, or all, are at the end of their range."""
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    if tensor.numel() == 0 or tensor.dtype == torch.bool:
        return tensor
    flat = tensor.view(-1)
    count = rng.choice((1, 1, 2, tensor.numel()))
    for _ in range(count):
        at = rng.randrange(tensor.numel())
        if tensor.is_floating_point():
            flat[at] = rng.choice(_FLOATS)
        else:
            flat[at] = _in_range(hostile_int(rng), tensor.dtype)
    return tensor


def _near_elements(rng: random.Random, tensor: Tensor) -> Tensor:
    """Integers that lie around the sizes of what they index."""
    if tensor.is_floating_point() or tensor.dtype == torch.bool:
        return tensor * 0 + float("nan") if tensor.is_floating_point() else tensor
    highest = int(tensor.max()) if tensor.numel() else 0
    return torch.randint(-2, min(max(highest, 0), 2**62) + 3, tensor.shape).to(tensor.dtype)


def _other_dtype(rng: random.Random, tensor: Tensor) -> Tensor:
    return tensor.to(rng.choice(DTYPES))


def _other_dims(rng: random.Random, tensor: Tensor) -> Tensor:
    choices = [tensor.reshape(-1), tensor.unsqueeze(rng.randint(0, tensor.dim()))]
    if tensor.numel():
        choices.append(tensor.reshape(-1)[0].clone())
    if tensor.dim() and tensor.shape[0]:
        choices.append(tensor[0].clone())
    return rng.choice(choices)


def _other_size(rng: random.Random, tensor: Tensor) -> Tensor:
    """One element more or less in a dimension, or none at all."""
    if tensor.dim() == 0:
        return tensor
    dim = rng.randrange(tensor.dim())
    size = tensor.shape[dim]
    if rng.random() < 0.4:
        return tensor.narrow(dim, 0, 0).clone()
    if rng.random() < 0.5 and size:
        return tensor.narrow(dim, 0, size - 1).clone()
    return torch.cat((tensor, tensor.narrow(dim, 0, min(size, 1))), dim)


def _other_strides(rng: random.Random, tensor: Tensor) -> Tensor:
    """The same values with gaps between them, or in another order of memory."""
    if tensor.dim() == 0:
        return tensor
    dim = rng.randrange(tensor.dim())
    if rng.random() < 0.3 and tensor.shape[dim]:
        return tensor.narrow(dim, 0, 1).clone().expand(tensor.shape)
    if rng.random() < 0.5:
        return torch.stack((tensor, tensor), dim + 1).select(dim + 1, 0)
    order = list(range(tensor.dim()))
    rng.shuffle(order)
    return tensor.permute(order).contiguous().permute([order.index(i) for i in range(len(order))])


_SPOILERS: tuple[Callable[[random.Random, Tensor], Tensor], ...] = (
    _some_elements, _some_elements, _some_elements, _near_elements, _near_elements,
    _other_dtype, _other_dims, _other_size, _other_size, _other_strides,
)  # fmt: skip
