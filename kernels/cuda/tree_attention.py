"""`specc::tree_attention` and its halves: heads of keys and values, or latents."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from specc.kernels.cuda.attend import attend
from specc.kernels.cuda.slab_rows import write_rows
from specc.kernels.cuda.write_kv import write_kv as write_heads


def write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_start: Tensor,
    slot: Tensor,
    block_table: Tensor,
    *,
    values_in_keys: bool = False,
) -> None:
    """`specc::write_kv`: of latents, one row of any width for each token."""
    if values_in_keys:
        write_rows(k[0], k_cache.squeeze(2), q_start, slot, block_table)
    else:
        write_heads(k, v, k_cache, v_cache, q_start, slot, block_table)


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_start: Tensor,
    position: Tensor,
    slot: Tensor,
    cache_len: Tensor,
    ancestors: Tensor | None,
    block_table: Tensor,
    *of_heads: Tensor | None,
    most_rows: int = 0,
    **options: Any,
) -> Tensor:
    """`specc::tree_attention` of graphs that no pass has split: two launches and more."""
    # no pass makes graphs for this device so: `expands_prompts` of its facts
    assert not most_rows, "no rows that are expanded on this device"
    write_kv(k, v, k_cache, v_cache, q_start, slot, block_table)
    places = q_start, position, slot, cache_len, ancestors, block_table
    return attend(q, k_cache, v_cache, *places, *of_heads, **options)
