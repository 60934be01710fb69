"""What ranks answer: tensors of an engine's types, sizes, and checksums that stand for caches."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specc.runtime.ranks.orders import Kind, Message, refused

# codes of the first tensor: as it is, or one of these types as float32, which holds their values
_AS_IT_IS, _SIZE = 0, 1
_HALF_TYPES = {2: torch.bfloat16, 3: torch.float16}
_CODES = {dtype: code for code, dtype in _HALF_TYPES.items()}


def values_message(values: Sequence[Tensor | int], sequence: int) -> Message:
    """The answer to an order.

    Args:
        values: tensors on the host, and sizes.
        sequence: number of the order.
    """
    codes, tensors = [], []
    for value in values:
        if isinstance(value, Tensor):
            codes.append(_CODES.get(value.dtype, _AS_IT_IS))
            tensors.append(value.float() if codes[-1] else value)
        else:
            codes.append(_SIZE)
            tensors.append(torch.tensor([int(value)]))
    head = torch.tensor(codes, dtype=torch.int64)
    return Message(Kind.DRAFTED, (head, *tensors), sequence=sequence)


def values_of(message: Message) -> list[Any]:
    """What `values_message` was given.

    Raises:
        FaultError: it is another message.
    """
    head, *tensors = message.tensors or (None,)
    codes = [] if head is None or head.dtype != torch.int64 else head.flatten().tolist()
    if head is None or len(codes) != len(tensors) or any(x is None for x in tensors):
        raise refused(f"an answer of {len(tensors)} values with {len(codes)} types")
    found: list[Any] = []
    for code, tensor in zip(codes, tensors, strict=True):
        assert tensor is not None
        if code == _SIZE:
            found.append(int(tensor))
        elif code in _HALF_TYPES or code == _AS_IT_IS:
            found.append(tensor.to(_HALF_TYPES.get(code, tensor.dtype)))
        else:
            raise refused(f"an answer with a value of type {code}")
    return found


def checksum(slabs: Sequence[Tensor]) -> bytes:
    """[32] sha256 of all rows of the slabs of a model, whoever owns them: no cache is sent."""
    digest = hashlib.sha256()
    for part in slabs:
        if part.nbytes:
            slab = part.cpu()
            digest.update((ctypes.c_char * slab.nbytes).from_address(slab.data_ptr()))
    return digest.digest()
