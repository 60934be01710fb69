"""`specc::attend` over latents for few tokens of a sequence: when it is taken, its launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from specc.kernels.cuda.attend_call import AttendCall, padded, shipped_pages
from specc.kernels.cuda.attend_config import MOST_REGISTERS
from specc.kernels.cuda.attend_few import FewConfig
from specc.kernels.cuda.attend_latent_few_kernels import (
    QUARTERS,
    TOKENS,
    attend_latent_few_kernel,
)
from specc.kernels.cuda.dependent import launch_options, with_dependent
from specc.kernels.cuda.shipped import TYPE_NAMES, Shipped

# latents are published in it; other types have the kernel for all batches
DTYPE = torch.bfloat16
# columns of a latent, of which a quarter is what tensor cores take at least
RANKS = (64, 128, 256, 512)


@dataclass(frozen=True)
class LatentFewConfig(FewConfig):
    """Launch parameters: rows of a tile, 16 as tensor cores take at least, are merged at a time.

    Args:
        num_values: quarters of a latent that a program has as values.
        most_tiles: of all sequences. Of a few, programs read keys again for each quarter.
    """

    num_values: int = 1
    most_tiles: int = 1


# the first that takes as many tiles as there are; with all values, steps of 64 keys spill
CONFIGS = (
    LatentFewConfig(16, 64, 8, 3, 1, MOST_REGISTERS, 32, 16, 8, 1, 1, 2),
    LatentFewConfig(16, 32, 8, 3, 1, MOST_REGISTERS, 16, 16, 8, 4, QUARTERS.value, 32),
)


def find(call: AttendCall, capability: int) -> LatentFewConfig | None:
    """Launch parameters for a call over latents, if it is one that this is for, on any device."""
    suits = (
        0 < _tokens(call) <= TOKENS.value
        and call.window == 0
        and call.q.dtype == DTYPE
        and call.value_dim in RANKS
    )
    if not suits:
        return None
    c = next((c for c in CONFIGS if call.num_seqs * _tiles(call, c) <= c.most_tiles), None)
    return c if c is not None and call.has_whole_pages(c.block_n) else None


def _tokens(call: AttendCall) -> int:
    """Tokens of each sequence; 0 where they may differ."""
    return call.num_tokens if call.num_seqs == 1 else call.tokens_each


def _tiles(call: AttendCall, c: LatentFewConfig) -> int:
    return triton.cdiv(_tokens(call) * call.num_heads, c.block_m)


def launch(c: LatentFewConfig, call: AttendCall, out: Tensor, num_sms: int) -> None:
    """Launch the kernel with what `find` has found; `out` [Nt, H, R] is written."""
    num_tiles = _tiles(call, c)
    shares = QUARTERS.value // c.num_values
    num_counters = call.num_seqs * num_tiles * shares
    max_splits = c.splits_of(call, num_counters, num_sms)
    num_parts = call.num_seqs * num_tiles * QUARTERS.value * max_splits if max_splits > 1 else 0
    columns = call.value_dim // QUARTERS.value
    attend_latent_few_kernel[(num_tiles * shares, max_splits, call.num_seqs)](
        call.q, call.k_cache, out, *call.parts(num_parts, c.block_m, num_counters, columns),
        *call.places,
        call.num_tokens, call.num_seqs, call.num_heads, *call.sizes, max_splits,
        *call.q.stride()[:2], *call.k_cache.stride()[:2], call.block_table.stride(0),
        call.stride_words,
        **_sizes(call.value_dim, call.head_dim - call.value_dim, c),
        PAGE=call.page(c.block_n),
        IS_TREE=call.ancestors is not None,
        **launch_options(call.q.dtype),
        **call.beside,
        **c.options,
    )  # fmt: skip


def _sizes(rank: int, shared: int, c: LatentFewConfig) -> dict[str, int]:
    return {
        "R": rank, "S": shared, "BC": rank // QUARTERS.value, "BS": padded(shared),
        "NV": c.num_values, "BM": c.block_m, "BN": c.block_n,
        "MERGED": c.merge_parts, "MIN_BLOCKS": c.least_blocks,
    }  # fmt: skip


# what engines are built with: latents of DeepSeek V2 and V3, Kimi K2 and GLM-4.7-Flash
SHIPPED_SIZES = (512, 64)
# older than the keys that the kernel before writes: it finds its places by them; of the cache only
# rows that it does not write
_EARLY = ("q_start", "position", "slot", "cache_len", "block_table", "k_cache")


def shipped(capability: int) -> Iterator[Shipped]:
    """Every configuration that engines launch on a capability."""
    rank, shared = SHIPPED_SIZES
    for c in CONFIGS:
        for item in shipped_pages(
            f"{TYPE_NAMES[DTYPE]}-r{rank}-values{c.num_values}",
            attend_latent_few_kernel, DTYPE, c.block_n, ("q", "k_cache", "out"),
            **_sizes(rank, shared, c), **c.options, early=_EARLY,
        ):  # fmt: skip
            yield from with_dependent(item, capability, DTYPE)
