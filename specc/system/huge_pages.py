"""Memory in huge pages, which a processor reads faster than in pages of 4 KB.

Every page that a stream goes through has to be looked up; in virtual machines, each lookup is one
of two tables. What that costs: docs/design/cpu.md.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def are_huge_pages_given(file: Path = _ENABLED) -> bool:
    """Whether Linux gives huge pages to those that ask for them.

    Args:
        file: where it says so, as in `always [madvise] never`.
    """
    try:
        return "[never]" not in file.read_text(encoding="ascii")
    except OSError:
        return False  # no Linux, or one that has none


def ask_for_huge_pages(tensor: Tensor) -> Tensor:
    """Ask for huge pages for what nobody has written yet; returns the tensor.

    No error where there are none. Pages that are there already keep their size, so this comes
    before the first write.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)  # of Linux
    if tensor.device.type == "cpu" and advice is not None:
        first = -(-tensor.data_ptr() // HUGE_PAGE) * HUGE_PAGE
        size = (tensor.data_ptr() + tensor.nbytes) // HUGE_PAGE * HUGE_PAGE - first
        if size > 0:
            madvise = ctypes.CDLL(None).madvise
            madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), ctypes.c_int(advice))
    return tensor


def huge_buffer(num_bytes: int) -> Tensor:
    """Unwritten uint8 [num_bytes] that begins with a huge page, where Linux gives them."""
    whole = torch.empty(num_bytes + HUGE_PAGE, dtype=torch.uint8)
    return _from_a_page(whole, num_bytes)


def huge_zeros(num_bytes: int) -> Tensor:
    """Zeros, uint8 [num_bytes], that begin with a huge page, where Linux gives them.

    The system clears a page when it is first touched: before that it takes no memory.
    """
    # malloc may hand out again what was written before
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    whole = torch.frombuffer(mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=flags), dtype=torch.uint8)
    return _from_a_page(whole, num_bytes)


def _from_a_page(whole: Tensor, num_bytes: int) -> Tensor:
    first = -whole.data_ptr() % HUGE_PAGE
    return ask_for_huge_pages(whole[first : first + num_bytes])


def zeroed_slab(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Tensor:
    """Zeros [*shape]; on a CPU in huge pages, where Linux gives them to those that ask.

    Attention reads blocks from all over a slab: with pages of 4 KB each row or two are another
    page, which has to be looked up. No error where there are none. Rows that no sequence has
    written take no memory there.
    """
    # zeros: a masked row is multiplied by a probability of 0, and 0 * NaN is NaN
    if torch.device(device).type != "cpu" or not (count := math.prod(shape)):
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    return huge_zeros(count * dtype.itemsize).view(dtype).view(tuple(shape))
