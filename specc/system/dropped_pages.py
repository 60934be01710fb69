"""Memory that goes back to the system while its addresses stay what programs know."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable

import torch
from torch import Tensor

_NO_ADVICE = 4  # MADV_DONTNEED of Linux


def drop_pages(tensors: Iterable[Tensor]) -> int:
    """Give the pages that lie wholly within tensors back to the system.

    What nobody else has there are zeros from then on; of a private map of a file it is what the
    file holds. What lies on pages with something else stays as it is.

    Args:
        tensors: contiguous, on the CPU; nothing may read or write them meanwhile.
    Returns:
        bytes that were given back; 0 where the system has no such advice.
    """
    madvise, dropped = getattr(ctypes.CDLL(None), "madvise", None), 0
    for tensor in tensors:
        first, size = _pages(tensor)
        if madvise is None or size <= 0:
            continue
        sizes = ctypes.c_void_p(first), ctypes.c_size_t(size)
        if madvise(*sizes, ctypes.c_int(getattr(mmap, "MADV_DONTNEED", _NO_ADVICE))) == 0:
            dropped += size
    return dropped


def drop_to_zeros(tensors: Iterable[Tensor]) -> int:
    """The same of memory that is no file's: all of it is zeros from then on."""
    dropped = 0
    for tensor in tensors:
        size, raw = drop_pages([tensor]), _bytes_of(tensor)
        dropped += size
        if not size:
            raw.zero_()
            continue
        first = _pages(tensor)[0] - tensor.data_ptr()
        raw[:first].zero_()
        raw[first + size :].zero_()
    return dropped


def _pages(tensor: Tensor) -> tuple[int, int]:
    """Address and bytes of the pages within a tensor."""
    begin, page = tensor.data_ptr(), mmap.PAGESIZE
    first = -(-begin // page) * page
    return first, (begin + tensor.nbytes) // page * page - first


def _bytes_of(tensor: Tensor) -> Tensor:
    assert tensor.is_contiguous(), "what lies between its rows is not its own"
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
