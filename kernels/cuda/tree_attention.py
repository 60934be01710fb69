"""`specc::tree_attention` and its halves: heads of keys and values, or latents."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from specc.kernels.cuda.attend import attend as attend_heads
from specc.kernels.cuda.attend_latent import attend_latent
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


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_start: Tensor,
    position: Tensor,
    slot: Tensor,
    cache_len: Tensor,
    ancestors: Tensor | None,
    block_table: Tensor,
    sink_logits: Tensor | None = None,
    slopes: Tensor | None = None,
    *,
    scale: float,
    window: int = 0,
    sink: int = 0,
    softcap: float = 0.0,
    values_in_keys: bool = False,
    rounds_bias: bool = False,
    chunk: int = 0,
) -> Tensor:
    """`specc::attend`, by the kernel for heads of keys and values, or by that for latents."""
    places = q_start, position, slot, cache_len, ancestors, block_table, sink_logits
    options: dict[str, Any] = {"scale": scale, "window": window, "sink": sink, "softcap": softcap}
    if values_in_keys:
        # refused when a model is compiled: passes/rewrite/require_supported.py
        assert slopes is None, "no slopes over latents"
        assert not chunk, "no chunks over latents"
        rank = v_cache.shape[3]
        return attend_latent(q, k_cache, rank, *places, **options)
    return attend_heads(
        q, k_cache, v_cache, *places, slopes, **options, rounds_bias=rounds_bias, chunk=chunk
    )


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
    sink_logits: Tensor | None = None,
    slopes: Tensor | None = None,
    *,
    scale: float,
    window: int = 0,
    sink: int = 0,
    softcap: float = 0.0,
    rounds_bias: bool = False,
    most_rows: int = 0,
    chunk: int = 0,
) -> Tensor:
    """`specc::tree_attention` of graphs that no pass has split: two launches and more."""
    # no pass makes graphs for this device so: `expands_prompts` of its facts
    assert not most_rows, "no rows that are expanded on this device"
    write_kv(k, v, k_cache, v_cache, q_start, slot, block_table)
    places = q_start, position, slot, cache_len, ancestors, block_table
    return attend(
        q, k_cache, v_cache, *places, sink_logits, slopes, scale=scale, window=window, sink=sink,
        softcap=softcap, rounds_bias=rounds_bias, chunk=chunk,
    )  # fmt: skip
