"""How K and V of a head lie in the cache: in the type of the model, or as int8 with a scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# rows in the type of the model
AUTO = "auto"
# rows of signed bytes, each followed by its scale
INT8 = "int8"
KV_CACHE_DTYPES = (AUTO, INT8)
# a float32 after the bytes of a row: K or V of one token, one layer and one KV head
SCALE_BYTES = 4
# columns of a head up to which the kernels' 32-bit sums of products cannot overflow
MOST_COLUMNS = 1024


def stored_row(head_dim: int, dtype: torch.dtype, kv_cache_dtype: str) -> tuple[int, torch.dtype]:
    """Elements of a row in the cache, and their type.

    Args:
        head_dim: columns of a head.
        kv_cache_dtype: one of `KV_CACHE_DTYPES`.
    """
    if kv_cache_dtype == INT8:
        import torch  # not for those who ask for names alone

        return head_dim + SCALE_BYTES, torch.int8
    return head_dim, dtype


def row_bytes(head_dim: int, dtype: torch.dtype, kv_cache_dtype: str) -> int:
    """Bytes of a row: K or V of one token, one layer and one KV head; arguments as above."""
    columns, stored = stored_row(head_dim, dtype, kv_cache_dtype)
    return columns * stored.itemsize
