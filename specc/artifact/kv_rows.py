"""How K and V of a head lie in the cache: in the type of the model, or as codes with a scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# rows in the type of the model
AUTO = "auto"
# quantized rows, a byte each, followed by their scale: signed integers, or numbers of e4m3
INT8, FP8 = "int8", "fp8"
QUANTIZED_ROWS = (INT8, FP8)
KV_CACHE_DTYPES = (AUTO, *QUANTIZED_ROWS)
# what others call one of them
SPELLINGS = {"fp8_e4m3": FP8, "fp8_e4m3fn": FP8}
# a float32 after the bytes of a row: K or V of one token, one layer and one KV head
SCALE_BYTES = 4
# columns of a head up to which the kernels' 32-bit sums of products cannot overflow
MOST_COLUMNS = 1024


def stored_row(head_dim: int, dtype: torch.dtype, kv_cache_dtype: str) -> tuple[int, torch.dtype]:
    """Elements of a row in the cache, and their type, which says how the row is to be read.

    Args:
        head_dim: columns of a head.
        kv_cache_dtype: one of `KV_CACHE_DTYPES`.
    """
    if kv_cache_dtype == AUTO:
        return head_dim, dtype
    import torch  # not for those who ask for names alone

    # the bits of e4m3, not its type: a row ends with other bytes
    return head_dim + SCALE_BYTES, torch.int8 if kv_cache_dtype == INT8 else torch.uint8


def kind_of(stored: torch.dtype) -> str:
    """Which of `KV_CACHE_DTYPES` a cache of this type holds."""
    import torch

    return {torch.int8: INT8, torch.uint8: FP8}.get(stored, AUTO)


def holds_quantized(stored: torch.dtype) -> bool:
    """Whether a cache of this type is quantized."""
    return kind_of(stored) != AUTO


def row_bytes(head_dim: int, dtype: torch.dtype, kv_cache_dtype: str) -> int:
    """Bytes of a row: K or V of one token, one layer and one KV head; arguments as above."""
    columns, stored = stored_row(head_dim, dtype, kv_cache_dtype)
    return columns * stored.itemsize
